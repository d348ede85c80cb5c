"""The controller is killed after every event of a scenario, and the job ends the same way."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.hosts.local.job_records import read_view
from holdfast.orchestrator.journal.chunk_journal import read
from holdfast.orchestrator.journal.file_store import FileStore
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.unit.runtime.harness import BOUND_S, make_job

from .harness import JobHarness

CRASHES = range(3, 28)
"""Events of the story without a crash are fewer than the last. A request for nodes whose result was
lost is repeated only once its nodes had the time to come by themselves (8 s), so only one of the
places with one is here."""


def num_events(harness: JobHarness) -> int:
    store = FileStore(harness.directory.journal)
    chunks = read(store)
    store.close()
    return sum(chunk.covered + len(chunk.records) for chunk in chunks)


class Crashing:
    """A harness whose controller is killed once, when the journal has `after` events."""

    def __init__(self, harness: JobHarness, after: int) -> None:
        self.harness, self.after, self.crashed = harness, after, False

    async def until(self, condition: object) -> JobView:
        while True:
            if not self.crashed and num_events(self.harness) >= self.after:
                self.crashed = True
                await self.harness.kill_controller()
                self.harness.start()
            if self.harness.service.runtime.begun:
                view = self.harness.service.view()
                if condition(view):  # type: ignore[operator]
                    return view
            assert not self.harness.task.done(), self.harness.task.result()
            await asyncio.sleep(0)


async def tell(tmp_path: Path, crash_after: int, bound_bytes: int) -> JobView:
    """Start a job, kill a worker, kill a node, finish."""
    open_store = functools.partial(FileStore, bound_bytes=bound_bytes)
    harness = JobHarness(tmp_path, make_job(), open_store)
    harness.backend.auto = True
    crashing = Crashing(harness, crash_after)
    harness.start()
    await crashing.until(lambda v: v.state == "running" and v.generation == 1)
    harness.members()[1].exit_worker(0)
    await crashing.until(lambda v: v.state == "running" and v.generation > 1)
    harness.backend.kill(harness.members()[0].name)
    # If the request for a node was lost with the controller, the job shrinks first.
    await crashing.until(
        lambda v: v.state == "running" and len(v.incidents) >= 2 and v.world_size == 4
    )
    await harness.finish()
    return read_view(harness.directory)


@pytest.mark.parametrize("crash_after", CRASHES)
def test_a_controller_killed_after_any_event_is_taken_over(
    tmp_path: Path, crash_after: int
) -> None:
    """Every second run compacts the journal all the time."""
    bound_bytes = 500 if crash_after % 2 else limits.JOURNAL_BYTES
    view = asyncio.run(asyncio.wait_for(tell(tmp_path, crash_after, bound_bytes), 2 * BOUND_S))
    assert view.state == "succeeded"
    failures = [one for one in view.incidents if one.failure_class != "resize"]
    assert [one.failure_class for one in failures] == ["infrastructure"] * 2
    assert [one.steps_lost for one in view.incidents] == [0] * len(view.incidents)
    assert sum(view.ledger.values()) == pytest.approx(
        (view.finished_ns - view.submitted_ns) / 1e9  # type: ignore[operator]
    )
