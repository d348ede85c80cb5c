"""The search over layouts: what it considers, that its answer fits, is the best, and says why."""

from __future__ import annotations

import functools

import pytest
from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.explorer.model_plan import plan_model, spec_of
from holdfast.orchestrator.explorer.search import (
    Found,
    estimate,
    layouts,
    meshes,
    min_batch,
    search,
)
from holdfast.orchestrator.explorer.step_time import mfu, step_time
from holdfast.orchestrator.planner.memory import USABLE, device_bytes, main_memory_holds
from holdfast.orchestrator.planner.workload import Workload

from .clusters import cluster, hardware, workload

CASES = [
    ("llama3-8b", 8, "H100-80"),
    ("llama3-8b", 8, "RTX-4090"),
    ("llama3-70b", 64, "H100-80"),
    ("llama3-70b", 8, "H200"),
    ("llama3-405b", 1024, "H100-80"),
]


@functools.cache
def found(model: str, devices: int, device: str) -> tuple[Workload, Found]:
    work = workload(model, max(512, devices))
    return work, search(work, cluster(devices, device))


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_that_is_ranked_fits(case: tuple[str, int, str]) -> None:
    work, answer = found(*case)
    assert answer.ranked
    memory = cluster(case[1], case[2]).memory_bytes
    for candidate in answer.ranked:
        assert candidate.num_bytes == device_bytes(work, candidate.layout) <= USABLE * memory
        assert not candidate.layout.offload or main_memory_holds(work, candidate.layout.mesh)
    for lost in answer.lost:
        assert lost.num_bytes > USABLE * memory
        assert f"{lost.num_bytes / 2**30:.1f} of {memory / 2**30:.1f} GiB" in lost.why
    ranked = {c.strategy for c in answer.ranked}
    assert len(ranked) == len(answer.ranked)
    assert ranked.isdisjoint(c.strategy for c in answer.lost)


@pytest.mark.parametrize("case", CASES)
def test_every_layout_uses_all_devices_and_divides_the_model(case: tuple[str, int, str]) -> None:
    work, answer = found(*case)
    model = work.model
    for candidate in answer.ranked:
        mesh, layout = candidate.layout.mesh, candidate.layout
        assert mesh.world_size == case[1]
        assert model.num_heads % mesh.tensor == model.num_kv_heads % mesh.tensor == 0
        assert model.ffn_dim % mesh.tensor == model.vocab_size % mesh.tensor == 0
        assert model.num_layers % layout.num_stages == 0
        assert work.sequence_length % (2 * mesh.context * mesh.tensor) == 0
        assert layout.num_micro_batches >= mesh.pipeline
        samples = layout.micro_batch * layout.num_micro_batches * mesh.data_parallel_size
        assert samples >= work.global_batch
        assert mesh.tensor <= layout.workers_per_node


@pytest.mark.parametrize("case", CASES)
def test_the_figures_of_a_candidate_are_those_of_the_estimates(case: tuple[str, int, str]) -> None:
    work, answer = found(*case)
    on = hardware(case[2])
    for candidate in answer.ranked:
        seconds = step_time(work, candidate.layout, on).seconds
        assert candidate.time.seconds == seconds
        assert candidate.tokens_per_s == work.tokens_per_step / seconds
        assert candidate.mfu == mfu(work, candidate.layout, on, seconds)
        assert 0 < candidate.mfu < 1


@pytest.mark.parametrize("case", CASES)
def test_the_best_first(case: tuple[str, int, str]) -> None:
    """The order is by tokens/s; each tensor, context or pipeline axis must gain 3 %."""
    _work, answer = found(*case)
    best, *others = answer.ranked
    for other in others:
        assert best.worth >= other.worth
        assert best.tokens_per_s > 0.9 * other.tokens_per_s
    assert list(answer.ranked) == sorted(answer.ranked, key=lambda candidate: -candidate.worth)


