"""The projection of a job's events into views."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.cli.render import outcome
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import CancelRequested, CollectivesBegun, StepCompleted
from holdfast.orchestrator.core.state import Keeping
from holdfast.orchestrator.protocol.facts import StepReport, WorkerBeat, largest, report_fields
from holdfast.orchestrator.protocol.messages import Heartbeat
from holdfast.orchestrator.runtime.job_loop import replay
from holdfast.orchestrator.runtime.observe.projection import JobProjection
from holdfast.orchestrator.runtime.observe.view import JobView
from holdfast.workers import worker_protocol

from ...core import harness as core


def projected(transcript: core.Transcript) -> JobProjection:
    return replay(job_from_mapping(transcript.document), transcript.journal)


def view_of(transcript: core.Transcript) -> JobView:
    return projected(transcript).view(transcript.now_ns)


def test_an_incident_names_the_one_that_overtakes_it() -> None:
    transcript = core.Transcript().started(step=5)
    transcript.exits(3, signal=9)
    transcript.all_stopped(5)
    transcript.succeed(LaunchGroup)
    transcript.exits(2, signal=9)
    transcript.all_stopped(5)
    transcript.succeed(LaunchGroup)
    assert [one.overtaken_by for one in view_of(transcript).incidents] == [2, None]
    transcript.step(6)
    first, second = view_of(transcript).incidents
    assert first.overtaken_by == 2 and "total" not in first.seconds
    assert second.overtaken_by is None and "total" in second.seconds


def test_lost_steps_of_a_script_that_reports_none_are_unknown() -> None:
    transcript = core.Transcript(core.spec(script=True)).started(step=None)
    transcript.exits(3, signal=9)
    transcript.all_stopped()
    transcript.wait(0.5)
    transcript.succeed(LaunchGroup)
    (incident,) = view_of(transcript).incidents
    assert incident.no_steps and incident.steps_lost is None
    assert incident.seconds == {"stop": 0.0, "place": 0.0, "launch": 0.5}
    assert "total" not in view_of(transcript).recovery, "whether it trains is unknown"
    assert outcome(incident) == ("all workers run after 0.50 s, when training continued is unknown")
    assert "no checkpoint of the script was seen" in incident.decision
    assert "before it reported a step" in incident.evidence
    transcript.wait(3600)
    transcript.exits(2, signal=9)
    first, second = view_of(transcript).incidents
    assert first.overtaken_by is None and "total" not in first.seconds, "it ran for an hour"
    assert second.overtaken_by is None
    transcript.all_stopped()
    transcript.succeed(LaunchGroup)
    transcript.wait(7)
    transcript.apply(CollectivesBegun(generation=3))
    view = view_of(transcript)
    assert view.recovery["total"].count == 1, "of the second, whose end is known"
    assert view.incidents[-1].seconds["total"] == pytest.approx(7.0)


def test_tokens_of_a_script_are_those_of_the_steps_since_its_own_checkpoint() -> None:
    transcript = core.Transcript(core.spec(script=True)).started(step=None)
    reported: dict[str, Any] = {"tokens": 100, "counted_by": "script"}
    transcript.apply(StepCompleted(generation=1, step=90, began_after=-1, **reported))
    assert view_of(transcript).tokens_total == 9_100
    transcript.exits(3, signal=9)
    transcript.all_stopped()
    transcript.succeed(LaunchGroup)
    transcript.apply(StepCompleted(generation=2, step=81, began_after=80, **reported))
    assert view_of(transcript).tokens_total == 9_200
    transcript.apply(StepCompleted(generation=2, step=83, began_after=80, **reported))
    assert view_of(transcript).tokens_total == 9_400
    transcript.apply(StepCompleted(generation=2, step=85, began_after=78, **reported))
    assert view_of(transcript).tokens_total == 9_800, "it began earlier than it seemed"


@pytest.mark.parametrize(
    ("counted_by", "mesh"), [("", "HSDP"), ("session", "HSDP"), ("script", ""), ("posted", "")]
)
def test_a_script_has_the_mesh_only_if_the_session_counts_its_steps(
    counted_by: str, mesh: str
) -> None:
    transcript = core.Transcript(core.spec(script=True)).started(step=None)
    before = view_of(transcript)
    assert (before.mesh, before.strategy) == ("", "")
    transcript.apply(StepCompleted(generation=1, step=3, step_s=0.4, counted_by=counted_by))
    after = view_of(transcript)
    assert (bool(after.mesh), after.strategy) == (bool(mesh), mesh)


def test_a_recipe_has_its_mesh_from_the_launch_on() -> None:
    assert view_of(core.Transcript().started(step=None)).strategy == "HSDP"


def test_restarts_count_also_where_no_budget_is_charged() -> None:
    transcript = core.Transcript(core.spec(script=True)).started(step=None)
    assert view_of(transcript).relaunches == 0
    transcript.exits(3, signal=9)
    transcript.all_stopped()
    transcript.succeed(LaunchGroup)
    view = view_of(transcript)
    assert (view.generation, view.relaunches) == (2, 1)


def test_a_script_without_a_pulse_is_not_suspect() -> None:
    transcript = core.Transcript(core.spec({"min": 1}, script=True)).started("a", step=None)
    projection = projected(transcript)
    silent = WorkerBeat(rank=0, pulse_age_s=99, keeps=True)
    paused = WorkerBeat(rank=1, ticks=7, pulse_age_s=99, keeps="it is compiled")
    beat = Heartbeat(generation=1, workers=(silent, paused))
    projection.beat(transcript.now_ns, "a", beat)
    view = projection.view(transcript.now_ns)
    assert [worker.state for worker in view.nodes[0].workers] == ["running", "suspect"]
    assert view.keeping == "survivors keep their process, but not rank 1: it is compiled"


def test_a_job_that_has_ended_has_no_nodes_and_nothing_in_memory() -> None:
    transcript = core.Transcript().started(step=5)
    transcript.apply(CancelRequested(by="bob"))
    transcript.all_stopped(6)
    assert view_of(transcript).memory_step == 6 and view_of(transcript).nodes
    projection = projected(transcript)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keeping, "doubts", lambda _keeping, generation: generation == 1)
        assert projection.view(transcript.now_ns).memory_step == -1, "replicas may differ"
    transcript.commit(6)
    view = view_of(transcript)
    assert (view.state, view.memory_step, view.nodes) == ("cancelled", -1, [])
    assert view.checkpoints[-1].step == 6


def test_every_number_of_a_step_report_reaches_the_view_without_further_code() -> None:
    numbers = StepReport(
        loss=1.5,
        tokens=512,
        step_s=0.5,
        stall_s=0.1,
        copy_s=0.2,
        staging_s=0.3,
        copies_thrown_away=2,
        device_memory_peak_bytes=7,
        sent_bytes=9,
        flops_per_step=3.0,
        total_steps=400,
    )
    assert all(value != default for value, default in zip(*_fields(numbers), strict=True))
    progress = worker_protocol.Progress(step=4, **report_fields(numbers))
    beat = WorkerBeat(rank=0, step=4, **report_fields(progress))
    event = StepCompleted(generation=1, step=4, **largest([beat]))
    transcript = core.Transcript(core.spec(script=True)).started(step=None)
    projection = JobProjection(transcript.state.job)
    projection.observe(transcript.now_ns, event, transcript.apply(event), transcript.state)
    assert report_fields(projection.view(transcript.now_ns)) == report_fields(numbers)


def _fields(numbers: StepReport) -> tuple[list[object], list[object]]:
    return list(report_fields(numbers).values()), list(report_fields(StepReport()).values())


def test_the_history_covers_the_whole_job_with_few_points() -> None:
    transcript = core.Transcript().started(step=0)
    for step in range(1, 1000):
        transcript.wait(1)
        transcript.step(step)
    history = view_of(transcript).history
    assert 120 <= len(history) <= 240
    assert history[0].step < 10 and history[-1].step > 980
    gaps = {after.step - before.step for before, after in pairwise(history)}
    assert max(gaps) <= 2 * min(gaps), "evenly"
