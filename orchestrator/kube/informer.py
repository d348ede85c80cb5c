"""A local copy of all objects of one kind, kept current by one list and then one watch.

A watch resumes from the last resource version; the informer lists again when the server no longer
has that version. Failed requests are retried with exponential backoff and jitter. The client
library has an informer for threads only.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Literal

from .client import Document, KubeClient
from .errors import ApiError, Expired, Resource

Change = Literal["ADDED", "MODIFIED", "DELETED"]
Key = tuple[str, str]
"""(namespace, name)"""
PAUSE_MIN_S = 0.25
PAUSE_MAX_S = 30.0
SHORT_WATCH_S = 1.0
"""A watch that ends sooner counts as failed."""

log = logging.getLogger("holdfast.kubernetes")


class Backoff:
    """Exponential pauses between attempts, with jitter so that clients spread out."""

    def __init__(self, shortest_s: float = PAUSE_MIN_S, longest_s: float = PAUSE_MAX_S) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._next_s = shortest_s

    def reset(self) -> None:
        self._next_s = self._shortest_s

    def next_s(self) -> float:
        """Seconds to pause: between half of the pause and all of it."""
        pause_s = self._next_s * (0.5 + random.random() / 2)
        self._next_s = min(2 * self._next_s, self._longest_s)
        return pause_s


class Informer:
    """Calls `on_change(change, object)` from the event loop in order, after `objects` is updated;
    for DELETED with the last state."""

    def __init__(
        self,
        cluster: KubeClient,
        resource: Resource,
        on_change: Callable[[Change, Document], None],
        *,
        namespace: str = "",
        selector: str = "",
        trim: Callable[[Document], Document] = lambda document: document,
    ) -> None:
        """`namespace`: empty for all. `trim` removes the fields that are not needed."""
        self._cluster, self._resource, self._on_change = cluster, resource, on_change
        self._namespace, self._selector, self._trim = namespace, selector, trim
        self.objects: dict[Key, Document] = {}
        self.synced = asyncio.Event()
        self.problem = ""
        """Reason why `objects` is not current; empty while the watch works."""

    async def run(self) -> None:
        """Run until cancelled."""
        backoff = Backoff()
        while True:
            try:
                version = await self._list()
                backoff.reset()
                await self._watch(version, backoff)
            except Expired:
                log.info("%s: listing again, the watch has expired", self._resource.plural)
            except ApiError as error:
                self._set_problem(str(error))
            await asyncio.sleep(backoff.next_s())

    async def _watch(self, version: str, backoff: Backoff) -> None:
        """Successive watches, each from the last resource version."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                watch = self._cluster.watch(
                    self._resource,
                    version,
                    self._namespace,
                    self._selector,
                    on_open=lambda: self._set_problem(""),
                )
                async for kind, document in watch:
                    version = document["metadata"]["resourceVersion"]
                    backoff.reset()
                    if kind != "BOOKMARK":
                        self._apply(kind, self._trim(document))
            except Expired:
                raise
            except ApiError as error:
                self._set_problem(str(error))
                await asyncio.sleep(backoff.next_s())
                continue
            if loop.time() - began < SHORT_WATCH_S:  # a server that shuts down ends them at once
                await asyncio.sleep(backoff.next_s())

    async def _list(self) -> str:
        documents, version = await self._cluster.list_all(
            self._resource, self._namespace, self._selector
        )
        objects = {key_of(document): self._trim(document) for document in documents}
        for key in [key for key in self.objects if key not in objects]:
            self._apply("DELETED", self.objects[key])
        for document in objects.values():
            self._apply("MODIFIED", document)
        self._set_problem("")
        self.synced.set()
        return version

    def _apply(self, kind: str, document: Document) -> None:
        key = key_of(document)
        old = self.objects.get(key)
        if kind == "DELETED":
            self.objects.pop(key, None)
            self._on_change("DELETED", document)
        elif old is None or _version(old) != _version(document):
            self.objects[key] = document
            same = old is not None and old["metadata"]["uid"] == document["metadata"]["uid"]
            if old is not None and not same:
                self._on_change("DELETED", old)
            self._on_change("MODIFIED" if same else "ADDED", document)

    def _set_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.warning("%s cannot be watched: %s", self._resource.plural, problem)
        self.problem = problem


def key_of(document: Document) -> Key:
    metadata: dict[str, Any] = document["metadata"]
    return str(metadata.get("namespace", "")), str(metadata["name"])


def _version(document: Document) -> str:
    return str(document["metadata"]["resourceVersion"])
