"""Ways to make a job fit: each is valid in the spec, fits, and has nothing superfluous."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping, job_to_mapping
from holdfast.orchestrator.errors import SpecError
from holdfast.orchestrator.explorer.advice import (
    MAX_CHANGES,
    NOTHING_HELPS,
    SHOWN,
    Way,
    ways_to_fit,
)
from holdfast.orchestrator.explorer.plan import Plan, make_plan
from holdfast.orchestrator.planner.memory import WorkerMemory
from holdfast.orchestrator.planner.refusal import refusal
from holdfast.orchestrator.protocol.facts import Gpu, NodeFacts
from holdfast.orchestrator.protocol.mesh import Mesh

from ..planner.builders import FACTS, make_job
from .clusters import catalogue, hardware

LLAMA_70B = {
    "dim": 8192, "numLayers": 80, "numHeads": 64, "numKvHeads": 8, "ffnDim": 28672,
    "vocabSize": 128256,
}  # fmt: skip
LLAMA_8B = {
    "dim": 4096, "numLayers": 32, "numHeads": 32, "numKvHeads": 8, "ffnDim": 14336,
    "vocabSize": 128256,
}  # fmt: skip


def gpu_job(
    model: dict[str, int], *, nodes: int = 1, sequence: int = 4096, batch: int = 64, **more: Any
) -> TrainingJob:
    recipe = {"model": model, "globalBatch": batch, "data": {"sequenceLength": sequence}}
    recipe |= more.pop("config", {})
    return make_job(nodes=(1, nodes), workers=8, recipe=recipe, resources={"gpu": 1}, **more)


JOBS = {
    "70B on one node": (gpu_job(LLAMA_70B), "H100-80"),
    "70B over a tensor axis": (gpu_job(LLAMA_70B, parallelism={"tensor": 8}), "H100-80"),
    "70B in a pipeline": (
        gpu_job(LLAMA_70B, nodes=2, parallelism={"pipeline": {"ranks": 8}}),
        "H100-80",
    ),
    "70B in replicas of a node": (gpu_job(LLAMA_70B, nodes=4, parallelism={"shard": 8}), "H200"),
    "70B with selective checkpoints": (
        gpu_job(LLAMA_70B, nodes=2, parallelism={"activationCheckpointing": {"selective": {}}}),
        "H100-80",
    ),
    "8B with DDP": (gpu_job(LLAMA_8B, parallelism={"shard": 1, "replicate": 8}), "H100-80"),
    "8B on small devices": (gpu_job(LLAMA_8B), "RTX-4090"),
    "8B with long sequences": (
        gpu_job(LLAMA_8B, sequence=65536, batch=8, parallelism={"shard": 8}),
        "H100-80",
    ),
    "8B with a large micro-batch": (gpu_job(LLAMA_8B, config={"microBatch": 8}), "H100-80"),
    "8B in a pipeline, full checkpoints": (
        gpu_job(
            LLAMA_8B,
            sequence=16384,
            parallelism={"pipeline": {"ranks": 2}, "activationCheckpointing": {"full": {}}},
        ),
        "RTX-4090",
    ),
}


AXES = ("tensor", "context", "pipeline")


@pytest.fixture(autouse=True)
def _without_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out strategies: they are most of the work of a plan, and no way depends on them."""
    monkeypatch.setattr("holdfast.orchestrator.explorer.plan.strategies_of", lambda *_: None)


def facts_of(device: str) -> NodeFacts:
    memory = catalogue().device(device).memory_bytes
    return replace(FACTS, gpus=(Gpu(device, memory),) * 8)


def plan_of(job: TrainingJob, device: str) -> Plan | None:
    return make_plan(job, facts_of(device), hardware=hardware(device))


def written(job: TrainingJob, changes: dict[str, Any]) -> TrainingJob:
    """The job with these fields in its document, loaded as a user's file is."""
    document = copy.deepcopy(job_to_mapping(job))
    for field, value in changes.items():
        *path, last = field.split(".")
        at = document["spec"]
        for name in path:
            at = at.setdefault(name, {})
        at[last] = value
    return job_from_mapping(document)


@pytest.mark.parametrize("name", JOBS)
def test_every_way_is_valid_and_fits_when_it_is_written(name: str) -> None:
    job, device = JOBS[name]
    plan = plan_of(job, device)
    assert plan is not None and plan.fits is False, "the case must not fit as it is"
    assert 0 < len(plan.ways) <= SHOWN
    for way in plan.ways:
        changed = plan_of(written(job, way.changes), device)
        assert changed is not None and changed.estimate is not None
        assert changed.fits is True, way
        assert changed.estimate.peak_bytes == way.num_bytes


