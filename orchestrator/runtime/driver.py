"""Drives the loop of one job: waits for events and deadlines, and keeps the journal.

The order is the same as in job_loop.py: persist, then act.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.orchestrator import tasks

from ..core.actions import AnyAction, ToNode
from ..core.context import SECOND_NS
from ..core.events import AnyEvent
from ..core.journal import Journal
from ..core.state import JobState
from .clock import Clock
from .job_loop import JobLoop, Ready

UNWRITTEN_RETRY_NS = SECOND_NS
"""Time between two attempts to write records that are in memory only."""

CarryOut = Callable[[AnyAction | ToNode], None]
"""Starts an action. Must not block; the result comes back as an event."""


class Driver:
    """Runs one JobLoop. All methods are called from the event loop."""

    def __init__(
        self,
        loop: JobLoop,
        journal: Journal,
        clock: Clock,
        on_change: Callable[[Ready], None] = lambda ready: None,
        on_journal_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """`loop` has been restored from `journal`, which is written from now on.
        `on_journal_problem` gets `journal.problem` whenever it appears or ends."""
        self.loop = loop
        self.journal_problem = ""
        self._on_journal_problem = on_journal_problem
        self._journal, self._clock, self._on_change = journal, clock, on_change
        self._waiters: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._stopping = self._ended = False
        clock.not_before(loop.last_ns)

    @property
    def state(self) -> JobState:
        """Read-only. AssertionError before JobSubmitted."""
        return self.loop.state

    def submit(self, event: AnyEvent) -> None:
        """Queue an event."""
        self.loop.feed(self._clock.now_ns(), event)
        self._wake.set()

    async def submit_durable(self, event: AnyEvent) -> None:
        """Queue an event and wait until it is durable and its actions have been started. Raises
        CancelledError when the job's controller ends before."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._ended:
            done.cancel()
        self._waiters.append(done)
        self.submit(event)
        await done

    def stop(self) -> None:
        """End `run` after the events that are being handled."""
        self._stopping = True
        self._wake.set()

    async def run(self, carry_out: CarryOut) -> None:
        """Run until `stop` or the job's end. Raises JournalLost when another controller has taken
        over, JournalError when the journal cannot be written; in both cases training continues."""
        try:
            while not self._stopping:
                await self._wait()
                await self.turn(carry_out)
        finally:
            self._ended = True
            for waiter in self._waiters:
                waiter.cancel()

    async def _wait(self) -> None:
        if not self.loop.idle:
            # Messages that have arrived by now share one commit.
            await asyncio.sleep(0)
            return
        self._wake.clear()
        deadline = self.loop.next_deadline_ns()
        if self.journal_problem:
            retry = self._clock.now_ns() + UNWRITTEN_RETRY_NS
            deadline = min(deadline or retry, retry)
        wait_s = None if deadline is None else (deadline - self._clock.now_ns()) / SECOND_NS
        await tasks.within(wait_s, self._wake.wait())

    async def turn(self, carry_out: CarryOut) -> None:
        """Handle everything that is queued or due: journal first, then actions."""
        waiters, self._waiters = self._waiters, []
        try:
            ready = self.loop.ready(self._clock.now_ns())
            for record in ready.records:
                self._journal.append(*record)
            if self._journal.full and self.loop.controller.submitted:
                await self._journal.compact(self.loop.snapshot())
            else:
                durable = ready.must_commit or bool(waiters) or bool(self._journal.problem)
                await self._journal.commit(durable=durable)
        except BaseException:
            for waiter in waiters:
                waiter.cancel()
            raise
        self._report_journal()
        self.loop.advance()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        for action in (*ready.actions, *ready.orders):
            carry_out(action)
        self._on_change(ready)
        if self.loop.ended:
            self.stop()

    def _report_journal(self) -> None:
        # The text may change with each attempt; only its begin and its end are reported.
        begins_or_ends = bool(self._journal.problem) != bool(self.journal_problem)
        self.journal_problem = self._journal.problem
        if begins_or_ends:
            self._on_journal_problem(self.journal_problem)
