"""The journal of a job in one ConfigMap.

Every write names the resource version that it replaces, so the next write of a controller that was
superseded fails and it stands down (JournalLost). When the answer to a write is lost, the object is
read before the write is repeated: its annotation names the last writer.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import logging
import secrets

from holdfast.orchestrator.core.journal import JournalDamaged, JournalError, JournalLost
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import (
    CONFIG_MAPS,
    ApiError,
    Conflict,
    NotFound,
    TooBusy,
    Unreachable,
)
from holdfast.orchestrator.kube.informer import Backoff
from holdfast.orchestrator.kube.names import Owner

from .chunk_journal import SNAPSHOT, Chunk, from_snapshot, number, read

WRITER = "holdfast.dev/controller"
"""Annotation: the controller that claimed the journal last."""
COMPACT_AT_BYTES = 64 * 1024
"""Every commit makes etcd write the whole object again."""
MAX_BYTES = 1000 * 1024
"""A ConfigMap may hold 1 MiB."""
RETRY_TIMEOUT_S = 3600.0
"""Patience with an API server that does not answer: no other controller can do more, and the agents
stay connected. A controller stands down as soon as another one leads (leader_election.py)."""

log = logging.getLogger("holdfast.kubernetes")


class ConfigMapStore:
    """A Store in a ConfigMap, which is kept here as it was last read or written."""

    prompt = keeps_history = False

    def __init__(
        self,
        cluster: KubeClient,
        owner: Owner,
        *,
        fresh: bool = False,
        compact_at_bytes: int = COMPACT_AT_BYTES,
    ) -> None:
        """`fresh`: most likely there is none yet, so it is created without looking for it."""
        self._cluster, self._owner, self._fresh = cluster, owner, fresh
        self._compact_at_bytes = compact_at_bytes
        self._name, self._writer = names.journal_name(owner.name), secrets.token_hex(4)
        self.place = f"ConfigMap {owner.namespace}/{self._name}"
        self._version = ""
        self._data: dict[str, str] = {}

    def list(self, *, history: bool = False) -> builtins.list[str]:
        return from_snapshot(sorted(self._data, key=number))

    def get(self, name: str) -> bytes | None:
        try:
            return base64.b64decode(self._data[name])
        except ValueError as error:
            raise JournalDamaged(self.place, f"{name}: {error}") from None

    def full_at(self, snapshot_bytes: int) -> int:
        return self._compact_at_bytes

    def close(self) -> None:
        """Do nothing: the store holds nothing."""

    # -- writing --------------------------------------------------------------------------------
    async def claim(self) -> builtins.list[Chunk]:
        """Writes, so that the next write of a controller that is still running fails. Creates the
        object if there is none. Raises ApiError too."""
        get = (CONFIG_MAPS, self._owner.namespace, self._name)
        config_map = None if self._fresh else await self._cluster.find(*get)
        if config_map is None:
            try:
                await self._create({})
                return []
            except JournalLost:
                if not self._fresh:
                    raise
                config_map = await self._cluster.get(*get)
        if not self._owner.owns(config_map):
            raise JournalError(
                f"{self.place}: belongs to an earlier job of this name, which is being deleted; "
                f"the job starts when it is gone"
            )
        self._version = str(config_map["metadata"]["resourceVersion"])
        data = config_map.get("binaryData") or {}
        try:
            await self._replace(data)
        except Conflict:
            raise self._lost() from None
        try:
            return read(self)
        except ValueError as error:  # the name of a chunk
            raise JournalDamaged(self.place, str(error)) from None

    async def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        before = {} if name.startswith(SNAPSHOT) else self._data
        after = {**before, name: base64.b64encode(data).decode()}
        size = sum(len(key) + len(value) * 3 // 4 for key, value in after.items())
        if size > MAX_BYTES:
            raise JournalError(
                f"job {self._owner.key}: the journal needs {size} bytes; a ConfigMap holds "
                f"{MAX_BYTES}; training continues without a controller"
            )
        loop = asyncio.get_running_loop()
        give_up = loop.time() + RETRY_TIMEOUT_S
        pauses = Backoff(longest_s=5.0)
        while True:
            try:
                return await self._attempt(after)
            except (Unreachable, TooBusy) as error:
                if loop.time() > give_up:
                    raise self._failed(error) from None
                key = self._owner.key
                log.warning("journal of %s: %s; trying again", key, error, extra={"job": key})
            except ApiError as error:
                raise self._failed(error) from None
            await asyncio.sleep(pauses.next_s())

    async def _attempt(self, after: dict[str, str]) -> None:
        try:
            await self._replace(after)
        except NotFound:
            # A user has deleted it; this controller has all of its content.
            key = self._owner.key
            text = "journal of %s: the ConfigMap was deleted; it is created again"
            log.warning(text, key, extra={"job": key})
            await self._create(after)
        except Conflict:
            written = await self._cluster.get(CONFIG_MAPS, self._owner.namespace, self._name)
            data = written.get("binaryData") or {}
            # Our own write, if the answer to an earlier attempt was lost, or an edited label.
            if _writer(written) != self._writer or data not in (after, self._data):
                raise self._lost() from None
            self._version, self._data = str(written["metadata"]["resourceVersion"]), data
            if data != after:
                await self._attempt(after)

    async def _replace(self, data: dict[str, str]) -> None:
        document = self._document(data)
        document["metadata"]["resourceVersion"] = self._version
        self._written(await self._cluster.replace(CONFIG_MAPS, self._owner.namespace, document))

    async def _create(self, data: dict[str, str]) -> None:
        document, namespace = self._document(data), self._owner.namespace
        try:
            self._written(await self._cluster.create(CONFIG_MAPS, namespace, document))
        except Conflict:
            raise self._lost() from None

    def _written(self, document: Document) -> None:
        self._version = str(document["metadata"]["resourceVersion"])
        self._data = dict(document.get("binaryData") or {})

    def _document(self, data: dict[str, str]) -> Document:
        owner = self._owner
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": self._name,
                "namespace": owner.namespace,
                "labels": {names.LABEL_JOB: owner.name, "app.kubernetes.io/managed-by": "holdfast"},
                "annotations": {WRITER: self._writer},
                "ownerReferences": [names.owner_reference(owner.name, owner.uid)],
            },
            "binaryData": data,
        }

    def _lost(self) -> JournalLost:
        return JournalLost(
            f"job {self._owner.key}: another controller writes the journal; this one stands down"
        )

    def _failed(self, error: ApiError) -> JournalError:
        return JournalError(
            f"job {self._owner.key}: the journal cannot be written ({error}); training continues "
            f"without a controller"
        )


def _writer(document: Document) -> str:
    return str((document["metadata"].get("annotations") or {}).get(WRITER, ""))
