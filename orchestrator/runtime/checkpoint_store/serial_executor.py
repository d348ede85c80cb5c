"""Blocking calls of one job, one after the other, each in a thread of its own.

Owns: the order of one job's calls. Must not: share threads. A call that hangs holds up its own job
and nobody else: with threads for all, some jobs whose store does not answer would keep every other
from it. A thread ends with its call; an idle job costs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

THREADS = "storage"
"""What their names begin with."""

P = ParamSpec("P")
R = TypeVar("R")


class SerialExecutor:
    """Of one job, or of one of its places."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Future[Any]] = set()

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it when all calls before it have ended. Being cancelled while it waits, it never
        runs; while it runs, it runs to its end, and the next call waits for that."""
        async with self._turn:
            await self._ended()
            thread = ThreadPoolExecutor(1, thread_name_prefix=THREADS)
            work = asyncio.get_running_loop().run_in_executor(
                thread, lambda: function(*args, **kwargs)
            )
            thread.shutdown(wait=False)  # when this call has ended
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
