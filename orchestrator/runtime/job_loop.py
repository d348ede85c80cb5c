"""The loop of one job without IO: events go in, journal records and actions come out.

A caller (driver.py, the simulation) takes `ready()`, makes its records durable, calls
`advance()`, and only then carries out its actions: decisions survive a crash of the controller.

An event counts from the time at which it came. While a commit is under way events wait, and
neither a lost node nor a hang may be concluded from that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ..api.v1alpha1 import TrainingJob
from ..core.actions import AnyAction, ToNode
from ..core.controller import Controller
from ..core.copy_rounds import CopyScheduler
from ..core.events import (
    ActionUnknown,
    AnyEvent,
    ControllerStarted,
    FromNode,
    JobSubmitted,
    Tick,
)
from ..core.journal import Record
from ..core.progress_monitor import ProgressMonitor
from ..core.staging_interval import orders
from ..core.state import JobState, StagingInterval
from ..core.transitions import JobPhase
from ..protocol.facts import ShardFile
from ..protocol.messages import Heartbeat, NodeJoined, StepCopied
from . import snapshot
from .observe.projection import JobProjection
from .observe.view import JobView

MAX_QUEUED = 50_000
"""Events that wait for the journal. During an outage of its store 1,000 nodes send two heartbeats a
second each."""


class Ready(NamedTuple):
    """Work to do now, in this order: append the records and make them durable, call
    JobLoop.advance, carry out the actions."""

    records: tuple[Record, ...]
    actions: tuple[AnyAction, ...]
    must_commit: bool
    """The records hold a decision or a new phase. Others may wait for the next commit."""
    orders: tuple[ToNode, ...] = ()
    """Messages to send like actions. Nothing waits for them: who misses one reports again."""


class JobLoop:
    """One job's controller, monitor and view, fed with events."""

    def __init__(
        self, job: TrainingJob, controller: Controller, projection: JobProjection | None = None
    ) -> None:
        self.controller = controller
        self.projection = projection or JobProjection(job)
        self._monitor = ProgressMonitor(job, controller)
        self._rounds = CopyScheduler()
        self._orders: list[ToNode] = []
        self._queue: deque[Record] = deque()
        self._last_ns = 0
        self._advanced = True

    @classmethod
    def restore(
        cls,
        job: TrainingJob,
        data: bytes | None,
        records: Iterable[Record],
        make_controller: type[Controller] = Controller,
    ) -> JobLoop:
        """The loop as it was at the end of a journal: a snapshot (None: there is none) and the
        records after it."""
        state, memory = snapshot.decode(data) if data is not None else (None, None)
        records = list(records)
        # A journal holds the spec that was submitted, which may differ from `job`'s.
        fresh = state is None and not records
        controller = make_controller(state, job if fresh else None)
        loop = cls(job, controller, JobProjection(job, memory, state))
        for now_ns, event in records:
            actions = loop.controller.step(now_ns, event)
            # What the monitor concluded then is in the journal; it begins with `start`.
            loop.projection.observe(now_ns, event, actions, loop.controller.state)
        loop._last_ns = loop.projection.now_ns
        return loop

    @property
    def state(self) -> JobState:
        """Read-only. AssertionError before JobSubmitted."""
        return self.controller.state

    @property
    def last_ns(self) -> int:
        """Time of the newest event."""
        return self._last_ns

    @property
    def idle(self) -> bool:
        """No event waits."""
        return not self._queue

    @property
    def ended(self) -> bool:
        """The job has ended and its last action has been carried out."""
        state = self.controller.state
        return state.terminal and state.finish_action is None

    # -- in ------------------------------------------------------------------------------------
    def start(
        self,
        now_ns: int,
        submission: JobSubmitted,
        committed: tuple[ShardFile, ...],
        nodes: tuple[str, ...] | None,
        *,
        listed: bool = False,
    ) -> int:
        """Feed the events that every controller of the job begins with. The results of actions
        that an earlier controller had under way will not come. `listed`: storage has answered with
        `committed`. Returns the incarnation."""
        incarnation, inflight = 1, list[AnyAction]()
        if self.controller.submitted:
            incarnation = self.state.incarnation + 1
            inflight = list(self.state.inflight.values())
        else:
            self.feed(now_ns, submission)
        started = ControllerStarted(
            incarnation=incarnation, committed=committed, listed=listed, nodes=nodes
        )
        self.feed(now_ns, started)
        for action in inflight:
            unknown = ActionUnknown(
                action_id=action.action_id,
                generation=action.generation,
                detail="the controller ended before the result came",
            )
            self.feed(now_ns, unknown)
        return incarnation

    def feed(self, now_ns: int, event: AnyEvent) -> None:
        """Queue an event."""
        if isinstance(event, FromNode) and isinstance(event.fact, Heartbeat | NodeJoined):
            self._monitor.arrived(now_ns, event.node)
            if isinstance(event.fact, Heartbeat) and len(self._queue) >= MAX_QUEUED:
                return  # the next heartbeats say the same; the journal cannot be written meanwhile
        self._queue.append(Record(now_ns, event))

    # -- out -----------------------------------------------------------------------------------
    def next_deadline_ns(self) -> int | None:
        """Time at which `ready` has something to do although no event comes; None: never."""
        times = (self.controller.next_deadline_ns(), self._monitor.next_deadline_ns())
        return min((time for time in times if time is not None), default=None)

    def ready(self, now_ns: int) -> Ready:
        """Take in everything that is queued or due."""
        assert self._advanced, "the records of the last Ready are not durable yet"
        self._advanced = False
        phase, interval = self._phase(), self._interval()
        records: list[Record] = []
        actions: list[AnyAction] = []
        while self._queue:
            self._absorb(*self._queue.popleft(), records, actions)
        self._tick(now_ns, records, actions)
        decided = bool(actions) or (self._phase(), self._interval()) != (phase, interval)
        orders, self._orders = tuple(self._orders), []
        return Ready(tuple(records), tuple(actions), decided, orders)

    def advance(self) -> None:
        """The records of the last Ready are durable, or may wait."""
        self._advanced = True

    def snapshot(self) -> bytes:
        """State that a journal may keep in place of all records so far."""
        return snapshot.encode(self.controller.state, self.projection.memory)

    def view(self, now_ns: int, *, live: bool = True) -> JobView:
        return self.projection.view(now_ns, live=live, copies=self._rounds.status)

    def _phase(self) -> JobPhase | None:
        return self.controller.state.phase if self.controller.submitted else None

    def _interval(self) -> StagingInterval | None:
        return self.controller.state.staging.interval if self.controller.submitted else None

    def _absorb(
        self, at_ns: int, first: AnyEvent, records: list[Record], actions: list[AnyAction]
    ) -> None:
        """One event and what the monitor concludes from it."""
        now_ns = self._last_ns = max(at_ns, self._last_ns)
        pending = deque([first])
        while pending:
            match event := pending.popleft():
                case FromNode(node, Heartbeat() as beat):
                    self.projection.beat(now_ns, node, beat)
                    if self.controller.submitted:
                        self._orders += orders(self.controller.state, node, beat)
                case FromNode(node, StepCopied() as copied):
                    self._orders += self._rounds.observe(now_ns, node, copied, self.state)
                    pending.extend(self._rounds.take_remarks())
                    continue
                case _:
                    decided = self.controller.step(now_ns, event)
                    self.projection.observe(now_ns, event, decided, self.controller.state)
                    records.append(Record(now_ns, event))
                    actions += decided
            pending.extend(self._monitor.observe(now_ns, event))

    def _tick(self, now_ns: int, records: list[Record], actions: list[AnyAction]) -> None:
        due = self.controller.next_deadline_ns()
        if due is not None and due <= now_ns:
            # A timer that is due cannot delay the loop twice: deadlines are later than this Tick.
            self._absorb(now_ns, Tick(), records, actions)
            return
        due = self._monitor.next_deadline_ns()
        if due is not None and due <= now_ns:
            # Core and journal only get what the monitor concludes from its own deadline.
            for verdict in self._monitor.observe(now_ns, Tick()):
                self._absorb(now_ns, verdict, records, actions)


def replay(
    job: TrainingJob, records: Iterable[Record], start: bytes | None = None
) -> JobProjection:
    """The read model after these records, which follow the snapshot `start` if there is one."""
    return JobLoop.restore(job, start, records).projection
