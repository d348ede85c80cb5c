"""A journal whose commits take their time, fail or are refused: what the loop does meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_to_mapping
from holdfast.orchestrator.core.actions import AnyAction, LaunchGroup, RequestNodes
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    AnyEvent,
    ControllerStarted,
    HeartbeatReceived,
    JobSubmitted,
    NodeJoined,
    ResizeRequested,
    StepCompleted,
)
from holdfast.orchestrator.core.journal import JournalError, JournalLost, Record
from holdfast.orchestrator.protocol.facts import NodeFacts
from holdfast.orchestrator.runtime import snapshot
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.driver import Driver
from holdfast.orchestrator.runtime.job_loop import JobLoop

from .harness import BOUND_S, drive, make_job

JOB = make_job()
SUBMITTED = JobSubmitted(job_id="id", spec=job_to_mapping(JOB), spec_directory="/")


class HandClock(Clock):
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.at_ns = 1_000_000_000

    def now_ns(self) -> int:
        return self.at_ns

    def not_before(self, earliest_ns: int) -> None:
        self.at_ns = max(self.at_ns, earliest_ns)


@dataclass
class MemoryJournal:
    """A journal in this process' memory, as a store behind a network is: nothing is kept before
    its commit is through."""

    snapshot: bytes | None = None
    records: list[Record] = field(default_factory=list)
    kept: list[Record] = field(default_factory=list)
    pending: list[Record] = field(default_factory=list)
    may_commit: asyncio.Event = field(default_factory=asyncio.Event)
    committing: asyncio.Event = field(default_factory=asyncio.Event)
    failure: JournalError | None = None
    bound: int = 1_000_000
    compactions: int = 0

    def __post_init__(self) -> None:
        self.may_commit.set()

    @property
    def full(self) -> bool:
        return len(self.kept) + len(self.pending) >= self.bound

    def append(self, now_ns: int, event: AnyEvent) -> None:
        self.pending.append(Record(now_ns, event))

    async def commit(self) -> None:
        await self._through()
        self.kept += self.pending
        self.pending.clear()

    async def compact(self, snapshot: bytes) -> None:
        await self._through()
        self.snapshot = snapshot
        self.compactions += 1
        self.kept.clear()
        self.pending.clear()

    async def _through(self) -> None:
        self.committing.set()
        await self.may_commit.wait()
        self.committing.clear()
        if self.failure is not None:
            raise self.failure

    def reopened(self) -> MemoryJournal:
        """As the next controller finds it."""
        return MemoryJournal(snapshot=self.snapshot, records=list(self.kept))


class Rig:
    """A driver whose actions are only noted."""

    def __init__(self, journal: MemoryJournal | None = None) -> None:
        self.journal = journal or MemoryJournal()
        self.clock = HandClock()
        self.actions: list[AnyAction] = []
        loop = JobLoop.restore(JOB, self.journal.snapshot, self.journal.records)
        self.driver = Driver(loop, self.journal, self.clock)

    async def turn(self) -> None:
        await self.driver.turn(self.actions.append)

    async def run(self) -> None:
        await self.driver.run(self.actions.append)

    async def tell(self, *events: AnyEvent) -> None:
        for event in events:
            self.driver.submit(event)
        await self.turn()

    async def with_nodes(self) -> Rig:
        """Two nodes have joined and are launched."""
        await self.tell(SUBMITTED, ControllerStarted(incarnation=1))
        (request,) = self.actions
        assert isinstance(request, RequestNodes)
        await self.tell(ActionSucceeded(action_id=request.action_id, detail="a b"))
        await self.tell(*(joined(name) for name in ("a", "b")))
        assert any(isinstance(action, LaunchGroup) for action in self.actions)
        return self


def joined(name: str) -> NodeJoined:
    facts = NodeFacts(hostname=name, address=name, data_port=1, slots=2)
    return NodeJoined(node=name, facts=facts, offered_port=4000)


def test_nothing_is_done_or_answered_before_the_commit_is_through() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.journal.may_commit.clear()
        rig.driver.submit(SUBMITTED)
        running = asyncio.create_task(rig.run())
        asked = asyncio.create_task(rig.driver.submit_durable(ResizeRequested(nodes=1)))
        await rig.journal.committing.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert rig.actions == [] and not asked.done()
        rig.journal.may_commit.set()
        await asked
        assert rig.actions and rig.journal.kept
        rig.driver.stop()
        await running

    drive(scenario())


def test_what_comes_during_a_commit_is_the_next_turns() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.journal.may_commit.clear()
        rig.driver.submit(SUBMITTED)
        running = asyncio.create_task(rig.run())
        await rig.journal.committing.wait()
        rig.driver.submit(ControllerStarted(incarnation=1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert [event for _, event in rig.journal.pending] == [SUBMITTED]
        rig.journal.may_commit.set()
        async with asyncio.timeout(BOUND_S):
            while len(rig.journal.kept) + len(rig.journal.pending) < 2:
                await asyncio.sleep(0)
        rig.driver.stop()
        await running

    drive(scenario())


@pytest.mark.parametrize("failure", [JournalLost("another one"), JournalError("no room")])
def test_a_commit_that_fails_ends_the_loop_and_nothing_is_done(failure: JournalError) -> None:
    async def scenario() -> None:
        rig = await Rig().with_nodes()
        before = list(rig.actions)
        rig.journal.failure = failure
        running = asyncio.create_task(rig.run())
        with pytest.raises(asyncio.CancelledError):
            await rig.driver.submit_durable(ResizeRequested(nodes=1))
        with pytest.raises(type(failure)):
            await running
        assert rig.actions == before
        with pytest.raises(asyncio.CancelledError):
            await rig.driver.submit_durable(ResizeRequested(nodes=2))

    drive(scenario())


def test_a_commit_of_a_minute_is_no_silence_of_the_nodes() -> None:
    """What came meanwhile is taken in with the times at which it came."""

    async def scenario() -> None:
        rig = await Rig().with_nodes()
        rig.journal.may_commit.clear()
        running = asyncio.create_task(rig.run())
        asked = asyncio.create_task(rig.driver.submit_durable(ResizeRequested(nodes=2)))
        await rig.journal.committing.wait()
        for _half_second in range(120):
            rig.clock.at_ns += 500_000_000
            for node in ("a", "b"):
                rig.driver.submit(HeartbeatReceived(node=node, generation=1))
        rig.journal.may_commit.set()
        await asked
        await rig.driver.submit_durable(ResizeRequested(nodes=2))
        assert list(rig.driver.state.nodes) == ["a", "b"]
        assert not rig.driver.state.released_nodes
        rig.driver.stop()
        await running

    drive(scenario())


def test_a_node_that_was_silent_during_a_long_commit_is_lost() -> None:
    async def scenario() -> None:
        rig = await Rig().with_nodes()
        for _half_second in range(12):
            rig.clock.at_ns += 500_000_000
            rig.driver.submit(HeartbeatReceived(node="a", generation=1))
        await rig.turn()
        assert list(rig.driver.state.nodes) == ["a"]
        assert "no heartbeat" in rig.driver.state.released_nodes["b"]

    drive(scenario())


def test_a_full_journal_is_compacted_and_the_next_controller_goes_on_from_there() -> None:
    async def scenario() -> None:
        rig = Rig(MemoryJournal(bound=3))
        await rig.with_nodes()
        assert rig.journal.compactions >= 1
        before = rig.driver.state
        nxt = Rig(rig.journal.reopened())
        await nxt.tell()
        # What was appended and not committed decides nothing, and is told again.
        assert nxt.driver.state.members == before.members
        assert nxt.driver.state.inflight.keys() == before.inflight.keys()
        assert nxt.actions == [], "what was under way is not said again by itself"
        state, memory = snapshot.decode(snapshot.encode(before, rig.driver.loop.projection.memory))
        assert state == before and memory == rig.driver.loop.projection.memory

    drive(scenario())


def test_what_people_are_told_is_committed_also_without_a_decision() -> None:
    async def scenario() -> None:
        rig = await Rig().with_nodes()
        launches = [one for one in rig.actions if isinstance(one, LaunchGroup)]
        for launch in launches:
            await rig.tell(ActionSucceeded(action_id=launch.action_id, generation=1))
        assert rig.journal.pending, "facts alone can wait"
        phase = rig.driver.state.phase
        await rig.tell(StepCompleted(generation=1, step=0))
        assert rig.driver.state.phase != phase
        assert not rig.journal.pending

    drive(scenario())
