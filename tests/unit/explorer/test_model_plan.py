"""The plan of a model without a job: its figures, and the job that it writes is launched so."""

from __future__ import annotations

import functools

import pytest
from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.explorer.model_plan import ModelPlan, plan_model, spec_of
from holdfast.orchestrator.explorer.plan import make_plan
from holdfast.orchestrator.explorer.ranking import Alternative, settings_of
from holdfast.orchestrator.explorer.search import Found, search
from holdfast.orchestrator.planner.choose import choose_mesh
from holdfast.orchestrator.planner.memory import WorkerMemory
from holdfast.orchestrator.planner.workload import Workload, layout_of, workload_of
from holdfast.orchestrator.protocol.facts import Gpu

from ..planner.builders import FACTS
from .clusters import catalogue, cluster, hardware, workload

CASES = [
    ("llama3-8b", 8, "H100-80", True),
    ("llama3-8b", 8, "RTX-4090", False),
    ("llama3-70b", 64, "H100-80", True),
    ("llama3-70b", 8, "H100-80", False),
    ("llama3-70b", 8, "B200", True),
    ("llama3-405b", 1024, "H100-80", True),
]


@functools.cache
def found(model: str, devices: int, device: str, compiled: bool) -> tuple[Workload, Found]:
    work = workload(model, max(512, devices), compiled=compiled)
    return work, search(work, cluster(devices, device))


@pytest.mark.parametrize("case", CASES)
def test_every_layout_that_is_ranked_is_launched_as_planned(
    case: tuple[str, int, str, bool],
) -> None:
    work, answer = found(*case)
    memory = WorkerMemory(catalogue().device(case[2]).memory_bytes)
    assert answer.ranked
    for one in answer.ranked:
        spec = spec_of(work, one.layout)
        assert spec is not None
        job = job_from_mapping(spec)
        chosen = choose_mesh(job, job.spec.nodes.max, memory)
        assert chosen is not None
        assert chosen[0] == one.layout.mesh
        assert layout_of(job, chosen[0]) == one.layout
        planned = workload_of(job)
        assert planned is not None
        assert replace(planned, model=work.model) == work


def test_the_plan_of_the_written_job_has_the_same_figures() -> None:
    plan = _plan("llama3-8b", 8)
    assert plan.spec is not None and plan.estimate is not None
    gpus = (Gpu("H100-80", catalogue().device("H100-80").memory_bytes),) * 8
    made = make_plan(
        job_from_mapping(plan.spec), replace(FACTS, gpus=gpus), hardware=hardware("H100-80")
    )
    assert made is not None and made.estimate is not None
    assert made.fits is True
    assert made.estimate == plan.estimate


def test_a_model_that_the_recipe_does_not_have_has_no_job() -> None:
    for name in ("gpt3-13b", "gpt2-xl"):
        if name not in catalogue().architectures:
            continue
        work = workload(name, sequence_length=1024)
        answer = search(work, cluster(8))
        assert spec_of(work, answer.ranked[0].layout) is None
    assert "gpt3-13b" in catalogue().architectures


def _plan(model: str, devices: int, device: str = "H100-80") -> ModelPlan:
    return plan_model(workload(model), (cluster(devices, device),))


def test_the_verdict_has_the_figures_of_the_chosen_one() -> None:
    plan = _plan("llama3-8b", 8)
    chosen = plan.chosen
    assert chosen is not None and chosen.tokens_per_s is not None and chosen.mfu is not None
    assert plan.fits
    for figure in (
        f"{chosen.peak_bytes / 2**30:.1f} of",
        f"{chosen.tokens_per_s:,.0f} tokens/s",
        f"MFU {chosen.mfu:.0%}",
        chosen.strategy,
        chosen.mesh.describe(),
    ):
        assert figure in plan.verdict


def test_nothing_that_fits_has_a_verdict() -> None:
    plan = _plan("llama3-405b", 4)
    assert not plan.fits
    assert plan.chosen is None and plan.estimate is None and plan.spec is None
    assert plan.alternatives == () and plan.lost
    assert plan.verdict.startswith("does not fit: ")


