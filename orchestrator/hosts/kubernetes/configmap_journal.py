"""A job's journal in one ConfigMap: a snapshot and the records since, in chunks. Implements
core.journal.Journal.

One controller writes the object at a time. Every write names the resource version that it replaces,
so the next write of a controller that was superseded fails and it stands down (JournalLost). When
the answer to a write is lost, the object is read before the write is repeated: its annotation names
the last writer.

Each commit adds a chunk `tail-000012-<writer>`; a compaction replaces all chunks by a snapshot.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import zlib

from holdfast.orchestrator.core.events import AnyEvent
from holdfast.orchestrator.core.journal import (
    JournalError,
    JournalLost,
    Record,
    decode_records,
    encode_record,
)
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

SNAPSHOT = "snapshot"
TAIL = "tail-"
WRITER = "holdfast.dev/controller"
"""Annotation: the controller that claimed the journal last."""
COMPACT_AT_BYTES = 64 * 1024
"""Every commit makes etcd write the whole object again."""
MAX_BYTES = 1000 * 1024
"""A ConfigMap may hold 1 MiB."""
RETRY_TIMEOUT_S = 3600.0
"""While the API server does not answer, no other controller can do more, and the agents stay
connected to this one. It stands down at once when another one leads (leader_election.py)."""

log = logging.getLogger("holdfast.kubernetes")


class ConfigMapJournal:
    """Opened by `open_journal`."""

    def __init__(
        self, cluster: KubeClient, owner: Owner, document: Document, compact_at_bytes: int
    ) -> None:
        """`document` has just been claimed. Raises JournalError when it cannot be read."""
        self._compact_at_bytes = compact_at_bytes
        self._cluster, self._owner = cluster, owner
        self._name = names.journal_name(owner.name)
        self._writer = str(document["metadata"]["annotations"][WRITER])
        self._version = str(document["metadata"]["resourceVersion"])
        self._data: dict[str, str] = dict(document.get("binaryData") or {})
        self._next = 1 + max((_number(key) for key in self._data), default=0)
        self._pending: list[bytes] = []
        self._commit = asyncio.Lock()
        self.snapshot: bytes | None = None
        self.records: list[Record] = []
        self._read()

    def _read(self) -> None:
        try:
            if SNAPSHOT in self._data:
                self.snapshot = zlib.decompress(base64.b64decode(self._data[SNAPSHOT]))
            for key in sorted(key for key in self._data if key.startswith(TAIL)):
                self.records += decode_records(base64.b64decode(self._data[key]))
        except (ValueError, zlib.error) as error:
            raise JournalError(
                f"ConfigMap {self._owner.namespace}/{self._name}: damaged ({error}). Nothing was "
                f"changed and training is not affected; restore it from a copy, or delete it to "
                f"start the job again from its newest checkpoint"
            ) from None

    # -- core.journal.Journal ------------------------------------------------------------------
    problem = ""

    @property
    def full(self) -> bool:
        size = sum(len(value) for key, value in self._data.items() if key != SNAPSHOT)
        return size * 3 // 4 + sum(map(len, self._pending)) > self._compact_at_bytes

    def append(self, now_ns: int, event: AnyEvent) -> None:
        self._pending.append(encode_record(now_ns, event))

    async def commit(self) -> None:
        async with self._commit:
            if not self._pending:
                return
            count, chunk = len(self._pending), b"".join(self._pending)
            key = f"{TAIL}{self._next:06d}-{self._writer}"
            value = base64.b64encode(chunk).decode()
            await self._write({**self._data, key: value})
            del self._pending[:count]
            self._next += 1

    async def compact(self, snapshot: bytes) -> None:
        async with self._commit:
            self._pending.clear()
            value = base64.b64encode(zlib.compress(snapshot, 6)).decode()
            # The empty chunk names the writer and keeps the count.
            mark = f"{TAIL}{self._next:06d}-{self._writer}"
            await self._write({SNAPSHOT: value, mark: ""})
            self._next += 1

    # -- writing -------------------------------------------------------------------------------
    async def _write(self, after: dict[str, str]) -> None:
        size = sum(len(key) + len(value) * 3 // 4 for key, value in after.items())
        if size > MAX_BYTES:
            raise JournalError(
                f"job {self._owner.key}: the journal needs {size} bytes; a ConfigMap holds "
                f"{MAX_BYTES}; training goes on without a controller"
            )
        loop = asyncio.get_running_loop()
        give_up = loop.time() + RETRY_TIMEOUT_S
        pauses = Backoff(longest_s=5.0)
        while True:
            try:
                await self._attempt(after)
                self._data = after
                return
            except (Unreachable, TooBusy) as error:
                if loop.time() > give_up:
                    raise self._failed(error) from None
                key = self._owner.key
                log.warning("journal of %s: %s; trying again", key, error, extra={"job": key})
            except ApiError as error:
                raise self._failed(error) from None
            await asyncio.sleep(pauses.next_s())

    async def _attempt(self, after: dict[str, str]) -> None:
        namespace = self._owner.namespace
        document = journal_document(self._owner, self._writer, after)
        document["metadata"]["resourceVersion"] = self._version
        try:
            written = await self._cluster.replace(CONFIG_MAPS, namespace, document)
        except NotFound:
            # A user has deleted it; this controller has all of its content.
            key = self._owner.key
            text = "journal of %s: the ConfigMap was deleted; it is created again"
            log.warning(text, key, extra={"job": key})
            written = await self._create(after)
        except Conflict:
            written = await self._cluster.get(CONFIG_MAPS, namespace, self._name)
            data = written.get("binaryData") or {}
            # Our own write, if the answer to an earlier attempt was lost, or an edited label.
            if _writer(written) != self._writer or data not in (after, self._data):
                raise JournalLost(
                    f"job {self._owner.key}: another controller writes the journal; this one "
                    f"stands down"
                ) from None
            self._version = str(written["metadata"]["resourceVersion"])
            if data != after:
                await self._attempt(after)
            return
        self._version = str(written["metadata"]["resourceVersion"])

    async def _create(self, data: dict[str, str]) -> Document:
        try:
            return await self._cluster.create(
                CONFIG_MAPS,
                self._owner.namespace,
                journal_document(self._owner, self._writer, data),
            )
        except Conflict:
            raise JournalLost(
                f"job {self._owner.key}: another controller writes the journal"
            ) from None

    def _failed(self, error: ApiError) -> JournalError:
        return JournalError(
            f"job {self._owner.key}: the journal cannot be written ({error}); training goes on "
            f"without a controller"
        )


def journal_document(owner: Owner, writer: str, data: dict[str, str]) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": names.journal_name(owner.name),
            "namespace": owner.namespace,
            "labels": {names.LABEL_JOB: owner.name, "app.kubernetes.io/managed-by": "holdfast"},
            "annotations": {WRITER: writer},
            "ownerReferences": [names.owner_reference(owner.name, owner.uid)],
        },
        "binaryData": data,
    }


async def open_journal(
    cluster: KubeClient,
    owner: Owner,
    *,
    fresh: bool = False,
    compact_at_bytes: int = COMPACT_AT_BYTES,
) -> ConfigMapJournal:
    """The journal of a job, created if there is none. `fresh`: most likely there is none yet, so
    it is created without looking for it.

    Opening claims the journal with a write, so that the next write of a controller that is still
    running fails. Raises JournalError, JournalLost and ApiError.
    """
    name, writer = names.journal_name(owner.name), secrets.token_hex(4)
    found = None if fresh else await cluster.find(CONFIG_MAPS, owner.namespace, name)
    if found is None:
        document = journal_document(owner, writer, {})
        try:
            created = await cluster.create(CONFIG_MAPS, owner.namespace, document)
            return ConfigMapJournal(cluster, owner, created, compact_at_bytes)
        except Conflict:
            if not fresh:
                raise
            found = await cluster.get(CONFIG_MAPS, owner.namespace, name)
    if not is_owned(found, owner):
        raise JournalError(
            f"ConfigMap {owner.namespace}/{name}: belongs to an earlier job of this name, which is "
            f"being deleted; the job starts when it is gone"
        )
    claim = journal_document(owner, writer, found.get("binaryData") or {})
    claim["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
    try:
        touched = await cluster.replace(CONFIG_MAPS, owner.namespace, claim)
    except Conflict:
        raise JournalLost(f"job {owner.key}: another controller writes the journal") from None
    return ConfigMapJournal(cluster, owner, touched, compact_at_bytes)


def is_owned(document: Document, owner: Owner) -> bool:
    """The object belongs to this job and not to an earlier one of the same name."""
    references = document["metadata"].get("ownerReferences") or ()
    return any(one.get("uid") == owner.uid for one in references)


def _writer(document: Document) -> str:
    return str((document["metadata"].get("annotations") or {}).get(WRITER, ""))


def _number(key: str) -> int:
    """The number of a chunk; 0 for anything else."""
    part = key.removeprefix(TAIL).partition("-")[0]
    return int(part) if key.startswith(TAIL) and part.isdigit() else 0
