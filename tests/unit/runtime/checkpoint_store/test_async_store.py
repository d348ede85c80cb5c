"""Blocking calls of one job keep their order and do not wait for those of other jobs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.orchestrator.runtime.checkpoint_store.async_store import (
    THREAD_NAME_PREFIX,
    SerialExecutor,
)

from ..harness import BOUND_S


async def test_calls_of_one_job_run_in_order() -> None:
    executor, done, running = SerialExecutor(), [], threading.Lock()

    def work(number: int) -> int:
        assert running.acquire(blocking=False), "two at once"
        done.append(number)
        running.release()
        return number

    assert await asyncio.gather(*(executor.call(work, n) for n in range(50))) == list(range(50))
    assert done == list(range(50))


async def test_calls_that_hang_delay_only_their_own_jobs_and_leave_no_thread() -> None:
    """Any number of them, awaited or not."""
    release, free = threading.Event(), SerialExecutor()
    stuck = [SerialExecutor() for _ in range(50)]
    hanging = [asyncio.create_task(one.call(release.wait)) for one in stuck]
    behind = asyncio.create_task(stuck[0].call(str, 1))
    assert await free.call(str, 2) == "2"
    for task in hanging[1:]:
        task.cancel()
    assert await free.call(str, 3) == "3"
    assert not behind.done()
    release.set()
    assert await hanging[0] and await behind == "1"
    for one in stuck:
        await one.settle()
    async with asyncio.timeout(BOUND_S):
        while any(one.name.startswith(THREAD_NAME_PREFIX) for one in threading.enumerate()):
            await asyncio.sleep(0.01)


async def test_the_next_call_waits_for_one_that_was_cancelled_while_it_ran() -> None:
    executor, begun, release = SerialExecutor(), asyncio.Event(), threading.Event()
    loop, over = asyncio.get_running_loop(), []

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        release.wait()
        over.append("work")

    task = asyncio.create_task(executor.call(work))
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    following = asyncio.create_task(executor.call(lambda: over.append("next")))
    never = asyncio.create_task(executor.call(lambda: over.append("never")))
    settled = asyncio.create_task(executor.settle())
    await asyncio.sleep(0)
    never.cancel()
    assert not settled.done() and over == []
    release.set()
    await following
    await settled
    assert over == ["work", "next"]


async def test_an_error_is_raised_to_the_caller() -> None:
    executor = SerialExecutor()

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await executor.call(fail)
    assert await executor.call(len, "abc") == 3
