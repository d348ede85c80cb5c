"""Bytes that one rank sends in a step, against numbers by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.explorer.traffic import Collective, collectives
from holdfast.orchestrator.protocol.mesh import Mesh

from ..planner.builders import make_job, planned


def traffic_rows(job: TrainingJob, mesh: Mesh) -> list[Collective]:
    return list(collectives(*planned(job, mesh)))


def of_group(rows: list[Collective], group: str) -> float:
    """Bytes of all collectives of a group."""
    found = [row.num_bytes for row in rows if row.group == group]
    assert found, [row.group for row in rows]
    return sum(found)


def test_ddp_reduces_float32_gradients_once() -> None:
    job = make_job(recipe={"globalBatch": 64, "microBatch": 1})
    work, _layout = planned(job, Mesh(replicate=4))
    (row,) = traffic_rows(job, Mesh(replicate=4))
    assert row.kind == "all-reduce"
    assert row.num_bytes == pytest.approx(2 * 4 * work.counts.total * 3 / 4)


def test_one_rank_sends_nothing() -> None:
    assert traffic_rows(make_job(recipe={}), Mesh()) == []


@pytest.mark.parametrize(("gathered_again", "bytes_each"), [(True, 8), (False, 6)])
def test_fsdp_in_bfloat16_sends_parameters_twice_or_once_if_they_stay_gathered(
    gathered_again: bool, bytes_each: int
) -> None:
    fsdp = {"reshardAfterForward": gathered_again}
    job = make_job(recipe={}, resources={"gpu": 1}, parallelism={"fsdp": fsdp})
    work, _layout = planned(job, Mesh(shard=4))
    total = sum(row.num_bytes for row in traffic_rows(job, Mesh(shard=4)))
    assert total == pytest.approx(bytes_each * work.counts.total * 3 / 4)


@pytest.mark.parametrize("mesh", [Mesh(replicate=2, shard=2), Mesh(replicate=2, context=2)])
def test_hsdp_adds_one_all_reduce_of_the_shard(mesh: Mesh) -> None:
    job = make_job(workers=4, recipe={}, parallelism={"context": mesh.context, "shard": mesh.shard})
    work, _layout = planned(job, mesh)
    rows = traffic_rows(job, mesh)
    assert of_group(rows, "replicate, 2 ranks") == 2 * 4 * work.counts.total / 2 / 2


def test_a_context_axis_sends_keys_and_values() -> None:
    recipe = {"globalBatch": 8, "model": {"numHeads": 4, "numKvHeads": 2}}
    job = make_job(workers=4, recipe=recipe, parallelism={"context": 2, "shard": 2})
    mesh = Mesh(shard=2, context=2)
    work, layout = planned(job, mesh)
    rows = traffic_rows(job, mesh)
    tokens = work.sequence_length // 2 * layout.micro_batch
    # Keys and values of half of the heads: gathered twice, their gradients passed on twice.
    each = tokens * work.model.dim
    assert of_group(rows, "context, 2 ranks") == work.model.num_layers * each * 4 * (2 + 2)
    gathers = of_group(rows, "shard x context, 4 ranks")
    # Of float32: gathered twice, and a reduce-scatter, which gloo sends as an all-reduce.
    assert gathers == pytest.approx(16 * work.counts.total * 3 / 4)


def test_a_rank_of_a_pipeline_sends_keys_and_values_of_its_own_layers() -> None:
    """405B with context 16 and pipeline 16 was planned with those of all layers on each rank."""
    job = make_job(workers=4, recipe={"globalBatch": 4}, parallelism={"context": 2})
    work, layout = planned(job, Mesh(context=2))
    sizes = {}
    for pipeline in (1, 2):
        mesh = Mesh(context=2, pipeline=pipeline)
        rows = list(collectives(work, replace(layout, mesh=mesh)))
        sizes[pipeline] = of_group(rows, "context, 2 ranks")
    assert sizes[2] == sizes[1] / 2


def test_a_pipeline_passes_activations_on_and_their_gradients_back() -> None:
    job = make_job(
        workers=4, recipe={"globalBatch": 8}, parallelism={"pipeline": {"ranks": 2}, "shard": 2}
    )
    mesh = Mesh(shard=2, pipeline=2)
    work, layout = planned(job, mesh)
    assert layout.num_micro_batches == 4
    passed = 4 * work.sequence_length * work.model.dim
    # Of two stages the first only passes on, and the last only back: 4 micro-batches.
    assert of_group(traffic_rows(job, mesh), "pipeline, 2 ranks") == 4 * passed


@pytest.mark.parametrize(
    ("pipeline", "schedule", "stages", "hops"),
    [(2, "1f1b", 1, 1), (4, "1f1b", 1, 2), (2, "interleaved1f1b", 2, 3),
     (2, "zbvZeroBubble", 2, 2)],
)  # fmt: skip
def test_sends_of_a_pipeline_follow_its_schedule(
    pipeline: int, schedule: str, stages: int, hops: int
) -> None:
    job = make_job(
        workers=pipeline,
        recipe={"globalBatch": 16, "model": {"numLayers": 8}},
        parallelism={"pipeline": {"ranks": pipeline, "schedule": schedule}},
    )
    work, layout = planned(job, Mesh(replicate=2, pipeline=pipeline))
    assert layout.stages_per_rank == stages
    rows = traffic_rows(job, Mesh(replicate=2, pipeline=pipeline))
    passed = 4 * layout.micro_batch * work.sequence_length * work.model.dim
    expected = hops * layout.num_micro_batches * passed
    assert of_group(rows, f"pipeline, {pipeline} ranks") == expected


def test_a_tensor_axis_sends_activations() -> None:
    job = make_job(workers=4, recipe={"globalBatch": 8}, parallelism={"tensor": 2, "shard": 2})
    whole, divided = Mesh(shard=2), Mesh(shard=2, tensor=2)
    work, layout = planned(job, divided)
    rows = traffic_rows(job, divided)
    tokens = work.sequence_length * layout.micro_batch
    # 8 gathers and scatters a layer and 4 at the edges, each of half of a float32 activation, and
    # the gradients of the norms. Scatters are half of them, and gloo sends them twice.
    expected = (12 * work.model.num_layers + 6) * 4 * tokens * work.model.dim // 2
    expected += (2 * work.model.num_layers + 1) * 4 * work.model.dim
    assert of_group(rows, "tensor, 2 ranks") == expected * layout.num_micro_batches
    gathered = of_group(traffic_rows(job, whole), "shard, 2 ranks")
    assert of_group(rows, "shard, 2 ranks") == gathered / 2


def test_gloo_sends_a_reduce_scatter_twice() -> None:
    """Gloo has no reduce-scatter: each rank reduces the whole."""
    precision = {"precision": {"parameters": "float32"}}
    sent = {}
    for gpu in (0, 1):
        job = make_job(recipe={}, resources={"gpu": gpu}, parallelism=precision)
        for row in traffic_rows(job, Mesh(shard=2)):
            sent[row.kind, gpu] = row.num_bytes
    assert sent["reduce-scatter", 0] == 2 * sent["reduce-scatter", 1]
    assert sent["all-gather", 0] == sent["all-gather", 1]


def optimizer_job(name: str, gpu: int = 1) -> TrainingJob:
    recipe = {
        "globalBatch": 8, "model": {"dim": 256, "numLayers": 3, "numHeads": 4, "numKvHeads": 2},
        "optimizer": {name: {}},
    }  # fmt: skip
    return make_job(workers=8, recipe=recipe, resources={"gpu": gpu}, parallelism={"shard": 8})


def test_muon_exchanges_as_many_equal_matrices_as_there_are_ranks() -> None:
    ffn = planned(optimizer_job("muon"), Mesh(shard=8))[0].model.ffn_dim
    (row,) = [one for one in traffic_rows(optimizer_job("muon"), Mesh(shard=8)) if one.of_optimizer]
    # Of 3 layers: 6 of 256 x 256 (queries, output), 6 of 128 x 256, 6 of ffn x 256, 3 of 256 x ffn:
    # one bucket of 8 each, in bfloat16 there and back.
    matrices = 256 * 256 + 128 * 256 + 2 * ffn * 256
    assert row.kind == "all-to-all"
    assert row.num_bytes == pytest.approx(2 * 2 * matrices * 7 / 8)
    (gloo,) = [one for one in traffic_rows(optimizer_job("muon", 0), Mesh(shard=8))
               if one.of_optimizer]  # fmt: skip
    assert gloo.num_bytes == pytest.approx(8 * row.num_bytes)


def test_dion_gathers_factors_and_sums_products() -> None:
    job = optimizer_job("dion")
    ffn = planned(job, Mesh(shard=8))[0].model.ffn_dim
    rows = [one for one in traffic_rows(job, Mesh(shard=8)) if one.of_optimizer]
    shapes = [(256, 256)] * 2 + [(128, 256)] * 2 + [(ffn, 256)] * 2 + [(256, ffn)]
    ranks = [min(shape) // 4 for shape in shapes]
    factors = 3 * sum(columns * rank for (_, columns), rank in zip(shapes, ranks, strict=True))
    squares = 3 * sum(rank**2 for rank in ranks)
    assert [row.kind for row in rows] == ["all-gather", "all-reduce"]
    assert rows[0].num_bytes == pytest.approx(4 * factors * 7 / 8)
    assert rows[1].num_bytes == pytest.approx(2 * (2 * 8 * squares + 4 * factors) * 7 / 8)


@pytest.mark.parametrize("name", ["muon", "dion"])
def test_without_shards_an_optimizer_sends_nothing(name: str) -> None:
    rows = traffic_rows(optimizer_job(name), Mesh(replicate=8))
    assert not [row for row in rows if row.of_optimizer]
