"""Shards that several workers of a node restore: each is fetched once, into one memory file.

Eight ranks of a new node with the same state (DDP, HSDP within the node) would otherwise fetch it
eight times, and keep eight copies of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

Fetched = tuple[int, int] | str
"""(descriptor of a memory file, its bytes), or why there is none."""


@dataclass
class _Fetch:
    task: asyncio.Future[Fetched]
    left: int
    """Workers that have not got the shard yet."""
    waiting: int = 0


class SharedFetches:
    """The shards of one generation that are on their way, or that a worker has still to get."""

    def __init__(self) -> None:
        self._generation = 0
        self._running: dict[int, _Fetch] = {}

    async def get(
        self, generation: int, shard: int, readers: int, fetch: Callable[[], Awaitable[Fetched]]
    ) -> Fetched:
        """A descriptor of its own for each of `readers` workers. `fetch` is called for the first
        one, and again after a failure."""
        self.begin(generation)
        if generation < self._generation:
            return await fetch()
        running = self._running.get(shard)
        if running is None:
            running = self._running[shard] = _Fetch(asyncio.ensure_future(fetch()), readers)
        running.waiting += 1
        try:
            fetched = await asyncio.shield(running.task)
        except BaseException:
            self._forget(shard, running)
            raise
        finally:
            running.waiting -= 1
        if isinstance(fetched, str):
            self._forget(shard, running)
            return fetched
        fd, num_bytes = fetched
        own = os.dup(fd)
        running.left -= 1
        self._close_if_unused(shard, running)
        return own, num_bytes

    def begin(self, generation: int) -> None:
        """Closes what workers of an older generation have not got."""
        if generation <= self._generation:
            return
        self._generation = generation
        for shard, running in list(self._running.items()):
            running.left = 0
            self._forget(shard, running)
            running.task.add_done_callback(partial(self._ended, shard, running))

    def _ended(self, shard: int, one: _Fetch, _: asyncio.Future[Fetched]) -> None:
        self._close_if_unused(shard, one)

    def _forget(self, shard: int, one: _Fetch) -> None:
        if self._running.get(shard) is one:
            del self._running[shard]

    def _close_if_unused(self, shard: int, one: _Fetch) -> None:
        if one.left > 0 or one.waiting or one.task.cancelled() or one.task.exception() is not None:
            return
        self._forget(shard, one)
        fetched = one.task.result()
        if not isinstance(fetched, str):
            os.close(fetched[0])
