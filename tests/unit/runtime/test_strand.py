"""Blocking calls of one job keep their order in threads that all jobs share."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.runtime.strand import Strand

from .world import drive


def test_calls_of_one_job_never_overtake_each_other() -> None:
    async def scenario() -> None:
        threads = ThreadPoolExecutor(8)
        strand, done, running = Strand(threads), [], threading.Lock()

        def work(number: int) -> int:
            assert running.acquire(blocking=False), "two at once"
            done.append(number)
            running.release()
            return number

        assert await asyncio.gather(*(strand.call(work, n) for n in range(50))) == list(range(50))
        assert done == list(range(50))
        threads.shutdown()

    drive(scenario())


def test_a_call_that_hangs_holds_up_its_own_job_only() -> None:
    async def scenario() -> None:
        threads = ThreadPoolExecutor(2)
        stuck, free, release = Strand(threads), Strand(threads), threading.Event()
        hanging = asyncio.create_task(stuck.call(release.wait))
        behind = asyncio.create_task(stuck.call(str, 1))
        assert await free.call(str, 2) == "2"
        assert not behind.done()
        release.set()
        assert await hanging and await behind == "1"
        threads.shutdown()

    drive(scenario())


def test_what_is_cancelled_while_it_runs_is_still_waited_for() -> None:
    async def scenario() -> None:
        threads = ThreadPoolExecutor(2)
        strand, begun, release = Strand(threads), asyncio.Event(), threading.Event()
        loop, over = asyncio.get_running_loop(), []

        def work() -> None:
            loop.call_soon_threadsafe(begun.set)
            release.wait()
            over.append("work")

        task = asyncio.create_task(strand.call(work))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
        following = asyncio.create_task(strand.call(lambda: over.append("next")))
        never = asyncio.create_task(strand.call(lambda: over.append("never")))
        settled = asyncio.create_task(strand.settle())
        await asyncio.sleep(0)
        never.cancel()
        assert not settled.done() and over == []
        release.set()
        await following
        await settled
        assert over == ["work", "next"]
        threads.shutdown()

    drive(scenario())


def test_an_error_reaches_the_one_who_called() -> None:
    async def scenario() -> None:
        strand = Strand()

        def fail() -> None:
            raise OSError("no")

        with pytest.raises(OSError, match="no"):
            await strand.call(fail)
        assert await strand.call(len, "abc") == 3

    drive(scenario())
