"""The loop while commits of the journal are slow, fail or are refused."""

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
    FromNode,
    JobSubmitted,
    ResizeRequested,
    StepCompleted,
)
from holdfast.orchestrator.core.journal import JournalError, JournalLost, Record
from holdfast.orchestrator.protocol.messages import Heartbeat
from holdfast.orchestrator.runtime import snapshot
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.driver import Driver
from holdfast.orchestrator.runtime.job_loop import JobLoop

from .harness import BOUND_S, make_job
from .test_job_loop import joined

JOB = make_job()
SUBMITTED = JobSubmitted(job_id="id", spec=job_to_mapping(JOB), spec_directory="/")


class HandClock(Clock):
    """Stands still until a test sets it."""

    def __init__(self) -> None:
        self.at_ns = 1_000_000_000

    def now_ns(self) -> int:
        return self.at_ns

    def not_before(self, earliest_ns: int) -> None:
        self.at_ns = max(self.at_ns, earliest_ns)


@dataclass
class MemoryJournal:
    """A journal in memory that keeps, as a store behind a network, nothing before its commit."""

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

    problem = ""

    @property
    def full(self) -> bool:
        return len(self.kept) + len(self.pending) >= self.bound

    def append(self, now_ns: int, event: AnyEvent) -> None:
        self.pending.append(Record(now_ns, event))

    async def commit(self, *, durable: bool = True) -> None:
        if not durable:
            return
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
        """The journal as the next controller reads it."""
        return MemoryJournal(snapshot=self.snapshot, records=list(self.kept))


class MemoryDriver:
    """A driver whose actions are only recorded."""

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

    async def handle(self, *events: AnyEvent) -> None:
        for event in events:
            self.driver.submit(event)
        await self.turn()

    async def with_nodes(self) -> MemoryDriver:
        """Two nodes have joined and are launched."""
        await self.handle(SUBMITTED, ControllerStarted(incarnation=1))
        (request,) = self.actions
        assert isinstance(request, RequestNodes)
        await self.handle(ActionSucceeded(action_id=request.action_id, detail="a b"))
        await self.handle(*(joined(name) for name in ("a", "b")))
        assert any(isinstance(action, LaunchGroup) for action in self.actions)
        return self


async def test_actions_and_replies_wait_for_the_commit() -> None:
    harness = MemoryDriver()
    harness.journal.may_commit.clear()
    harness.driver.submit(SUBMITTED)
    running = asyncio.create_task(harness.run())
    asked = asyncio.create_task(harness.driver.submit_durable(ResizeRequested(nodes=1)))
    await harness.journal.committing.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert harness.actions == [] and not asked.done()
    harness.journal.may_commit.set()
    await asked
    assert harness.actions and harness.journal.kept
    harness.driver.stop()
    await running


async def test_events_during_a_commit_belong_to_the_next_turn() -> None:
    harness = MemoryDriver()
    harness.journal.may_commit.clear()
    harness.driver.submit(SUBMITTED)
    running = asyncio.create_task(harness.run())
    await harness.journal.committing.wait()
    harness.driver.submit(ControllerStarted(incarnation=1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert [event for _, event in harness.journal.pending] == [SUBMITTED]
    harness.journal.may_commit.set()
    async with asyncio.timeout(BOUND_S):
        while len(harness.journal.kept) + len(harness.journal.pending) < 2:
            await asyncio.sleep(0)
    harness.driver.stop()
    await running


@pytest.mark.parametrize("failure", [JournalLost("another one"), JournalError("no room")])
async def test_a_commit_that_fails_ends_the_loop_without_actions(failure: JournalError) -> None:
    harness = await MemoryDriver().with_nodes()
    before = list(harness.actions)
    harness.journal.failure = failure
    running = asyncio.create_task(harness.run())
    with pytest.raises(asyncio.CancelledError):
        await harness.driver.submit_durable(ResizeRequested(nodes=1))
    with pytest.raises(type(failure)):
        await running
    assert harness.actions == before
    with pytest.raises(asyncio.CancelledError):
        await harness.driver.submit_durable(ResizeRequested(nodes=2))


async def test_nodes_are_not_lost_because_a_commit_takes_a_minute() -> None:
    """Events that arrived meanwhile count from their times of arrival."""
    harness = await MemoryDriver().with_nodes()
    harness.journal.may_commit.clear()
    running = asyncio.create_task(harness.run())
    asked = asyncio.create_task(harness.driver.submit_durable(ResizeRequested(nodes=2)))
    await harness.journal.committing.wait()
    for _half_second in range(120):
        harness.clock.at_ns += 500_000_000
        for node in ("a", "b"):
            harness.driver.submit(FromNode(node, Heartbeat(generation=1)))
    harness.journal.may_commit.set()
    await asked
    await harness.driver.submit_durable(ResizeRequested(nodes=2))
    assert list(harness.driver.state.nodes) == ["a", "b"]
    assert not harness.driver.state.supply.released
    harness.driver.stop()
    await running


async def test_a_node_without_heartbeats_during_a_long_commit_is_lost() -> None:
    harness = await MemoryDriver().with_nodes()
    for _half_second in range(12):
        harness.clock.at_ns += 500_000_000
        harness.driver.submit(FromNode("a", Heartbeat(generation=1)))
    await harness.turn()
    assert list(harness.driver.state.nodes) == ["a"]
    assert "no heartbeat" in harness.driver.state.supply.released["b"]


async def test_a_full_journal_is_compacted_and_the_next_controller_restores_the_snapshot() -> None:
    harness = MemoryDriver(MemoryJournal(bound=3))
    await harness.with_nodes()
    assert harness.journal.compactions >= 1
    before = harness.driver.state
    nxt = MemoryDriver(harness.journal.reopened())
    await nxt.handle()
    # Records that were appended and not committed decide nothing and are sent again.
    assert nxt.driver.state.group.members == before.group.members
    assert nxt.driver.state.inflight.keys() == before.inflight.keys()
    assert nxt.actions == [], "what was under way is not said again by itself"
    state, memory = snapshot.decode(snapshot.encode(before, harness.driver.loop.projection.memory))
    assert state == before and memory == harness.driver.loop.projection.memory


async def test_a_new_phase_is_committed_also_without_an_action() -> None:
    harness = await MemoryDriver().with_nodes()
    launches = [one for one in harness.actions if isinstance(one, LaunchGroup)]
    for launch in launches:
        await harness.handle(ActionSucceeded(action_id=launch.action_id, generation=1))
    assert harness.journal.pending, "facts alone can wait"
    phase = harness.driver.state.phase
    await harness.handle(StepCompleted(generation=1, step=0))
    assert harness.driver.state.phase != phase
    assert not harness.journal.pending