@pytest.mark.parametrize(
    ("model", "devices", "device", "batch"),
    [
        ("llama3-8b", 8, "H100-80", 64),
        ("llama3-8b", 8, "RTX-4090", 64),
        ("llama3-70b", 16, "H200", 128),
    ],
)
def test_no_layout_that_was_not_estimated_is_better(
    model: str, devices: int, device: str, batch: int
) -> None:
    """The search leaves out what only saves memory; here each layout and batch is estimated."""
    work, on = workload(model, batch, compiled=False), cluster(devices, device)
    best: dict[str, float] = {}
    for mesh in meshes(work, on):
        for plain in layouts(work, mesh, on.per_node):
            share = plain.num_micro_batches
            for size in (2**n for n in range(12)):
                if size > max(1, share // mesh.pipeline):
                    break
                tried = replace(plain, micro_batch=size, num_micro_batches=-(-share // size))
                if device_bytes(work, tried) <= USABLE * on.memory_bytes:
                    rate = estimate(work, tried, on.hardware).tokens_per_s
                    best[mesh.strategy] = max(best.get(mesh.strategy, 0), rate)
    answer = {candidate.strategy: candidate.tokens_per_s for candidate in search(work, on).ranked}
    assert answer.keys() == best.keys()
    for strategy, tokens in best.items():
        assert answer[strategy] == pytest.approx(tokens, rel=0.01), strategy


@pytest.mark.parametrize("case", CASES)
def test_no_neighbour_of_the_best_is_better(case: tuple[str, int, str]) -> None:
    """A micro-batch of half or twice the size, or other axes in place of its own."""
    work, answer = found(*case)
    best = answer.ranked[0]
    room = USABLE * cluster(case[1], case[2]).memory_bytes
    share = best.layout.micro_batch * best.layout.num_micro_batches
    for size in (best.layout.micro_batch // 2, best.layout.micro_batch * 2):
        if not 1 <= size <= share // best.layout.mesh.pipeline:
            continue
        other = replace(best.layout, micro_batch=size, num_micro_batches=-(-share // size))
        if device_bytes(work, other) > room:
            continue
        assert estimate(work, other, hardware(case[2])).tokens_per_s <= best.tokens_per_s
    for checkpointing in {c.layout.checkpointing.chosen: c for c in answer.ranked}.values():
        other = replace(best.layout, checkpointing=checkpointing.layout.checkpointing)
        if device_bytes(work, other) <= room:
            assert estimate(work, other, hardware(case[2])).tokens_per_s <= best.tokens_per_s


def test_thousands_of_layouts_are_estimated_for_a_thousand_devices() -> None:
    work, answer = found("llama3-405b", 1024, "H100-80")
    assert answer.num_considered == 3308
    assert len({*meshes(work, cluster(1024))}) > 100


@pytest.mark.parametrize(("model", "timed"), [("llama3-405b", 310), ("llama3-8b", 2600)])
def test_a_search_over_a_thousand_devices_times_few_of_its_layouts(
    model: str, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    counted = lambda *given: (calls.append(given), step_time(*given))[1]
    monkeypatch.setattr(f"{search.__module__}.step_time", counted)
    assert search(workload(model, 1024), cluster(1024)).num_considered < 11_000
    assert 0 < len(calls) <= timed


def test_optimizers_that_need_whole_rows_have_no_tensor_axis_and_no_offload() -> None:
    work = workload("llama3-8b", 64, optimizer="muon")
    on = cluster(8, "RTX-4090")
    allowed = [way for mesh in meshes(work, on) for way in layouts(work, mesh, 8)]
    assert allowed and all(way.mesh.tensor == 1 and not way.offload for way in allowed)


@pytest.mark.parametrize("case", CASES)
def test_the_same_question_has_the_same_answer(case: tuple[str, int, str]) -> None:
    work, answer = found(*case)
    if case[1] <= 64:
        again = search(workload(case[0], max(512, case[1])), cluster(case[1], case[2]))
        assert [c.layout for c in again.ranked] == [c.layout for c in answer.ranked]
        assert [c.num_bytes for c in again.lost] == [c.num_bytes for c in answer.lost]
    fields = {name: getattr(work, name) for name in reversed(work.__struct_fields__)}
    assert Workload(**fields) == work
    assert [*meshes(Workload(**fields), cluster(case[1]))] == [*meshes(work, cluster(case[1]))]


def test_the_order_of_clusters_does_not_change_the_choice() -> None:
    work = workload("llama3-8b")
    clusters = (cluster(4), cluster(4, "MI300X"))
    plans = [plan_model(work, order) for order in (clusters, clusters[::-1])]
    assert plans[0].chosen == plans[1].chosen
    assert plans[0].num_considered == plans[1].num_considered


def test_why_a_strategy_lost_names_a_part_of_its_step() -> None:
    plan = plan_model(workload("llama3-70b"), (cluster(64),))
    parts = {
        "matrix products", "attention", "passes over memory", "recomputation", "head and loss",
        "optimizer", "slowed by communication", "parameters and gradients",
        "tensor and context axes", "between stages", "pipeline bubble",
    }  # fmt: skip
    assert len(plan.alternatives) > 5
    for way in plan.alternatives[1:]:
        assert any(f"{part} +" in way.why for part in parts) or "an axis more" in way.why, way.why
        assert "slower" in way.why or "no faster" in way.why


def test_a_slower_network_moves_the_choice_away_from_it() -> None:
    """One copy per node sends least between nodes over Ethernet."""
    work = workload("llama3-8b")
    fast = search(work, cluster(16)).ranked[0]
    slow = search(work, cluster(16, network="ethernet-10")).ranked[0]
    assert slow.tokens_per_s < fast.tokens_per_s
    ranks = slow.layout.mesh.num_shards
    assert ranks <= 8 or slow.layout.mesh.pipeline > 1


def test_more_ranks_than_samples_are_no_answer() -> None:
    work = workload("llama3-8b", 4)
    for mesh in meshes(work, cluster(64)):
        assert mesh.data_parallel_size <= 4


@pytest.mark.parametrize("length", [8191, 8190, 4104, 4095, 2047, 2**31 - 1])
def test_a_sequence_is_divided_as_validation_accepts(length: int) -> None:
    """Length 4104 is 8 x 513: context 2 beside tensor 4 divides it, context 2 beside tensor 8 does
    not. No context axis and no tensor axis divide nothing, so an odd length has layouts too."""
    work, on = workload("llama3-8b", 64, sequence_length=length), cluster(8)
    accepted = [*meshes(work, on)]
    for mesh in accepted:
        layout = next(layouts(work, mesh, on.per_node), None)
        spec = spec_of(work, layout) if layout else None
        assert spec is None or job_from_mapping(spec)
    assert {mesh.context for mesh in accepted if length % 2} <= {1}
    assert {mesh.strategy for mesh in accepted} >= {"FSDP", "DDP", "HSDP", "FSDP + PP"}
    assert any((mesh.context, mesh.tensor) == (2, 4) for mesh in accepted) == (length == 4104)
    assert bool(search(work, on).ranked) == (length < 2**31 - 1)


@pytest.mark.parametrize("devices", [1, 6, 7, 8, 24, 104, 1_048_576])
def test_fewer_samples_than_the_smallest_batch_have_no_layout(devices: int) -> None:
    on = cluster(devices)
    least = min_batch(workload("llama3-8b"), on)
    assert search(workload("llama3-8b", least), on).num_considered
    assert not search(workload("llama3-8b", least - 1), on).num_considered


def test_a_tensor_axis_has_no_chunks() -> None:
    """The recipe refuses them."""
    for case in CASES:
        for candidate in found(*case)[1].ranked:
            assert candidate.layout.mesh.tensor == 1 or candidate.layout.chunk_tokens == 0


def test_a_million_devices_are_searched_by_their_divisors() -> None:
    million = list(meshes(workload("llama3-8b", 4_000_000), cluster(1_000_000, "H100-80")))
    assert {mesh.world_size for mesh in million} == {1_000_000}
    assert len(million) == len(set(million)) < 2_000
    assert {mesh.shard for mesh in million if mesh.shard * mesh.replicate == 1_000_000} == {
        2**two * 5**five for two in range(7) for five in range(7)
    }
