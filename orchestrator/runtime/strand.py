"""Blocking calls of one job, one after the other, in threads that all jobs share.

Owns: the order of one job's calls. Must not: own threads; an idle job costs none. A call that hangs
holds up its own job and one of the shared threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Strand:
    """`threads`: where the calls run; None: the event loop's own pool."""

    def __init__(self, threads: ThreadPoolExecutor | None = None) -> None:
        self._threads = threads
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Future[Any]] = set()

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it when all calls before it have ended. Being cancelled while it waits, it never
        runs; while it runs, it runs to its end, and the next call waits for that."""
        async with self._turn:
            await self._ended()
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))
            self._running.add(work)
            work.add_done_callback(self._over)
            # A cancelled future would forget the thread, which cannot be cancelled.
            return await asyncio.shield(work)

    async def settle(self) -> None:
        """Until everything called so far has ended."""
        async with self._turn:
            await self._ended()

    def _over(self, work: asyncio.Future[Any]) -> None:
        self._running.discard(work)
        if not work.cancelled():
            work.exception()  # whoever called may have been cancelled, and asks no more

    async def _ended(self) -> None:
        while self._running:
            await asyncio.wait(list(self._running))
