"""The loop of one job: events -> journal -> core -> actions.

Owns: the order (persist, then act), the queue, the timers and the replay. It is the only loop of
the control plane. Must not: decide, or do anything slow; the executor and the endpoint do the IO.

Events carry the time at which they came, not the one at which they are taken in: while a commit is
under way they wait, and neither a node's silence nor a hang may be concluded from our own waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..api.v1alpha1 import TrainingJob
from ..core.actions import AnyAction
from ..core.controller import Controller
from ..core.events import AnyEvent, HeartbeatReceived, NodeJoined, Tick
from ..core.journal import Journal
from ..core.progress_monitor import ProgressMonitor
from ..core.transitions import JobPhase
from . import snapshot
from .clock import Clock
from .observe.projection import JobProjection

NS = 1_000_000_000
SPIN_GUARD_NS = 10_000_000
"""A deadline that stays in the past after its Tick would keep the loop busy for ever."""


class Queued(NamedTuple):
    at_ns: int
    event: AnyEvent
    done: asyncio.Future[None] | None


class Driver:
    """Feeds one Controller. All methods are called from the event loop."""

    def __init__(
        self,
        job: TrainingJob,
        clock: Clock,
        carry_out: Callable[[AnyAction], None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._clock = job, clock
        self._journal: Journal | None = None
        self._carry_out, self._on_change = carry_out, on_change
        self.controller = Controller()
        self._monitor = ProgressMonitor(job, self.controller)
        self.story = JobProjection(job)
        self.num_events = 0
        """Absorbed by this driver, heartbeats left out."""
        self._queue: deque[Queued] = deque()
        self._wake = asyncio.Event()
        self._stopping = self._ended = False
        self._quiet_until_ns = self._last_ns = 0

    def open(self, journal: Journal) -> int:
        """Bring the core to where the journal ends, and write there from now on; returns the number
        of events replayed. What is queued already comes after them."""
        self._journal = journal
        if journal.snapshot is not None:
            state, memory = snapshot.decode(journal.snapshot)
            self.controller = Controller(state)
            self._monitor = ProgressMonitor(self._job, self.controller)
            self.story = JobProjection(self._job, memory, state)
            journal.snapshot = None
        count = len(journal.records)
        for now_ns, event in journal.records:
            actions = self.controller.step(now_ns, event)
            self.story.observe(now_ns, event, actions, self.controller.state)
            # Its verdicts of that time are in the journal themselves.
            self._monitor.observe(now_ns, event)
        self._last_ns = self.story.now_ns
        self._clock.not_before(self._last_ns)
        journal.records.clear()
        return count

    def submit(self, event: AnyEvent) -> None:
        """Queue an event."""
        self._put(event, None)

    async def submit_durable(self, event: AnyEvent) -> None:
        """Queue an event and wait until it is in the journal for good and its actions run.

        Raises CancelledError when the loop has ended."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._ended:
            done.cancel()
        self._put(event, done)
        await done

    def _put(self, event: AnyEvent, done: asyncio.Future[None] | None) -> None:
        now_ns = self._clock.now_ns()
        if isinstance(event, HeartbeatReceived | NodeJoined):
            self._monitor.arrived(now_ns, event.node)
        self._queue.append(Queued(now_ns, event, done))
        self._wake.set()

    def stop(self) -> None:
        """End `run` after the batch at hand."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Until `stop` or the job's end. Raises JournalLost when another controller has taken over,
        JournalError when nothing can be written down any more: training goes on without us."""
        try:
            while not self._stopping:
                await self._wait()
                await self.turn()
        finally:
            self._ended = True
            for queued in self._queue:
                if queued.done is not None:
                    queued.done.cancel()

    async def _wait(self) -> None:
        if self._queue:
            # Let the connections speak: what is there already shares one fsync.
            await asyncio.sleep(0)
            return
        self._wake.clear()
        deadline = self._deadline_ns()
        if deadline is None:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout(max(0.0, (deadline - self._clock.now_ns()) / NS)):
                await self._wake.wait()
        except TimeoutError:
            return

    def _deadline_ns(self) -> int | None:
        times = (self.controller.next_deadline_ns(), self._monitor.next_deadline_ns())
        first = min((time for time in times if time is not None), default=None)
        return None if first is None else max(first, self._quiet_until_ns)

    async def turn(self) -> None:
        """Everything that is queued or due: into the core, into the journal, then the actions."""
        waiters: list[asyncio.Future[None]] = []
        actions: list[AnyAction] = []
        phase = self._phase()
        try:
            while self._queue:
                at_ns, event, done = self._queue.popleft()
                if done is not None:
                    waiters.append(done)
                actions += self._absorb(event, at_ns)
            actions += self._tick()
            await self._commit(bool(actions or waiters) or self._phase() != phase)
        except BaseException:
            for waiter in waiters:
                waiter.cancel()
            raise
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        for action in actions:
            self._carry_out(action)
        self._on_change()
        state = self.controller.state
        if state.terminal and state.finish_action is None:
            self.stop()

    def _phase(self) -> JobPhase | None:
        return self.controller.state.phase if self.controller.submitted else None

    async def _commit(self, needed: bool) -> None:
        """`needed`: for decisions, and for what people are told. Facts alone can wait."""
        assert self._journal is not None
        if self._journal.full and self.controller.submitted:
            await self._journal.compact(snapshot.encode(self.controller.state, self.story.memory))
        elif needed:
            await self._journal.commit()

    def _absorb(self, first: AnyEvent, at_ns: int) -> list[AnyAction]:
        """One event and what the monitor concludes from it."""
        assert self._journal is not None
        now_ns = self._last_ns = max(at_ns, self._last_ns)
        actions: list[AnyAction] = []
        pending = deque([first])
        while pending:
            event = pending.popleft()
            if isinstance(event, HeartbeatReceived):
                self.story.beat(now_ns, event)
            else:
                decided = self.controller.step(now_ns, event)
                self.num_events += 1
                self._journal.append(now_ns, event)
                self.story.observe(now_ns, event, decided, self.controller.state)
                actions += decided
            pending.extend(self._monitor.observe(now_ns, event))
        return actions

    def _tick(self) -> list[AnyAction]:
        now_ns = self._clock.now_ns()
        due = self.controller.next_deadline_ns()
        if due is not None and due <= now_ns:
            actions = self._absorb(Tick(), now_ns)
            if self.controller.next_deadline_ns() == due:
                self._quiet_until_ns = now_ns + SPIN_GUARD_NS
            return actions
        due = self._monitor.next_deadline_ns()
        if due is None or due > now_ns:
            return []
        # The monitor's own deadline: the core and the journal only hear of its verdicts.
        actions = []
        for verdict in self._monitor.observe(now_ns, Tick()):
            actions += self._absorb(verdict, now_ns)
        return actions
