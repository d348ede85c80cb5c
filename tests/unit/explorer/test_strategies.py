"""Other strategies for a job's devices: the job can be changed to each, with its figures."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping, job_to_mapping
from holdfast.orchestrator.explorer.plan import Plan, make_plan
from holdfast.orchestrator.explorer.ranking import Alternative
from holdfast.orchestrator.explorer.search import estimate
from holdfast.orchestrator.explorer.step_time import Hardware
from holdfast.orchestrator.explorer.strategies import Strategies
from holdfast.orchestrator.planner.choose import choose_mesh, memory_on
from holdfast.orchestrator.planner.micro_batch import fitted_layout
from holdfast.orchestrator.planner.workload import workload_of
from holdfast.orchestrator.protocol.facts import Gpu, NodeFacts

from ..planner.builders import FACTS, make_job
from .clusters import catalogue, hardware

MODEL = {"dim": 4096, "numLayers": 32, "numHeads": 32, "numKvHeads": 8, "ffnDim": 14336,
         "vocabSize": 128256}  # fmt: skip


def gpu_job(*, nodes: int = 2, config: Any = None, **more: Any) -> TrainingJob:
    recipe = {"model": MODEL, "globalBatch": 64, "data": {"sequenceLength": 4096}}
    return make_job(
        nodes=(1, nodes), workers=8, recipe=recipe | (config or {}), resources={"gpu": 1}, **more
    )


JOBS = {
    "auto": gpu_job(),
    "HSDP, checkpoints": gpu_job(
        parallelism={"shard": 8, "activationCheckpointing": {"full": {"everyNthBlock": 2}}}
    ),
    "FSDP and a tensor axis": gpu_job(parallelism={"shard": 4, "tensor": 2}),
    "pipeline": gpu_job(parallelism={"pipeline": {"ranks": 2, "schedule": "gpipe"}}),
    "Muon": gpu_job(config={"optimizer": {"muon": {}}}),
    "z-loss": gpu_job(config={"loss": {"zLoss": 1e-4, "chunkTokens": 512}}),
    "does not fit": gpu_job(nodes=1, parallelism={"shard": 1, "replicate": 8}),
}


def node_of(device: str) -> NodeFacts:
    return replace(FACTS, gpus=(Gpu(device, catalogue().device(device).memory_bytes),) * 8)


@functools.cache
def planned(name: str) -> Plan:
    plan = make_plan(JOBS[name], node_of("H100-80"), hardware=hardware())
    assert plan is not None
    return plan


def strategies(plan: Plan) -> Strategies:
    assert plan.strategies is not None
    return plan.strategies


def written(job: TrainingJob, one: Alternative) -> TrainingJob:
    """The job as a user changes it to this strategy."""
    mapping = job_to_mapping(job)
    config = mapping["spec"]["entrypoint"]["recipe"]["config"]
    settings = dict(one.settings)
    chunk = settings.pop("loss", {}).get("chunkTokens", 0)
    config["loss"] = {**config.get("loss", {}), "chunkTokens": chunk}
    config["microBatch"] = one.micro_batch
    mesh = one.mesh
    mapping["spec"]["nodes"] = {"min": job.spec.nodes.max, "max": job.spec.nodes.max}
    axes = {"shard": mesh.shard, "tensor": mesh.tensor, "context": mesh.context}
    kept = {
        name: value
        for name, value in mapping["spec"].get("parallelism", {}).items()
        if name in ("precision", "ddp")
    }
    mapping["spec"]["parallelism"] = {**kept, **axes, **settings}
    return job_from_mapping(mapping)


@pytest.mark.parametrize("name", JOBS)
def test_each_strategy_written_into_the_job_has_its_figures(name: str) -> None:
    job, found = JOBS[name], strategies(planned(name))
    assert len(found.alternatives) > 3
    for number, one in enumerate(found.alternatives):
        if number == found.of_job:
            continue
        changed = written(job, one)
        memory = memory_on(changed, [node_of("H100-80")])
        chosen, work = choose_mesh(changed, changed.spec.nodes.max, memory), workload_of(changed)
        assert chosen is not None and chosen[0] == one.mesh and work is not None
        layout = fitted_layout(changed, one.mesh, memory.device)
        figures = estimate(work, layout, hardware())
        assert figures.num_bytes == one.peak_bytes
        assert figures.tokens_per_s == pytest.approx(one.tokens_per_s)


@pytest.mark.parametrize("name", JOBS)
def test_the_jobs_own_is_among_them_if_it_fits(name: str) -> None:
    plan = planned(name)
    found = strategies(plan)
    assert (found.of_job is not None) is plan.fits
    if found.of_job is None:
        return
    own = found.alternatives[found.of_job]
    assert plan.estimate is not None and plan.estimate.time is not None
    assert (own.mesh, own.peak_bytes) == (plan.mesh, plan.estimate.peak_bytes)
    assert own.tokens_per_s == pytest.approx(plan.estimate.time.tokens_per_s)
    # Each other strategy is there at most twice: as the job has it, and at its best.
    names = [one.strategy for one in found.alternatives]
    assert {name for name in names if names.count(name) > 1} <= {own.strategy}


def test_all_but_the_first_say_why_they_lost() -> None:
    first, *others = strategies(planned("auto")).alternatives
    assert first.why == "" and all(one.why for one in others)


def test_what_the_recipe_refuses_is_left_out() -> None:
    muon = strategies(planned("Muon")).alternatives
    assert all(one.mesh.tensor == 1 and "offload" not in one.settings for one in muon)
    divided = strategies(planned("z-loss")).alternatives
    assert all(one.mesh.tensor == 1 for one in divided)  # logits of a token must be whole
    assert any(one.mesh.tensor > 1 for one in strategies(planned("auto")).alternatives)


def test_a_job_on_cpus_has_its_share_of_main_memory() -> None:
    job = make_job(nodes=(1, 1), workers=4, recipe={"globalBatch": 8})
    facts = replace(FACTS, memory_bytes=8 * 2**30)
    on: Hardware = hardware()
    plan = make_plan(job, facts, hardware=on)
    assert plan is not None
    names = {one.strategy for one in strategies(plan).alternatives}
    assert {"DDP", "FSDP", "HSDP"} <= names
    tight = make_plan(job, replace(facts, memory_bytes=4 * 2**30), hardware=on)
    assert tight is not None and tight.strategies is None  # all of it is for the processes


def test_without_a_model_or_hardware_there_are_none() -> None:
    script = make_plan(make_job(resources={"gpu": 1}), FACTS, hardware=hardware())
    assert script is not None and script.strategies is None
    unknown = make_plan(JOBS["auto"], replace(FACTS, gpus=(Gpu("H100", 80 * 2**30),) * 8))
    assert unknown is not None and unknown.strategies is None
