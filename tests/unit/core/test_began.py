"""Since when a script that reports nothing trains, and how an incident of it is dated."""

from __future__ import annotations

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import CollectivesBegun, HangDetected
from holdfast.orchestrator.core.script_progress import PACE_COLLECTIVES, Began

from .harness import SECOND, Transcript, spec

BEGUN = limits.BEGUN_COLLECTIVES
SCRIPT = {"script": "train.py"}


def answers(*seen: tuple[float, int]) -> list[float | None]:
    """(seconds since the launch, collectives that all ranks had begun) -> its answers."""
    began = Began()
    return [began.observe(begun, round(at * SECOND)) for at, begun in seen]


def test_training_begins_with_the_collectives_if_they_go_on_at_one_pace() -> None:
    steps = [(10.0 + 2 * n, BEGUN + 4 * n) for n in range(12)]
    assert answers(*steps) == [0.0, *[None] * 11]


def test_a_barrier_before_the_model_is_built_is_not_training() -> None:
    # Ten collectives of the start-up, 60 s in which the model is built and loaded, then training.
    seen = [(5.0, BEGUN + 2), (65.0, BEGUN + 6), (65.5, BEGUN + 9), (66.0, BEGUN + 12)]
    assert answers(*seen) == [0.0, None, 0.5, None]


def test_a_pause_of_a_script_that_trains_for_long_is_not_loading() -> None:
    assert not Began(begun=PACE_COLLECTIVES - 1).known and Began(begun=PACE_COLLECTIVES).known


def incident_of(job: Transcript) -> dict[str, float]:
    record = job.state.incidents[-1]
    assert record.first_step_ns is not None
    return {"at": record.at_ns / SECOND, "over": record.first_step_ns / SECOND}


def test_an_incident_ends_when_the_script_trains_not_at_its_first_barrier() -> None:
    job = Transcript(spec(entrypoint=SCRIPT)).started(step=None)
    job.apply(CollectivesBegun(generation=1))
    job.exits(1, signal=9)
    job.all_stopped(None)
    job.succeed(LaunchGroup)
    launched = job.now_ns / SECOND
    job.wait(5)
    job.apply(CollectivesBegun(generation=2))
    assert incident_of(job)["over"] == launched + 5
    job.wait(60)
    job.apply(CollectivesBegun(generation=2, ago_s=2.0))
    assert incident_of(job)["over"] == launched + 63


def test_a_hang_counts_from_the_last_progress() -> None:
    job = Transcript(spec(entrypoint=SCRIPT)).started(step=None)
    job.apply(CollectivesBegun(generation=1))
    job.wait(100)
    found = job.now_ns / SECOND
    job.apply(HangDetected(generation=1, ranks=(1,), evidence="quiet", quiet_s=61.0))
    job.all_stopped(None)
    record = job.state.incidents[-1]
    assert record.at_ns / SECOND == found - 61 and record.noticed_ns == found * SECOND