@pytest.mark.parametrize("name", JOBS)
def test_no_way_has_a_change_too_many(name: str) -> None:
    job, device = JOBS[name]
    plan = plan_of(job, device)
    assert plan is not None
    for way in plan.ways:
        # A change of shard may need other replicas and nodes with it.
        follow = {"parallelism.replicate", "nodes.min"}
        if way.changes.keys() & {f"parallelism.{axis}" for axis in AXES}:
            follow.add("parallelism.shard")  # so that a replica keeps its ranks
        assert 0 < len(way.changes.keys() - follow) <= MAX_CHANGES
        for field in way.changes.keys() - follow:
            fewer = {key: value for key, value in way.changes.items() if key != field}
            try:
                less = plan_of(written(job, fewer), device)
            except SpecError:
                continue  # the rest is refused without it
            assert less is None or less.fits is False, (way.changes, field)


@pytest.mark.parametrize("name", JOBS)
def test_the_price_of_a_way_is_that_of_the_changed_job(name: str) -> None:
    job, device = JOBS[name]
    plan = plan_of(job, device)
    assert plan is not None and plan.estimate is not None and plan.estimate.time is not None
    for way in plan.ways:
        changed = plan_of(written(job, way.changes), device)
        assert changed is not None and changed.estimate is not None
        assert changed.estimate.time is not None and way.step_ratio is not None
        ratio = changed.estimate.time.seconds / plan.estimate.time.seconds
        assert way.step_ratio == pytest.approx(ratio)
        assert way.device_ratio == way.changes.get("nodes.max", job.spec.nodes.max) / (
            job.spec.nodes.max
        )
        text = way.describe()
        assert all(field in text for field in way.changes)
        assert f"{way.num_bytes / 2**30:.1f} GiB per worker" in text


def test_the_ways_differ_in_their_fields() -> None:
    job, device = JOBS["70B on one node"]
    plan = plan_of(job, device)
    assert plan is not None
    assert len({frozenset(way.changes) for way in plan.ways}) == len(plan.ways) == SHOWN


def test_ways_of_a_job_on_cpus_are_within_main_memory() -> None:
    recipe = {"globalBatch": 64, "model": {"dim": 1024, "numLayers": 12, "numHeads": 16}}
    job = make_job(nodes=(1, 1), recipe=recipe, resources={"memory": "1500Mi"})
    plan = make_plan(job, FACTS)
    assert plan is not None and plan.fits is False
    assert plan.ways
    for way in plan.ways:
        assert "parallelism.offload" not in way.changes
        changed = make_plan(written(job, way.changes), FACTS)
        assert changed is not None and changed.fits is True


def test_a_script_has_no_ways() -> None:
    assert ways_to_fit(make_job(), 2, WorkerMemory(2**30)) == ()


def test_the_text_of_a_way_is_what_a_user_writes() -> None:
    way = Way({"parallelism.activationCheckpointing": {"full": {}}}, 2**30)
    assert way.describe() == (
        "parallelism.activationCheckpointing: {full: {}} (1.0 GiB per worker)"
    )
    way = Way({"nodes.max": 4}, 3 * 2**30, step_ratio=0.5, device_ratio=2.0)
    assert way.describe() == (
        "nodes.max: 4 (3.0 GiB per worker; a step takes 0.50 x as long; 2 x the devices)"
    )


def test_axes_that_divide_the_model_are_raised_too() -> None:
    """Fields that follow are changed with them; what the recipe cannot divide is not offered."""
    ways = [way for job, device in JOBS.values() for way in all_ways(job, device)]
    raised = [way.changes for way in ways if way.changes.get("parallelism.tensor", 1) > 1]
    assert raised
    assert any(way.changes.get("parallelism.context", 1) > 1 for way in ways)
    odd = {**LLAMA_8B, "numHeads": 31, "numKvHeads": 31, "dim": 3968}
    job = gpu_job(odd, parallelism={"shard": 8}, config={"microBatch": 8})
    found = all_ways(job, "H100-80")
    assert found and not any("parallelism.tensor" in way.changes for way in found)


def all_ways(job: TrainingJob, device: str) -> tuple[Way, ...]:
    plan = plan_of(job, device)
    assert plan is not None
    return plan.ways


def test_a_job_that_nothing_makes_fit_has_that_as_its_advice() -> None:
    job = gpu_job(LLAMA_70B, batch=8)
    memory = WorkerMemory(device=4 * 2**30)
    assert ways_to_fit(job, 1, memory) == ()
    problem = refusal(job, 1, Mesh(shard=8), memory)
    assert problem is not None and problem.fix == NOTHING_HELPS
