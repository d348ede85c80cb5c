"""Shards that several workers of a node restore: each is fetched once, into one memory file.

Eight ranks of a new node with the same state (DDP, HSDP within the node) would otherwise fetch it
eight times, and keep eight copies of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .memfd import Memfd

Fetched = Memfd | str
"""The shard, or why there is none."""


@dataclass
class _Fetch:
    task: asyncio.Future[Fetched]
    left: int
    """Workers that have not got the shard yet."""


class SharedFetches:
    """The shards of one generation that are on their way, or that a worker has still to get."""

    def __init__(self) -> None:
        self._generation = 0
        self._running: dict[int, _Fetch] = {}

    async def get(
        self, generation: int, shard: int, readers: int, fetch: Callable[[], Awaitable[Fetched]]
    ) -> Fetched:
        """The same memory for each of `readers` workers. `fetch` is called for the first one, and
        again after a failure."""
        self.begin(generation)
        if generation < self._generation:
            return await fetch()
        running = self._running.get(shard)
        if running is None:
            running = self._running[shard] = _Fetch(asyncio.ensure_future(fetch()), readers)
        fetched: Fetched = ""
        try:
            fetched = await asyncio.shield(running.task)
            return fetched
        finally:
            running.left -= 1
            over = running.left <= 0 or isinstance(fetched, str)
            if over and self._running.get(shard) is running:
                del self._running[shard]

    def begin(self, generation: int) -> None:
        """Forget what workers of an older generation have not got."""
        if generation > self._generation:
            self._generation = generation
            self._running.clear()
