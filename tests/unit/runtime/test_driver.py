"""The order in the loop: the journal first, then the actions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_to_mapping
from holdfast.orchestrator.core.actions import AnyAction
from holdfast.orchestrator.core.events import (
    AnyEvent,
    ControllerStarted,
    FromNode,
    JobSubmitted,
    ResizeRequested,
    Tick,
)
from holdfast.orchestrator.core.journal import JournalError, Record
from holdfast.orchestrator.protocol.messages import Heartbeat
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.driver import Driver
from holdfast.orchestrator.runtime.job_loop import JobLoop
from tests.unit.journal.files import claimed, records, write

from .harness import make_job

JOB = make_job()
SUBMITTED = JobSubmitted(job_id="id", spec=job_to_mapping(JOB), spec_directory="/")


class DriverHarness:
    """A driver whose actions are only counted, with what the journal held at that moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = claimed(path)
        self.syncs = 0
        self.actions: list[AnyAction] = []
        self.durable: list[bool] = []
        self._commit = self.journal.commit
        self.journal.commit = self._count  # type: ignore[method-assign]
        loop = JobLoop.restore(JOB, self.journal.snapshot, self.journal.records)
        self.records: list[int] = []
        """Number of records of each turn."""
        self.driver = Driver(
            loop, self.journal, Clock(), lambda ready: self.records.append(len(ready.records))
        )

    async def _count(self, *, durable: bool = True) -> None:
        self.syncs += durable
        await self._commit(durable=durable)

    def carry_out(self, action: AnyAction) -> None:
        self.actions.append(action)
        self.durable.append(self.syncs > 0)

    async def turn(self) -> None:
        await self.driver.turn(self.carry_out)

    async def run(self) -> None:
        await self.driver.run(self.carry_out)

    def events(self) -> list[AnyEvent]:
        return [event for _, event in records(self.path)]


def test_decisions_are_durable_before_they_are_carried_out(tmp_path: Path) -> None:
    harness = DriverHarness(tmp_path / "journal")
    harness.driver.submit(SUBMITTED)
    harness.driver.submit(ControllerStarted(incarnation=1))
    asyncio.run(harness.turn())
    assert harness.actions and all(harness.durable)
    assert harness.events() == [SUBMITTED, ControllerStarted(incarnation=1)]


def test_events_that_are_queued_together_share_one_sync(tmp_path: Path) -> None:
    harness = DriverHarness(tmp_path / "journal")
    harness.driver.submit(SUBMITTED)
    for incarnation in range(1, 5):
        harness.driver.submit(ControllerStarted(incarnation=incarnation))
    asyncio.run(harness.turn())
    assert harness.syncs == 1 and len(harness.events()) == 5


def test_heartbeats_are_not_written_to_the_journal(tmp_path: Path) -> None:
    harness = DriverHarness(tmp_path / "journal")
    harness.driver.submit(SUBMITTED)
    asyncio.run(harness.turn())
    harness.driver.submit(FromNode("node-0", Heartbeat(generation=1)))
    asyncio.run(harness.turn())
    assert harness.events() == [SUBMITTED] and harness.syncs == 1
    assert harness.records == [1, 0]


def test_no_action_is_carried_out_when_the_journal_fails(tmp_path: Path) -> None:
    harness = DriverHarness(tmp_path / "journal")

    async def fail(*, durable: bool = True) -> None:
        raise JournalError("the disk is full")

    harness.journal.commit = fail  # type: ignore[method-assign]
    harness.driver.submit(SUBMITTED)
    with pytest.raises(JournalError):
        asyncio.run(harness.turn())
    assert harness.actions == []


@pytest.mark.timeout(20)
async def test_a_durable_request_returns_when_it_is_in_the_journal(tmp_path: Path) -> None:
    harness = DriverHarness(tmp_path / "journal")
    harness.driver.submit(SUBMITTED)
    running = asyncio.create_task(harness.run())
    await harness.driver.submit_durable(ResizeRequested(nodes=1))
    assert harness.events()[-1] == ResizeRequested(nodes=1) and harness.syncs > 0
    harness.driver.stop()
    await running


@pytest.mark.timeout(20)
async def test_a_request_after_the_end_of_the_loop_is_cancelled(tmp_path: Path) -> None:
    harness = DriverHarness(tmp_path / "journal")
    harness.driver.submit(SUBMITTED)
    running = asyncio.create_task(harness.run())
    harness.driver.stop()
    await running
    with pytest.raises(asyncio.CancelledError):
        await harness.driver.submit_durable(ResizeRequested(nodes=1))


@pytest.mark.timeout(20)
async def test_timers_of_the_core_fire_as_ticks_in_the_journal(tmp_path: Path) -> None:
    harness = DriverHarness(tmp_path / "journal")
    harness.driver.submit(SUBMITTED)
    await harness.turn()
    state = harness.driver.state
    state.timers["request"] = state.now_ns + 1_000_000
    running = asyncio.create_task(harness.run())
    while Tick() not in harness.events():
        await asyncio.sleep(0.001)
    harness.driver.stop()
    await running


def test_time_continues_after_the_last_record(tmp_path: Path) -> None:
    far = Clock().now_ns() + 3_600_000_000_000
    write(tmp_path / "journal", Record(far, SUBMITTED))
    harness = DriverHarness(tmp_path / "journal")
    harness.driver.submit(ControllerStarted(incarnation=1))
    asyncio.run(harness.turn())
    times = [now_ns for now_ns, _ in records(harness.path)]
    assert far <= times[1] < far + 60_000_000_000


async def test_records_that_wait_for_room_are_written_without_a_further_event(
    tmp_path: Path,
) -> None:
    """The driver tries again by itself, and reports the problem once and its end once."""
    harness = DriverHarness(tmp_path / "journal")
    reports: list[str] = []
    driver = Driver(
        harness.driver.loop, harness.journal, Clock(), on_journal_problem=reports.append
    )
    attempts = 0

    async def commit(*, durable: bool = True) -> None:
        nonlocal attempts
        assert durable
        attempts += 1
        harness.journal.problem = "no room" if attempts < 3 else ""
        if attempts == 3:
            driver.stop()

    harness.journal.commit = commit  # type: ignore[method-assign]
    driver.submit(SUBMITTED)
    await driver.run(harness.carry_out)
    assert attempts == 3 and reports == ["no room", ""]