def test_the_reason_names_what_does_not_fit() -> None:
    """States of a model of 8 B fit 8 devices; activations of ten million tokens do not."""
    plan = plan_model(
        replace(workload("llama3-8b", 8), sequence_length=10_000_000), (cluster(8, "H100-80"),)
    )
    assert "CP (context 8) needs least memory" in plan.verdict
    assert "of it activations" in plan.verdict and "its states take" not in plan.verdict
    assert "its states take" in _plan("llama3-405b", 4).verdict


@pytest.mark.parametrize(("devices", "batch", "least"), [(7, 1, "7"), (1_048_576, 7, "8,193")])
def test_a_batch_that_is_too_small_for_the_devices_is_the_reason(
    devices: int, batch: int, least: str
) -> None:
    plan = plan_model(workload("llama3-8b", batch), (cluster(devices),))
    assert not plan.fits and plan.num_considered == 0
    assert f"its batch of {batch} is too small" in plan.verdict
    assert f"at least {least} samples" in plan.verdict and "states" not in plan.verdict


def test_a_device_without_bfloat16_trains_in_float16() -> None:
    work = workload("llama3-8b")
    volta = plan_model(work, (cluster(8, "V100-32"),))
    assert volta.format == "float16" and volta.spec is not None and volta.estimate is not None
    assert workload_of(job_from_mapping(volta.spec)).format == "float16"  # type: ignore[union-attr]
    time = volta.estimate.time
    assert time is not None and 0.2 < time.mfu < 0.6
    both = plan_model(work, (cluster(8, "V100-32"), cluster(8, "H100-80")))
    assert both.format == "bfloat16"


def test_a_job_in_bfloat16_on_a_device_without_it_is_warned_about() -> None:
    spec = _plan("llama3-8b", 8).spec
    assert spec is not None
    on = hardware("V100-32")
    facts = replace(FACTS, gpus=(Gpu("Tesla V100-SXM2-32GB", on.device.memory_bytes),) * 8)
    for format_, warned in (("auto", True), ("float16", False)):
        spec["spec"]["parallelism"]["precision"] = {"parameters": format_}
        plan = make_plan(job_from_mapping(spec), facts, hardware=on)
        assert plan is not None
        assert any("precision.parameters: float16" in one for one in plan.warnings) is warned


def test_the_price_of_tokens_is_that_of_the_devices_and_the_step() -> None:
    plan = _plan("llama3-8b", 8)
    price = catalogue().device("H100-80").price
    assert price is not None and plan.estimate is not None and plan.estimate.time is not None
    for one in plan.alternatives:
        assert one.tokens_per_s is not None
        per_token = 8 * price.per_hour / 3600 / one.tokens_per_s
        assert one.dollars_per_billion_tokens == pytest.approx(per_token * 1e9)
    time = plan.estimate.time
    assert time.dollars_per_day == pytest.approx(8 * 24 * price.per_hour)
    chosen = plan.chosen
    assert chosen is not None
    assert time.dollars_per_billion_tokens == pytest.approx(chosen.dollars_per_billion_tokens)


def test_settings_are_what_differs_from_a_plain_job() -> None:
    work, answer = found(*CASES[0])
    for one in answer.ranked:
        settings = settings_of(one.layout)
        spec = spec_of(work, one.layout)
        assert spec is not None
        parallelism = spec["spec"]["parallelism"]
        for name, value in settings.items():
            where = (
                spec["spec"]["entrypoint"]["recipe"]["config"] if name == "loss" else parallelism
            )
            assert where[name] == value
        axes = {"replicate", "shard", "tensor", "context"}
        assert set(parallelism) - axes == set(settings) - {"loss"}


def test_what_lost_has_its_needs_and_no_throughput() -> None:
    plan = _plan("llama3-70b", 64)
    assert plan.lost
    lost: Alternative
    for lost in plan.lost:
        assert lost.tokens_per_s is None and lost.mfu is None
        assert "GiB" in lost.why or "of 79.1" in lost.why
