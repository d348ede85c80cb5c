"""The plan beside what is measured: in the view, in status and report, and as metrics."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.orchestrator.catalogue.calibration import Calibration, CalibrationEntry, key_of
from holdfast.orchestrator.catalogue.load import load_catalogue
from holdfast.orchestrator.cli.output import size
from holdfast.orchestrator.cli.render import planned
from holdfast.orchestrator.core.events import StepCompleted
from holdfast.orchestrator.explorer.hardware import calibrated, hardware_of
from holdfast.orchestrator.explorer.plan import make_plan
from holdfast.orchestrator.explorer.step_time import Hardware
from holdfast.orchestrator.planner.memory import CONTEXT_BYTES
from holdfast.orchestrator.planner.workload import layout_of, workload_of
from holdfast.orchestrator.protocol.facts import Gpu, Processor
from holdfast.orchestrator.runtime.observe.projection import JobProjection
from holdfast.orchestrator.runtime.observe.prometheus import METRICS
from holdfast.orchestrator.runtime.observe.view import JobView

from ...core import harness as core

MEASURED_BYTES = 2**26
MEASURED_SENT = 2**21


def trained_on(gpu: str) -> tuple[core.Transcript, JobView]:
    """A job on two nodes with two such GPUs each, after a step."""
    document = core.spec(resources={"gpu": 1})
    transcript = core.Transcript(document).started(step=None)
    state = transcript.state
    for node in state.nodes.values():
        gpus = (Gpu(name=gpu, memory_bytes=80 * 2**30),) * 2
        facts = msgspec.structs.replace(node.facts, gpus=gpus)
        state.nodes.change(node.name, facts=facts)
    projection = JobProjection(state.job)
    event = StepCompleted(
        generation=1, step=4, step_s=0.5, flops_per_step=1e15,
        device_memory_peak_bytes=MEASURED_BYTES, sent_bytes=MEASURED_SENT,
    )  # fmt: skip
    projection.observe(transcript.now_ns, event, transcript.apply(event), state)
    return transcript, projection.view(transcript.now_ns)


def samples(view: JobView, name: str) -> dict[str, float]:
    family = next(one for one in METRICS if one.name == name)
    return {labels.get("of", ""): value for labels, value in family.samples(view)}


def test_the_view_has_the_figures_of_the_plan() -> None:
    transcript, view = trained_on("NVIDIA H100 80GB HBM3")
    plan = make_plan(transcript.state.job, next(iter(transcript.state.nodes.values())).facts)
    assert plan is not None and plan.estimate is not None and view.planned is not None
    assert plan.mesh == transcript.state.mesh
    tensors = plan.estimate.peak_bytes - CONTEXT_BYTES
    assert view.planned.device_memory_bytes == pytest.approx(tensors, abs=1)
    sent = sum(row.num_bytes for row in plan.estimate.traffic)
    assert view.planned.sent_bytes == pytest.approx(sent, abs=2)
    by_category = sum(view.planned.categories.values())
    assert by_category == pytest.approx(tensors, abs=9) and "moments" in view.planned.categories
    assert view.planned.step_s is not None and view.planned.step_s > 0


def test_the_error_stands_beside_what_is_measured() -> None:
    _, view = trained_on("NVIDIA H100 80GB HBM3")
    assert view.planned is not None and view.planned.step_s is not None
    memory = view.planned.device_memory_bytes / MEASURED_BYTES - 1
    step = view.planned.step_s / 0.5 - 1
    errors = samples(view, "holdfast_plan_error_ratio")
    sent = view.planned.sent_bytes / MEASURED_SENT - 1
    assert errors == {
        "memory": pytest.approx(memory), "step": pytest.approx(step), "sent": pytest.approx(sent),
    }  # fmt: skip
    assert samples(view, "holdfast_planned_step_seconds") == {"": view.planned.step_s}
    first, second, third = planned(view)
    assert first.endswith(f"(measured: {size(MEASURED_BYTES)})")
    assert second.endswith("(measured: 0.500 s)")
    assert third.endswith(f"sent by a rank in a step (measured: {size(MEASURED_SENT)})")


def test_a_device_that_the_catalogue_lacks_has_no_planned_time() -> None:
    _, view = trained_on("Some Accelerator 9000")
    assert view.planned is not None and view.planned.step_s is None
    assert set(samples(view, "holdfast_plan_error_ratio")) == {"memory", "sent"}
    assert samples(view, "holdfast_planned_step_seconds") == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12),
     ("Tesla V100-SXM2-16GB", 125e12), ("NVIDIA A10G", 70e12), ("Some other GPU", None)],
)  # fmt: skip
def test_mfu_is_the_share_of_the_peak_of_the_device_that_the_agent_reports(
    name: str, peak: float | None
) -> None:
    _, view = trained_on(name)
    assert view.world_size == 4
    assert view.mfu == (None if peak is None else pytest.approx(1e15 / 0.5 / (4 * peak)))


def on_processors(**facts: object) -> tuple[core.Transcript, JobProjection]:
    """A job on CPUs after a step, all nodes on this machine."""
    transcript = core.Transcript(core.spec()).started(step=None)
    state = transcript.state
    for node in state.nodes.values():
        here = msgspec.structs.replace(
            node.facts, address="127.0.0.1", cpus=8, memory_bytes=2**36, **facts
        )
        state.nodes.change(node.name, facts=here)
    projection = JobProjection(state.job)
    event = StepCompleted(generation=1, step=4, step_s=0.5)
    projection.observe(transcript.now_ns, event, transcript.apply(event), state)
    return transcript, projection


def figures_of_plan(
    transcript: core.Transcript, entries: tuple[CalibrationEntry, ...] = ()
) -> tuple[Hardware, float, int]:
    """(hardware, seconds of a step, bytes) as `holdfast spec plan` computes them on such a node."""
    state = transcript.state
    facts = next(iter(state.nodes.values())).facts
    hardware = hardware_of(load_catalogue(), state.job, facts, len(state.group.members))
    work = workload_of(state.job)
    assert hardware is not None and work is not None and state.mesh is not None
    hardware = calibrated(hardware, work, layout_of(state.job, state.mesh), entries)
    plan = make_plan(state.job, facts, hardware=hardware)
    assert plan is not None and plan.estimate is not None and plan.estimate.time is not None
    assert plan.mesh == state.mesh
    return hardware, plan.estimate.time.seconds, plan.estimate.peak_bytes


def test_a_job_on_processors_has_the_figures_of_its_plan() -> None:
    transcript, projection = on_processors()
    view = projection.view(transcript.now_ns)
    _, seconds, peak = figures_of_plan(transcript)
    assert view.planned is not None
    assert view.planned.step_s == pytest.approx(seconds)
    assert view.planned.device_memory_bytes == peak


def test_a_measurement_of_the_user_holds_for_the_running_job_too() -> None:
    transcript, projection = on_processors(processor=Processor("Some CPU"))
    hardware, cold, _ = figures_of_plan(transcript)
    state = transcript.state
    work = workload_of(state.job)
    assert work is not None and state.mesh is not None
    key = key_of(work, layout_of(state.job, state.mesh), hardware.device.name)
    assert key.device.startswith("Some CPU")
    factors = Calibration(block=5.0, head=7.0, optimizer=3.0, date="2026-11-25")
    entries = (CalibrationEntry(key=key, calibration=factors),)
    projection.use_measurements(entries)
    view = projection.view(transcript.now_ns)
    _, seconds, _ = figures_of_plan(transcript, entries)
    assert view.planned is not None and view.planned.step_s == pytest.approx(seconds)
    assert seconds > 2 * cold


def test_what_is_not_measured_is_called_unknown() -> None:
    transcript, projection = on_processors()
    _memory, _step, sent = planned(projection.view(transcript.now_ns))
    assert sent.endswith("sent by a rank in a step (measured: unknown)")


def test_a_micro_batch_that_was_chosen_by_memory_is_planned_with() -> None:
    transcript, projection = on_processors()
    whole = projection.view(transcript.now_ns).planned
    state = transcript.state
    assert state.group.membership is not None
    state.group.membership = msgspec.structs.replace(state.group.membership, micro_batch=1)
    fewer = projection.view(transcript.now_ns).planned
    assert whole is not None and fewer is not None
    assert fewer.device_memory_bytes < whole.device_memory_bytes


def test_a_script_has_no_plan() -> None:
    transcript = core.Transcript(core.spec(script=True)).started(step=None)
    projection = JobProjection(transcript.state.job)
    event = StepCompleted(generation=1, step=4, step_s=0.5)
    projection.observe(transcript.now_ns, event, transcript.apply(event), transcript.state)
    view = projection.view(transcript.now_ns)
    assert view.planned is None and list(planned(view)) == []
