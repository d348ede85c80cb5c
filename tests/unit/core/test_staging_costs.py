"""The staging interval, report by report: what is measured, when it is judged, and what it says."""

from __future__ import annotations

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import StepCompleted, SuspendRequested
from holdfast.orchestrator.core.staging_interval import (
    LOWER_AFTER_S,
    SAMPLES,
    SETTLED_STEPS,
    describe,
    longest,
    measured,
)
from holdfast.orchestrator.core.state import StagingSample

from .harness import SECOND, Transcript, spec

RARE_STORAGE = {"storage": {"everySteps": 10_000}}


def _job(**checkpoint: object) -> Transcript:
    """Job whose step time is known; nothing is measured yet."""
    job = Transcript(spec(checkpoint=checkpoint or RARE_STORAGE)).started(step=0)
    job.wait(3)
    return job


def _report(job: Transcript, step: int, *, stall_s: float, **more: float) -> None:
    known = {"step_s": 1.0, "copy_s": 0.0, "staging_s": 0.1}
    job.apply(StepCompleted(generation=1, step=step, stall_s=stall_s, **(known | more)))


def _reports(job: Transcript, first: int, **costs: float) -> int:
    """Report as many stagings as a decision needs; returns the next step."""
    every = job.state.stage_every_steps
    for number in range(SAMPLES):
        _report(job, first + number * every, **costs)
    return first + SAMPLES * every


@pytest.mark.parametrize(
    ("every", "sample", "blocked_s", "delayed_s", "step_s"),
    [
        (1, (0.4, 0.2, 0.5), 0.4, 0.0, 0.6),
        (2, (0.4, 0.2, 0.5), 0.4, 0.0, 0.8),
        (3, (0.4, 0.2, 0.5), 0.4, 0.0, 1.0),
        (3, (0.8, 0.7, 3.5), 0.3, 0.2, 1.0),
        (3, (0.8, 0.0, 3.5), 0.8, 0.0, 1.0),
        (1, (0.95, 0.0, 0.5), 0.95, 0.0, 0.1),
    ],
)
def test_the_costs_of_a_staging_follow_from_what_the_ranks_report(
    every: int,
    sample: tuple[float, float, float],
    blocked_s: float,
    delayed_s: float,
    step_s: float,
) -> None:
    event = StepCompleted(generation=1, step=9, step_s=1.0)
    costs = measured(event, [StagingSample(1, *sample)], every)
    found = (costs.blocked_s, costs.delayed_s, costs.step_s, costs.whole_s)
    assert found == pytest.approx((blocked_s, delayed_s, step_s, sample[2]))


def test_the_longest_interval_is_that_of_storage_unless_storage_goes_by_time() -> None:
    def of(**storage: object) -> int:
        return longest(job_from_mapping(spec(checkpoint={"storage": storage})).spec.checkpoint)

    assert of(everySteps=25) == 25
    assert of() == min(limits.MAX_STAGING_INTERVAL, limits.STORAGE_EVERY_STEPS)
    assert of(everySeconds=60) == limits.MAX_STAGING_INTERVAL


def test_reports_without_a_staging_or_a_step_time_are_not_measured() -> None:
    job = _job()
    for step in range(1, 9):
        _report(job, step, stall_s=0.5, staging_s=0.0)
        _report(job, step, stall_s=0.5, step_s=0.0)
    assert job.state.staging.samples == [] and job.state.staging.interval is None


@pytest.mark.parametrize("when", ["pace", "stop", "quiesce"])
def test_nothing_is_measured_while_training_is_not_steady(when: str) -> None:
    job = Transcript(spec(checkpoint={"memory": {"everySteps": "auto"}, **RARE_STORAGE})).started()
    if when != "pace":
        job.wait(3)
        _reports(job, 1, stall_s=0.5)
        assert job.state.stage_every_steps > 1
    if when == "stop":
        job.exits(0, signal=9)
    if when == "quiesce":
        job.apply(SuspendRequested())
        assert job.state.quiesce is not None
    samples = list(job.state.staging.samples)
    _report(job, 500, stall_s=0.5)
    assert job.state.staging.samples == samples


def test_the_first_choice_of_every_step_keeps_what_was_measured() -> None:
    job = _job()
    _reports(job, 1, stall_s=0.01)
    chosen = job.state.staging.interval
    assert chosen is not None and (chosen.every_steps, chosen.since_step) == (1, 0)
    assert chosen.judged_from == SAMPLES + SETTLED_STEPS
    assert len(job.state.staging.samples) == SAMPLES
    assert not [text for _at, text in job.state.notes if "memory tier stages" in text]
    assert describe(job.state) == "every step; 0.01 s each = 1 % of the step time (budget 3 %)"


