"""A local copy of all objects of one kind: one list, then one watch, for all jobs together.

Owns: keeping it up to date: watches are resumed from the last resource version, listed anew when
the server does not remember that far, and tried again with growing, random pauses. Must not: know
what the objects mean.
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
SHORT_S = 1.0
"""A watch that ends sooner has not been one."""

log = logging.getLogger("holdfast.kubernetes")


class Backoff:
    """Between attempts: longer each time, and random, so that many do not come at once."""

    def __init__(self, shortest_s: float = PAUSE_MIN_S, longest_s: float = PAUSE_MAX_S) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._next_s = shortest_s

    def reset(self) -> None:
        self._next_s = self._shortest_s

    def next_s(self) -> float:
        """Half of it for sure, half by chance."""
        pause_s = self._next_s * (0.5 + random.random() / 2)
        self._next_s = min(2 * self._next_s, self._longest_s)
        return pause_s


class Informer:
    """`on_change(change, object)` is called from the event loop, in the order of changes; for
    DELETED with the last state. `objects` is as of then."""

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
        """`namespace`: empty: all. `trim`: drops what nobody here needs."""
        self._cluster, self._resource, self._on_change = cluster, resource, on_change
        self._namespace, self._selector, self._trim = namespace, selector, trim
        self.objects: dict[Key, Document] = {}
        self.synced = asyncio.Event()
        self.problem = ""
        """Why it is not up to date; empty when it is, as far as anybody knows."""

    async def run(self) -> None:
        """For ever."""
        pauses = Backoff()
        while True:
            try:
                version = await self._list()
                pauses.reset()
                await self._follow(version, pauses)
            except Expired:
                log.info("%s: listing anew, the watch was too old", self._resource.plural)
            except ApiError as error:
                self._say(str(error))
            await asyncio.sleep(pauses.next_s())

    async def _follow(self, version: str, pauses: Backoff) -> None:
        """One watch after the other, each from where the last one ended."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                watch = self._cluster.watch(
                    self._resource,
                    version,
                    self._namespace,
                    self._selector,
                    on_open=lambda: self._say(""),
                )
                async for kind, document in watch:
                    version = document["metadata"]["resourceVersion"]
                    pauses.reset()
                    if kind != "BOOKMARK":
                        self._take(kind, self._trim(document))
            except Expired:
                raise
            except ApiError as error:
                self._say(str(error))
                await asyncio.sleep(pauses.next_s())
                continue
            if loop.time() - began < SHORT_S:  # a server that is being stopped ends them at once
                await asyncio.sleep(pauses.next_s())

    async def _list(self) -> str:
        documents, version = await self._cluster.list_all(
            self._resource, self._namespace, self._selector
        )
        found = {key_of(document): self._trim(document) for document in documents}
        for key in [key for key in self.objects if key not in found]:
            self._take("DELETED", self.objects[key])
        for document in found.values():
            self._take("MODIFIED", document)
        self._say("")
        self.synced.set()
        return version

    def _take(self, kind: str, document: Document) -> None:
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

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.warning("%s cannot be watched: %s", self._resource.plural, problem)
        self.problem = problem


def key_of(document: Document) -> Key:
    metadata: dict[str, Any] = document["metadata"]
    return str(metadata.get("namespace", "")), str(metadata["name"])


def _version(document: Document) -> str:
    return str(document["metadata"]["resourceVersion"])
