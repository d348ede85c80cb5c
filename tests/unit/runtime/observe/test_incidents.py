"""Counters cover all incidents, also those whose records were dropped."""

from __future__ import annotations

from typing import get_args

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.context import MAX_INCIDENTS
from holdfast.orchestrator.core.events import StepCompleted
from holdfast.orchestrator.core.state import FailureClass, Purpose
from holdfast.orchestrator.runtime.job_loop import replay
from holdfast.orchestrator.runtime.observe.incidents import KINDS, launch_incidents
from holdfast.orchestrator.runtime.observe.projection import JobProjection
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.sim.run_seed import play

from ...core import harness as core


def counted(view: JobView) -> dict[tuple[str, str], int]:
    return {(one.failure_class, one.scope): one.count for one in view.incident_counts}


@pytest.mark.parametrize("seed", [3, 8, 21, 44])
def test_the_counters_agree_with_the_records_while_none_was_dropped(seed: int) -> None:
    world = play(seed)
    records = world.host.history()
    projection = replay(world.host.job, records)
    view = projection.view(projection.now_ns, live=False)
    assert view.num_incidents == len(view.incidents) > 0
    assert sum(counted(view).values()) == len(view.incidents)
    assert view.steps_lost == sum(one.steps_lost or 0 for one in view.incidents)
    for phase, total in view.recovery.items():
        seconds = [one.seconds[phase] for one in view.incidents if phase in one.seconds]
        assert total.count == len(seconds)
        assert total.seconds == pytest.approx(sum(seconds))


def test_every_incident_is_of_a_listed_kind() -> None:
    """Kinds that the simulation does not cause are in the table by type."""
    for seed in range(60, 72):
        world = play(seed)
        records = world.host.history()
        projection = replay(world.host.job, records)
        assert set(counted(projection.view(projection.now_ns, live=False))) <= set(KINDS), seed
    failures = {name for name, scope in KINDS if scope != "job"}
    planned = {name for name, scope in KINDS if scope == "job"}
    assert failures == set(get_args(FailureClass))
    assert planned == set(get_args(Purpose)) - {"failure", "preemption", "finish"}


def test_counters_never_fall() -> None:
    """Checked after every event, beyond the number of records that are kept."""
    budgets = {"infrastructure": {"restarts": 10_000}}
    recovery = {"budgets": budgets, "badNodeStrikes": 10_000}
    transcript = core.Transcript(core.spec(recovery=recovery)).started(step=0)
    projection = JobProjection(job_from_mapping(transcript.document))
    num_observed, before, seen = 0, dict[tuple[str, str], int](), 0
    for number in range(1, MAX_INCIDENTS + 10):
        transcript.exits(2, signal=9)
        transcript.all_stopped(10 * number)
        transcript.succeed(LaunchGroup)
        transcript.step(10 * number + 1)
        for now_ns, event in transcript.journal[num_observed:]:
            # Here, unlike in production, the state is up to one incident ahead of the projection.
            projection.observe(now_ns, event, (), transcript.state)
        num_observed = len(transcript.journal)
        if number % 50 == 0 or number > MAX_INCIDENTS - 2:
            view = projection.view(transcript.now_ns, live=False)
            now = counted(view)
            assert all(now[key] >= count for key, count in before.items())
            assert view.recovery["total"].count >= seen
            before, seen = now, view.recovery["total"].count
    assert counted(view) == {("infrastructure", "worker"): MAX_INCIDENTS + 9}
    assert view.num_incidents == MAX_INCIDENTS + 9 and len(view.incidents) == MAX_INCIDENTS
    assert view.recovery["total"].count == MAX_INCIDENTS + 9


def test_a_launch_has_the_incident_that_led_to_it() -> None:
    transcript = core.Transcript().started(step=41)
    assert launch_incidents(transcript.state, 1) == ()
    transcript.exits(2, signal=9)
    transcript.all_stopped(41)
    (known,) = launch_incidents(transcript.state, 2)
    assert (known.number, known.last_step, known.failure_class) == (1, 41, "infrastructure")
    assert "SIGKILL" in known.title and "restart on the same 2 nodes" in known.decision
    assert launch_incidents(transcript.state, 1) == (), "the launch before it is sent again"


def test_an_incident_that_was_not_over_comes_with_the_next_one() -> None:
    recovery = {"budgets": {"infrastructure": {"restarts": 100}}, "badNodeStrikes": 100}
    transcript = core.Transcript(core.spec(recovery=recovery)).started(step=41)
    transcript.apply(StepCompleted(generation=1, step=42, counted_by="script"))
    num = limits.MAX_LAUNCH_INCIDENTS + 2
    for _ in range(num):
        transcript.exits(2, signal=9)
        transcript.all_stopped(41)
        transcript.succeed(LaunchGroup)
    state = transcript.state
    numbers = [one.number for one in launch_incidents(state, state.generation)]
    assert numbers == [num - 3, num - 2, num - 1, num], "the newest ones, oldest first"
    after = StepCompleted(generation=state.generation, step=43, counted_by="script")
    transcript.apply(after)
    transcript.exits(2, signal=9)
    transcript.all_stopped(43)
    (known,) = launch_incidents(transcript.state, transcript.state.generation)
    assert known.number == num + 1


def test_a_script_of_which_nothing_is_seen_receives_the_last_incident() -> None:
    """The script may have trained since the incident before, which is unknown."""
    transcript = core.Transcript().started()
    for _ in range(2):
        transcript.exits(2, signal=9)
        transcript.all_stopped()
        transcript.succeed(LaunchGroup)
    (known,) = launch_incidents(transcript.state, transcript.state.generation)
    assert (known.number, known.last_step) == (2, -1)


def test_long_texts_of_an_incident_are_cut_for_the_environment() -> None:
    transcript = core.Transcript().started(step=41)
    transcript.exits(2, code=1, error_type="ValueError", error_message="x" * 10_000)
    transcript.all_stopped(41)
    state = transcript.state
    known = launch_incidents(state, state.generation)
    assert known and all(len(one.title) <= limits.MAX_LAUNCH_INCIDENT_CHARS for one in known)
