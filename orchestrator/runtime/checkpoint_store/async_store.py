"""The storage tier for the event loop: the calls of one job run one after the other in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from .store import CheckpointStore

THREAD_NAME_PREFIX = "storage"
P = ParamSpec("P")
R = TypeVar("R")


class SerialExecutor:
    """Blocking calls of one job, one after the other, each in a thread of its own.

    A shared pool would let a few jobs whose store does not answer block the storage of all others.
    A thread ends with its call, so an idle job costs none.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Future[Any]] = set()

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function after all earlier calls. If it is cancelled while it waits, it never
        runs; if it is cancelled while it runs, it runs to its end and the next call waits."""
        async with self._turn:
            await self._ended()
            thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME_PREFIX)
            work = asyncio.get_running_loop().run_in_executor(
                thread, lambda: function(*args, **kwargs)
            )
            thread.shutdown(wait=False)  # takes effect when this call has ended
            self._running.add(work)
            work.add_done_callback(self._done)
            # A cancelled future would lose track of the thread, which cannot be cancelled.
            return await asyncio.shield(work)

    async def settle(self) -> None:
        """Wait until all calls so far have ended."""
        async with self._turn:
            await self._ended()

    def _done(self, work: asyncio.Future[Any]) -> None:
        self._running.discard(work)
        if not work.cancelled():
            work.exception()  # retrieved here, because a cancelled caller never does it

    async def _ended(self) -> None:
        while self._running:
            await asyncio.wait(list(self._running))


class ThreadedCheckpointStore:
    """The calls of a CheckpointStore, carried out in the order in which they were made."""

    def __init__(self, open_store: Callable[[], CheckpointStore], executor: SerialExecutor) -> None:
        """`open_store` is called in a thread with the first call, and again until it succeeds: some
        drivers connect when they are created."""
        self._open_store, self._executor = open_store, executor
        self._opened: CheckpointStore | None = None

    async def call(
        self,
        method: Callable[Concatenate[CheckpointStore, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a method of the store."""
        return await self._executor.call(lambda: method(self._store(), *args, **kwargs))

    async def settle(self) -> None:
        await self._executor.settle()

    def _store(self) -> CheckpointStore:
        if self._opened is None:
            self._opened = self._open_store()
        return self._opened
