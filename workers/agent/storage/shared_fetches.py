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
        one = self._running.get(shard)
        if one is None:
            one = self._running[shard] = _Fetch(asyncio.ensure_future(fetch()), readers)
        one.waiting += 1
        try:
            found = await asyncio.shield(one.task)
        except BaseException:
            self._forget(shard, one)
            raise
        finally:
            one.waiting -= 1
        if isinstance(found, str):
            self._forget(shard, one)
            return found
        fd, num_bytes = found
        own = os.dup(fd)
        one.left -= 1
        self._close_if_unused(shard, one)
        return own, num_bytes

    def begin(self, generation: int) -> None:
        """Closes what workers of an older generation have not got."""
        if generation <= self._generation:
            return
        self._generation = generation
        for shard, one in list(self._running.items()):
            one.left = 0
            self._forget(shard, one)
            one.task.add_done_callback(partial(self._ended, shard, one))

    def _ended(self, shard: int, one: _Fetch, _: asyncio.Future[Fetched]) -> None:
        self._close_if_unused(shard, one)

    def _forget(self, shard: int, one: _Fetch) -> None:
        if self._running.get(shard) is one:
            del self._running[shard]

    def _close_if_unused(self, shard: int, one: _Fetch) -> None:
        if one.left > 0 or one.waiting or one.task.cancelled() or one.task.exception() is not None:
            return
        self._forget(shard, one)
        found = one.task.result()
        if not isinstance(found, str):
            os.close(found[0])
