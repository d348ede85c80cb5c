"""Tasks of asyncio in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any


class TaskSet(set[asyncio.Task[Any]]):
    """Tasks that have not ended; asyncio itself keeps only weak references to them."""

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        super().__init__()
        self._on_error = on_error

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.discard(task)
        if self._on_error is not None and not task.cancelled() and (error := task.exception()):
            self._on_error(error)


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    ending = set(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)


async def within(seconds: float | None, work: Awaitable[object]) -> bool:
    """Await `work`; False if it takes longer and is cancelled."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True