def test_a_new_interval_is_noted_and_judged_from_its_own_stagings() -> None:
    job = _job()
    _reports(job, 1, stall_s=0.12)
    chosen = job.state.staging.interval
    assert chosen is not None and chosen.every_steps == 5
    text = f"after {chosen.since_step} steps, the memory tier stages {chosen.reason.text}"
    assert (job.now_ns, text) in job.state.notes
    assert job.state.staging.samples == []
    assert chosen.judged_from == chosen.since_step + SETTLED_STEPS
    _report(job, chosen.judged_from - 1, stall_s=0.5)
    assert job.state.staging.samples == [], "it may be of the interval before"
    _report(job, chosen.judged_from, stall_s=0.5)
    assert len(job.state.staging.samples) == 1


def _chosen(stall_s: float) -> tuple[Transcript, int]:
    """A job with the interval that this cost asks for, and the step from which it is judged."""
    job = _job()
    _reports(job, 1, stall_s=stall_s)
    chosen = job.state.staging.interval
    assert chosen is not None
    return job, chosen.judged_from


@pytest.mark.parametrize(("stall_s", "every"), [(0.119, 4), (0.149, 4), (0.151, 6), (0.209, 7)])
def test_the_interval_becomes_longer_if_more_than_a_quarter_is_missing(
    stall_s: float, every: int
) -> None:
    job, step = _chosen(0.1)
    assert job.state.stage_every_steps == 4
    _reports(job, step, stall_s=stall_s)
    assert job.state.stage_every_steps == every


@pytest.mark.parametrize(
    ("stall_s", "after_s", "every"),
    [
        (0.029, LOWER_AFTER_S, 1),
        (0.029, LOWER_AFTER_S - 0.1, 4),
        (0.059, LOWER_AFTER_S, 4),
        (0.089, LOWER_AFTER_S, 4),
    ],
)
def test_the_interval_becomes_shorter_after_a_minute_if_less_than_half_is_needed(
    stall_s: float, after_s: float, every: int
) -> None:
    job, step = _chosen(0.1)
    job.now_ns += round(after_s * SECOND)
    _reports(job, step, stall_s=stall_s)
    assert job.state.stage_every_steps == every


def test_the_next_generation_measures_again() -> None:
    job, step = _chosen(0.1)
    _report(job, step, stall_s=0.1)
    assert job.state.staging.samples
    job.exits(0, signal=9)
    job.all_stopped(step)
    assert job.of(LaunchGroup) and job.state.staging.samples == []


# -- sentences --------------------------------------------------------------------------------
def test_the_sentence_has_the_copy_only_where_it_delays_a_step() -> None:
    job = _job()
    _reports(job, 1, stall_s=0.1, copy_s=0.6)
    assert describe(job.state) == (
        "every 10 steps; 0.25 s each, of which the copy 0.15 s = 2.8 % of the step time "
        "(budget 3 %)"
    )


def test_a_staging_that_takes_longer_than_a_step_gives_the_interval() -> None:
    job = _job()
    _reports(job, 1, stall_s=0.01, staging_s=3.5)
    assert describe(job.state) == "every 4 steps; a staging takes 3.5 s, a step 0.99 s"


def test_a_budget_that_even_the_longest_interval_exceeds_is_said() -> None:
    job = _job(storage={"everySteps": 5})
    _reports(job, 1, stall_s=0.5)
    assert describe(job.state) == (
        "every 5 steps; 0.5 s each = 20 % of the step time, in the longest interval (budget 3 %)"
    )
    within = _job(storage={"everySteps": 5})
    _reports(within, 1, stall_s=0.12)
    assert describe(within.state).endswith("2.7 % of the step time (budget 3 %)")


def test_a_budget_that_is_just_kept_and_a_staging_of_just_one_step_are_no_exceptions() -> None:
    job = _job(memory={"budgetPercent": 3.125}, storage={"everySteps": 4})
    _reports(job, 1, stall_s=0.125, step_s=1.125)
    assert describe(job.state).endswith("3.1 % of the step time (budget 3.125 %)")
    job = _job()
    _reports(job, 1, stall_s=0.0, staging_s=1.0)
    assert describe(job.state).startswith("every step; 0 s each")


def test_without_measurements_the_interval_is_described_by_the_spec() -> None:
    assert describe(_job().state) == "every step, until stagings are measured"
    assert describe(Transcript().started(step=None).state) == ""
    for every, text in ((1, "every step"), (4, "every 4 steps")):
        job = _job(memory={"everySteps": every}, **RARE_STORAGE)
        assert describe(job.state) == f"{text}: checkpoint.memory.everySteps"
    assert describe(_job(memory={"everySteps": 0}, **RARE_STORAGE).state) == ""
