"""LoRA and QLoRA against published runs; frozen weights cost no gradient and no reduction."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.api.v1alpha1.parallelism import ActivationCheckpointing
from holdfast.orchestrator.explorer.model_plan import plan_model
from holdfast.orchestrator.explorer.step_time import step_time
from holdfast.orchestrator.explorer.traffic import collectives
from holdfast.orchestrator.planner import adapters
from holdfast.orchestrator.planner.memory import (
    checkpoint_bytes,
    device_bytes,
    device_terms,
    state_bytes,
)
from holdfast.orchestrator.planner.model import Architecture, count_parameters
from holdfast.orchestrator.planner.workload import ParallelLayout, Workload
from holdfast.orchestrator.protocol.mesh import Mesh

from .clusters import cluster, hardware, workload

AGAIN = ActivationCheckpointing.model_validate({"full": {}})


def layout(shard: int = 1, replicate: int = 1, **more: object) -> ParallelLayout:
    how = {"micro_batch": 1, "num_micro_batches": 1, "checkpointing": AGAIN, **more}
    return ParallelLayout(mesh=Mesh(replicate, shard), workers_per_node=8, **how)  # type: ignore[arg-type]


def llama(dim: int, layers: int, heads: int, ffn: int, rank: int) -> Workload:
    """The first LLaMA, as the QLoRA paper trains it: samples of 512 tokens."""
    model = Architecture(
        name="llama", vocab_size=32000, dim=dim, num_layers=layers, num_heads=heads,
        num_kv_heads=heads, head_dim=dim // heads, ffn_dim=ffn,
    )  # fmt: skip
    return Workload(
        model=model, counts=count_parameters(model), sequence_length=512, global_batch=16,
        method="qlora", adapter_rank=rank,
    )  # fmt: skip


def test_adapters_of_every_matrix_are_counted_as_peft_counts_them() -> None:
    eight = workload("llama3-8b", method="lora")
    assert adapters.trained(eight) == 41_943_040  # print_trainable_parameters() with rank 16
    assert adapters.trained(workload("llama3-8b")) == eight.counts.total
    assert checkpoint_bytes(eight) * eight.counts.total == 12 * 41_943_040
    assert adapters.merged_bytes(eight) == 2 * eight.counts.total


def test_frozen_weights_have_their_own_bytes_and_neither_gradient_nor_moments() -> None:
    full, lora, qlora = (workload("llama3-8b", method=m) for m in ("full", "lora", "qlora"))
    counts, trained = lora.counts, adapters.trained(lora)
    assert state_bytes(full) == 16
    assert state_bytes(lora) * counts.total == pytest.approx(2 * counts.total + 16 * trained)
    in_blocks = counts.num_layers * counts.matrices
    assert round(8 * adapters.NF4_BYTES, 3) == 4.127  # QLoRA, section 3
    assert adapters.frozen_bytes(qlora) == pytest.approx(
        adapters.NF4_BYTES * in_blocks + 2 * (counts.total - in_blocks)
    )
    for work, shard in ((lora, 1), (lora, 8), (qlora, 1), (qlora, 8)):
        terms = device_terms(work, layout(shard))
        (gradients,) = (term.num_bytes for term in terms if term.category == "gradients")
        assert gradients == 4 * trained / shard
    # Each moves less than what it replaces, and gathers what it keeps.
    sent = {w.method: {r.kind: r.num_bytes for r in collectives(w, layout(8))}
            for w in (full, lora, qlora)}  # fmt: skip
    assert (
        sent["lora"]["reduce-scatter"] == sent["qlora"]["reduce-scatter"] == (4 * trained * 7 / 8)
    )
    assert (
        sent["qlora"]["all-gather"]
        < 0.4 * sent["full"]["all-gather"]
        < (0.41 * sent["lora"]["all-gather"])
    )
    seconds = [step_time(w, layout(8), hardware()).seconds for w in (full, lora, qlora)]
    assert seconds[1] < seconds[2] < seconds[0], "a frozen matrix has two products instead of three"


@pytest.mark.parametrize(
    ("work", "published"),
    [
        # QLoRA, abstract and section 4: 65B on one GPU of 48 GiB, 33B on one of 24 GiB, with
        # moments that are paged to main memory.
        (llama(8192, 80, 64, 22016, 64), 48 * 2**30),
        (llama(6656, 60, 52, 17920, 64), 24 * 2**30),
        # LongLoRA (arXiv 2309.12307), table 12: plain LoRA of Llama 2 7B, 8,192 tokens, 25.7 GB.
        (workload("llama2-7b", method="lora", adapter_rank=8), 25.7e9),
    ],
    ids=["65B", "33B", "7B"],
)
def test_published_runs_need_what_is_planned(work: Workload, published: float) -> None:
    paged = 8 * adapters.trained(work) if work.method == "qlora" else 0
    assert 0.8 <= (device_bytes(work, layout()) - paged) / published <= 1


def test_methods_are_divided_by_fsdp_only_and_no_recipe_launches_them() -> None:
    work = workload("llama3-70b", batch=64, method="qlora", sequence_length=2048)
    plan = plan_model(work, (cluster(8),))
    assert {one.strategy for one in plan.alternatives} == {"DDP", "FSDP", "HSDP"}
    assert plan.fits and plan.spec is None and plan.own_loop_bytes is None
    assert plan.verdict.startswith("fits: QLoRA of llama3-70b")
    alone = plan_model(work, (cluster(1),))
    assert alone.fits and "single" in alone.verdict
    lora = workload("llama3-70b", batch=64, method="lora", sequence_length=2048)
    assert not plan_model(lora, (cluster(1),)).fits
