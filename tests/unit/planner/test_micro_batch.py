"""`microBatch: auto` by the memory of the devices, and main memory for what is offloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.planner.choose import choose_mesh, may_fit, memory_on
from holdfast.orchestrator.planner.memory import (
    MAIN_MEMORY_PER_DEVICE,
    USABLE,
    WorkerMemory,
    device_bytes,
    state_bytes,
)
from holdfast.orchestrator.planner.micro_batch import chosen_micro_batch, fitted_layout
from holdfast.orchestrator.planner.refusal import refusal
from holdfast.orchestrator.planner.workload import layout_of, workload_of
from holdfast.orchestrator.protocol.facts import Gpu
from holdfast.orchestrator.protocol.mesh import Mesh

from .builders import FACTS, make_job

GIB = 2**30
MESH = Mesh(shard=8)
MODEL = {"dim": 1024, "numLayers": 12, "numHeads": 16, "vocabSize": 32000}


def batch_job(total: int, micro: Any = "auto", **parallelism: Any) -> TrainingJob:
    recipe = {
        "globalBatch": total, "microBatch": micro, "model": MODEL, "data": {"sequenceLength": 2048},
    }  # fmt: skip
    return make_job(
        nodes=(1, 1), workers=8, recipe=recipe, resources={"gpu": 1},
        parallelism={"shard": 8, **parallelism},
    )  # fmt: skip


def needs(job: TrainingJob, samples: int) -> int:
    work = workload_of(job)
    assert work is not None
    return device_bytes(work, layout_of(job, MESH, samples))


@pytest.mark.parametrize("gib", [10, 16, 24, 40, 80, 140])
@pytest.mark.parametrize("total", [8, 64, 192, 1000])
def test_auto_is_the_fewest_passes_that_fit(total: int, gib: int) -> None:
    job = batch_job(total)
    share = -(-total // 8)
    layout = fitted_layout(job, MESH, gib * GIB)
    assert layout.micro_batch * layout.num_micro_batches >= share
    assert layout.num_micro_batches == -(-share // layout.micro_batch)
    assert needs(job, layout.micro_batch) <= USABLE * gib * GIB
    if layout.num_micro_batches > 1:
        larger = -(-share // (layout.num_micro_batches - 1))
        assert needs(job, larger) > USABLE * gib * GIB


def test_without_known_memory_all_samples_are_one_pass() -> None:
    assert fitted_layout(batch_job(512), MESH, None).num_micro_batches == 1
    assert chosen_micro_batch(batch_job(512), MESH, None) == 0


@pytest.mark.parametrize(
    "job",
    [batch_job(512, 64), batch_job(512, shard=1, ddp={"staticGraph": True}), make_job(recipe=None)],
)
def test_what_the_user_wrote_stays(job: TrainingJob) -> None:
    assert chosen_micro_batch(job, MESH, GIB) == 0


def test_a_shrink_keeps_the_global_batch_in_more_passes() -> None:
    job = batch_job(256)
    memory = 40 * GIB
    full, half = fitted_layout(job, MESH, memory), fitted_layout(job, Mesh(shard=4), memory)
    assert half.num_micro_batches > full.num_micro_batches
    assert half.micro_batch * half.num_micro_batches >= 64
    work = workload_of(job)
    assert work is not None
    assert device_bytes(work, half) <= USABLE * memory


def test_a_mesh_that_fits_in_one_pass_is_preferred() -> None:
    """A pass over a part of the samples gathers all parameters again."""
    recipe = {"globalBatch": 256, "model": MODEL, "data": {"sequenceLength": 2048}}
    job = make_job(nodes=(1, 1), workers=8, recipe=recipe, resources={"gpu": 1})
    mesh, why = choose_mesh(job, 1, WorkerMemory(80 * GIB)) or (None, "")
    assert mesh is not None and may_fit(job, mesh, WorkerMemory(80 * GIB))
    assert "still" not in why


# -- main memory for offloaded states -------------------------------------------------------------
@dataclass(frozen=True)
class Offload:
    job: TrainingJob
    each: float
    """Bytes of states of one rank."""


def offloading() -> Offload:
    job = batch_job(64, offload="cpu")
    work = workload_of(job)
    assert work is not None
    return Offload(job, state_bytes(work) * work.counts.total / 8)


def test_offloaded_states_must_fit_into_the_main_memory_of_the_nodes() -> None:
    case = offloading()
    assert case.each < MAIN_MEMORY_PER_DEVICE
    for host, fits in ((None, True), (int(case.each) + 1, True), (int(case.each) - 1, False)):
        assert may_fit(case.job, MESH, WorkerMemory(80 * GIB, host)) is fits
    problem = refusal(case.job, 1, MESH, WorkerMemory(80 * GIB, int(case.each / 2)))
    assert problem is not None
    assert "parallelism.offload" in str(problem) and "of main memory" in str(problem)


def test_the_memory_limit_that_a_node_reports_is_shared_by_its_workers() -> None:
    case = offloading()
    gpus = (Gpu("H100", 80 * GIB),) * 8
    small, large = (replace(FACTS, gpus=gpus, memory_bytes=n * GIB) for n in (16, 2048))
    host = memory_on(case.job, [large, small]).host
    assert host is not None and 0 < host < 16 * GIB / 8
    assert memory_on(case.job, [replace(FACTS, gpus=gpus)]).host is None
