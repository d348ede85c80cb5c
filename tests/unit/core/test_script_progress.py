"""Scripts that keep their own checkpoints: steps that they report, posts of a framework for all
ranks, and since when a script that reports nothing trains."""

from __future__ import annotations

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import CollectivesBegun, HangDetected, StepCompleted
from holdfast.orchestrator.core.progress_monitor import PACE_COLLECTIVES, Began
from holdfast.orchestrator.runtime.observe.incidents import IncidentCounter
from holdfast.orchestrator.runtime.observe.incidents import incident as observed
from holdfast.orchestrator.runtime.observe.view import JobView

from .harness import SECOND, Transcript, spec
from .watch import Script

BEGUN = limits.BEGUN_COLLECTIVES
SCRIPT = {"script": "train.py"}


def test_one_rank_that_posts_speaks_for_all() -> None:
    watch = Script()
    watch.posted(-1, began_s=0.0)
    assert watch.job.state.step == -1
    watch.posted(24, began_s=5.0, step_s=0.2)
    assert (watch.job.state.step, watch.job.state.counted_by) == (24, "posted")


@pytest.mark.parametrize("source", ["script", "counted"])
def test_a_script_that_reports_recovers_until_its_next_step_and_counts_what_was_lost(
    source: str,
) -> None:
    watch = Script()
    reported = {"counted_by": source, "ticks": 1}
    watch.beats(*[{"step": 83, "began_after": -1, **reported}] * 4)
    watch.restart()
    state = watch.job.state
    assert state.phase == "recovering", "it has reported before, so it is not over yet"
    incident = state.incidents[-1]
    assert incident.resumed_after_step is None and incident.restored_from == ""
    assert "no checkpoint of the script was seen" in incident.decision
    watch.job.wait(8)
    watch.beats(*[{"step": 60, "began_after": 59, **reported}] * 4, generation=2)
    assert state.phase == "running"
    assert (incident.step_before, incident.resumed_after_step) == (83, 59)
    assert incident.first_step_ns == watch.job.now_ns and not incident.at_least


def test_a_script_that_reports_every_tenth_step_has_lost_at_least_those_since_its_checkpoint() -> (
    None
):
    watch = Script()
    reported = {"counted_by": "script", "ticks": 1}
    watch.beats(*[{"step": 89, "began_after": -1, **reported}] * 4)
    watch.restart()
    incident = watch.job.state.incidents[-1]
    watch.beats(
        *[{"step": 59, "began_after": 58, "began_estimated": True, **reported}] * 4, generation=2
    )
    assert (incident.resumed_after_step, incident.resumed_estimated) == (58, True)
    watch.job.wait(1)
    watch.beats(
        *[{"step": 69, "began_after": 49, "began_estimated": True, **reported}] * 4, generation=2
    )
    assert (incident.resumed_after_step, incident.resumed_estimated) == (49, True)
    shown = observed(incident, no_steps=False)
    assert (shown.steps_lost, shown.steps_lost_at_least) == (40, True)
    view = JobView(name="job")
    IncidentCounter().fill(view, watch.job.state, no_steps=False)
    assert (view.steps_lost, view.steps_lost_at_least) == (40, True)
    watch.job.wait(1)
    watch.beats(*[{"step": 79, "began_after": 50, **reported}] * 4, generation=2)
    shown = observed(incident, no_steps=False)
    assert (shown.steps_lost, shown.steps_lost_at_least) == (39, False), "it says where it began"


def test_posts_tell_late_so_the_first_step_and_what_was_lost_are_estimated() -> None:
    watch = Script()
    watch.posted(40, began_s=10.0, step_s=0.0)
    for step in (65, 90):
        watch.job.wait(5)
        watch.posted(step, began_s=15.0, step_s=0.2)
    watch.restart()
    watch.job.wait(7)
    watch.posted(84, generation=2, began_s=5.0)
    incident = watch.job.state.incidents[-1]
    assert incident.first_step_ns == watch.job.now_ns - round(4.8 * SECOND)
    assert incident.resumed_after_step == 84 - 25 and incident.at_least


def test_the_first_post_of_a_launch_has_a_step_time_if_it_is_known_where_that_began() -> None:
    watch = Script()
    found = watch.posted(39, began_s=8.0, step_s=0.2, began_after=-1)
    (done,) = [event for event in found if isinstance(event, StepCompleted)]
    assert (done.step_s, done.began_after) == (0.2, -1)
    assert done.first_ago_s == pytest.approx(7.8), "the rest of its time was no step"


def test_an_incident_of_a_silent_script_is_over_when_its_ranks_begin_collectives_again() -> None:
    watch = Script()
    state = watch.job.state
    watch.job.succeed(LaunchGroup)
    assert state.phase == "running", "it may never begin any"
    for count in (3, BEGUN, 40):
        watch.beats(*[{"collectives": count}] * 4)
    assert state.counted_by == "collectives"
    assert len([v for v in watch.verdicts if isinstance(v, CollectivesBegun)]) == 1
    watch.restart()
    assert state.phase == "recovering"
    watch.job.wait(6)
    watch.beats(*[{"collectives": BEGUN}] * 4, generation=2)
    (incident,) = state.incidents
    assert state.phase == "running" and incident.first_step_ns == watch.job.now_ns
    assert incident.resumed_after_step is None and incident.shows_progress


@pytest.mark.parametrize("workers", [1, 2])
def test_collectives_do_not_end_the_incident_of_a_single_rank(workers: int) -> None:
    """A single rank may need none."""
    job = Transcript(spec({"min": 1, "max": 1}, workers, 1, script=True)).started("a", step=None)
    job.apply(CollectivesBegun(generation=1))
    job.exits(0, signal=9)
    job.all_stopped(None)
    assert job.state.incidents[-1].shows_progress == (workers > 1)


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
