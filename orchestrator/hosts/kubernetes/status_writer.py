"""Writes what there is to see of one job into its object: status, Events, labels of pods.

Owns: when it is written (at once when a condition changes, at most every few seconds otherwise) and
that an edited status is overwritten. Must not: decide anything about the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import API_VERSION, KIND
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import (
    JOBS,
    ApiError,
    Conflict,
    NotFound,
    TooBusy,
    Unreachable,
)
from holdfast.orchestrator.kube.informer import Backoff
from holdfast.orchestrator.kube.names import Owner

INTERVAL_S = 5.0
SETTLE_S = 0.05
"""Changes that come together are written together."""
REMEMBERED = 16
"""Own writes whose echo may still be on its way."""
PASSING = (Unreachable, TooBusy, Conflict)
"""Nobody has to do anything about these: the next attempt may go through."""

log = logging.getLogger("holdfast.operator")

Document = dict[str, Any]
Build = Callable[[Sequence[Document]], Document]
"""Conditions that stand there now -> the whole status."""


class StatusWriter:
    """Of one job. `dirty` says that `build` may say something else now; `urgent`: in a condition,
    which must not wait."""

    def __init__(
        self,
        cluster: KubeClient,
        owner: Owner,
        before: Document,
        build: Build,
        tell: Callable[[str], None],
    ) -> None:
        """`tell`: called when the status can no longer be written, and why; once per reason. A
        status that stands still looks like a job that does."""
        self._cluster, self._owner, self._build, self._tell = cluster, owner, build, tell
        self._problem = ""
        self._last: Document = before
        """As it stands in the object, as far as we know."""
        self._versions: deque[str] = deque(maxlen=REMEMBERED)
        self._news, self._urgent = asyncio.Event(), asyncio.Event()
        self._edited: set[str] = set()
        """Fields that somebody has put there and that are not ours."""
        self._written_at = float("-inf")
        self._writing = False
        self._held: Document | None = None

    def dirty(self, *, urgent: bool = False) -> None:
        self._news.set()
        if urgent:
            self._urgent.set()

    def seen(self, document: Document) -> None:
        """The object has changed: by us, or somebody has edited its status."""
        if self._writing:
            self._held = document  # most likely the echo of a write whose answer is on its way
            return
        if document["metadata"]["resourceVersion"] in self._versions:
            return
        status = document.get("status") or {}
        if self._versions and status != self._last:
            self._edited = set(status) - set(self._last)
            self._last = status
            self.dirty(urgent=True)

    async def run(self) -> None:
        """For ever. A status that cannot be written is tried again; the job does not wait."""
        pauses = Backoff(0.5, 30.0)
        while True:
            await self._news.wait()
            wait_s = self._written_at + INTERVAL_S - asyncio.get_running_loop().time()
            # Not wait_for: in Python 3.11 it forgets that it was cancelled when what it waits for
            # happens at the same time, and an operator that stands down would wait for us for ever.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._urgent.wait()
            await asyncio.sleep(SETTLE_S)
            self._news.clear()
            self._urgent.clear()
            try:
                await self.write()
                pauses.reset()
                self._note(None)
            except NotFound:
                return
            except ApiError as error:
                self._note(error)
                self._news.set()
                await asyncio.sleep(pauses.next_s())

    def _note(self, error: ApiError | None) -> None:
        """How the last attempt ended."""
        if error is None:
            if self._problem:
                log.info("the status is written again", extra={"job": self._owner.key})
            self._problem = ""
        elif self._problem != str(error):
            self._problem = str(error)
            text = f"the status cannot be written: {error}; trying again"
            if isinstance(error, PASSING):
                log.info("%s", text, extra={"job": self._owner.key})
            else:
                self._tell(text)

    async def write(self) -> None:
        """Now. Raises the errors of the API."""
        self._writing = True
        try:
            await self._write()
        finally:
            self._writing = False
            held, self._held = self._held, None
            if held is not None:
                self.seen(held)

    async def _write(self) -> None:
        self._written_at = asyncio.get_running_loop().time()
        status = self._build(self._last.get("conditions") or ())
        if status == self._last and not self._edited:
            return
        namespace, name = self._owner.namespace, self._owner.name
        if self._edited:
            drop = {"status": dict.fromkeys(self._edited)}
            written = await self._cluster.patch(JOBS, namespace, name, drop, subresource="status")
            self._versions.append(str(written["metadata"]["resourceVersion"]))
            self._edited = set()
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace, "uid": self._owner.uid},
            "status": status,
        }
        written = await self._cluster.apply(JOBS, namespace, name, body, subresource="status")
        self._versions.append(str(written["metadata"]["resourceVersion"]))
        self._last = written.get("status") or {}
