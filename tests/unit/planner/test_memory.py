"""Memory of a rank's device, against numbers by hand."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1.parallelism import ActivationCheckpointing
from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.orchestrator.planner.activations import activation_terms, layer_bytes
from holdfast.orchestrator.planner.memory import (
    CONTEXT_BYTES,
    device_bytes,
    device_terms,
    model_state_bytes,
    shard_bytes,
)
from holdfast.orchestrator.planner.model import Architecture, count_parameters, of_recipe
from holdfast.orchestrator.planner.terms import PHASES, by_phase
from holdfast.orchestrator.planner.workload import ParallelLayout, Workload, parts_of
from holdfast.orchestrator.protocol.mesh import Mesh

from .builders import device_rows, make_job, planned

TOTAL = count_parameters(of_recipe(Model())).total


def test_the_peak_is_the_largest_phase_and_not_the_sum_of_all_rows() -> None:
    job = make_job(recipe={"globalBatch": 64})
    terms = device_terms(*planned(job, Mesh(shard=2)))
    sums = by_phase(terms)
    assert len(sums) == len(PHASES)
    assert device_bytes(*planned(job, Mesh(shard=2))) == pytest.approx(max(sums), abs=1)
    assert max(sums) < sum(term.num_bytes for term in terms)


def test_sharded_gradients_do_not_exist_beside_all_activations() -> None:
    """Gradients grow while activations are freed: the sum of both is not the peak."""
    rows = device_rows(make_job(recipe={"globalBatch": 4}), Mesh(shard=2))
    assert not rows["gradients"].phases & rows["activations"].phases


def test_chunks_bound_the_memory_of_logits() -> None:
    def logits(loss: dict[str, int], what: str = "logits and their float32 gradients") -> float:
        job = make_job(recipe={"loss": loss, "globalBatch": 64})
        return device_rows(job, Mesh(replicate=2, shard=2))[what].num_bytes

    assert logits({}) == 12 * 256 * 16 * 128
    chunks = {"chunkTokens": 100}
    assert logits(chunks, "logits of a chunk") == 8 * 256 * 100
    # Of the float32 head of 256 x 256 the sum so far, and that of a chunk.
    assert logits(chunks, "the head's gradient, summed over the chunks") == 2 * 4 * 256 * 256
    # One chunk with all tokens: its logits are computed again in backward all the same.
    assert logits({"chunkTokens": 10**6}, "logits of a chunk") == 8 * 256 * 16 * 128


def test_model_states_are_16_bytes_per_parameter_over_the_shard_group_only() -> None:
    job = make_job(recipe={})
    for mesh in (Mesh(replicate=2, shard=2), Mesh(replicate=1, shard=2)):
        assert model_state_bytes(*planned(job, mesh)) == -(-16 * TOTAL // 2)
        rows = device_rows(job, mesh)
        states = [
            rows[what]
            for what in ("float32 shards of the parameters", "AdamW moments", "gradients")
        ]
        assert sum(row.num_bytes for row in states) == 16 * TOTAL / 2
        assert all(row.exact for row in states)


def test_zero_2_keeps_gathered_parameters() -> None:
    job = make_job(recipe={}, parallelism={"fsdp": {"reshardAfterForward": False}})
    assert device_rows(job, Mesh(shard=2))["gathered parameters"].num_bytes == 4 * TOTAL


def test_full_activation_checkpointing_saves_activations() -> None:
    def activations(settings: dict[str, Any]) -> float:
        job = make_job(recipe={}, parallelism={"activationCheckpointing": settings})
        return device_rows(job, Mesh(shard=2))["activations"].num_bytes

    assert activations({"full": {}}) < activations({}) / 2


def test_a_cuda_context_takes_memory_of_gpus_only() -> None:
    for resources, expected in (({}, None), ({"gpu": 1}, CONTEXT_BYTES)):
        rows = device_rows(make_job(recipe={}, resources=resources), Mesh(shard=2))
        assert getattr(rows.get("CUDA context and NCCL"), "num_bytes", None) == expected


def test_a_context_axis_divides_what_it_holds() -> None:
    recipe = {"globalBatch": 8, "model": {"numHeads": 4, "numKvHeads": 2}}
    job = make_job(workers=4, recipe=recipe, parallelism={"context": 2, "shard": 2})
    whole, divided = Mesh(shard=2), Mesh(shard=2, context=2)
    before, after = device_rows(job, whole), device_rows(job, divided)
    for what in (
        "activations",
        "logits and their float32 gradients",
        "float32 shards of the parameters",
        "AdamW moments",
        "gradients",
    ):
        assert after[what].num_bytes == pytest.approx(before[what].num_bytes / 2), what
    for what in ("gathered blocks", "gathered blocks, gradients of one and their reduction"):
        assert after[what].num_bytes == before[what].num_bytes


def test_fsdp_divides_over_a_context_axis_without_a_shard_axis() -> None:
    job = make_job(workers=4, recipe={}, parallelism={"context": 2, "shard": 1})
    assert "gathered blocks" in device_rows(job, Mesh(replicate=2, context=2))


def test_a_pipeline_divides_the_layers_and_keeps_several_micro_batches() -> None:
    axes = {"pipeline": {"ranks": 2}, "shard": 2}
    job = make_job(workers=4, recipe={"globalBatch": 8}, parallelism=axes)
    mesh, counts = Mesh(shard=2, pipeline=2), count_parameters(of_recipe(Model()))
    largest = 2 * counts.layer + max(counts.head, counts.embedding)
    assert model_state_bytes(*planned(job, mesh)) == 16 * largest // 2
    assert shard_bytes(*planned(job, mesh)) == 12 * largest // 2
    rows = device_rows(job, mesh)
    assert rows["gathered parameters"].num_bytes in (
        4 * (2 * counts.layer + counts.head),
        4 * (2 * counts.layer + counts.embedding),
    )
    assert rows["whole gradients"].num_bytes == rows["gathered parameters"].num_bytes
    assert not rows["whole gradients"].phases & rows["gradients"].phases


@pytest.mark.parametrize(
    ("schedule", "kept"),
    # Two stages of half of the layers: two micro-batches on the first, or all four of them.
    [("1f1b", 2), ("gpipe", 4)],
)
def test_a_pipeline_keeps_the_micro_batches_of_its_schedule(schedule: str, kept: int) -> None:
    axes = {"pipeline": {"ranks": 2, "schedule": schedule}, "shard": 2}
    job = make_job(workers=4, recipe={"globalBatch": 8, "model": {"dim": 64}}, parallelism=axes)
    work, layout = planned(job, Mesh(shard=2, pipeline=2))
    first = next(
        term.num_bytes
        for part in parts_of(layout)
        if part.embedding
        for term in activation_terms(work, layout, part)
        if term.what == "activations"
    )
    tokens = work.sequence_length * layout.micro_batch
    assert first == kept * work.model.num_layers / 2 * layer_bytes(work, layout) * tokens


def test_a_tensor_axis_divides_what_it_holds() -> None:
    job = make_job(workers=4, recipe={"globalBatch": 8}, parallelism={"tensor": 2, "shard": 2})
    before, after = device_rows(job, Mesh(shard=2)), device_rows(job, Mesh(shard=2, tensor=2))
    for what in ("gathered blocks", "AdamW moments"):
        assert after[what].num_bytes == before[what].num_bytes / 2, what
    # Each rank gathers the inputs of attention and of the feed-forward part whole.
    activations = after["activations"].num_bytes / before["activations"].num_bytes
    assert 0.5 < activations < 0.75


@pytest.mark.parametrize(
    ("sizes", "length", "passes", "shards", "measured"),
    [
        ((128256, 8192, 64, 8, 28672), 8192, 1, 64, 18.21),
        ((32000, 5120, 40, 1, 13824), 4096, 4, 8, 6.39),
    ],
)
def test_embedding_and_head_of_an_own_loop_stay_gathered_with_the_root(
    sizes: tuple[int, ...], length: int, passes: int, shards: int, measured: float
) -> None:
    """Measured: GiB by torch's FSDPMemTracker, of three blocks and a model in fully_shard."""
    vocabulary, dim, heads, kv_heads, ffn = sizes
    model = Architecture(
        name="own", vocab_size=vocabulary, dim=dim, num_layers=3, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim // heads, ffn_dim=ffn,
    )  # fmt: skip
    work = Workload(
        model=model, counts=count_parameters(model), sequence_length=length,
        global_batch=passes * shards, on_gpu=False, own_loop=True,
    )  # fmt: skip
    layout = ParallelLayout(
        mesh=Mesh(shard=shards), workers_per_node=8, micro_batch=1, num_micro_batches=passes,
        checkpointing=ActivationCheckpointing.model_validate({"full": {}}),
    )  # fmt: skip
    own, recipe = (
        device_bytes(one, layout) / 2**30 for one in (work, replace(work, own_loop=False))
    )
    assert own == pytest.approx(measured, rel=0.1)
    assert recipe < 0.92 * measured
