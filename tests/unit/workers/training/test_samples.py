"""Shares of a batch, initial values and the model of the pre-training recipe."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from holdfast.orchestrator.api.v1alpha1.recipe import Model, Pretrain
from holdfast.workers.session.order import mix, share
from holdfast.workers.training.initial_values import fill
from holdfast.workers.training.loop import micro_batches
from holdfast.workers.training.models.transformer import (
    Transformer,
    flops_per_token,
    num_parameters,
)


@pytest.mark.parametrize("global_batch", [1, 4, 7, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 9])
def test_every_world_size_sees_each_sample_of_a_batch_once(
    global_batch: int, num_ranks: int
) -> None:
    for step in (0, 5):
        parts = [share(step, global_batch, rank, num_ranks) for rank in range(num_ranks)]
        assert len({len(part.indices) for part in parts}) == 1
        seen = [
            index
            for part in parts
            for index, weight in zip(part.indices, part.weights, strict=True)
            if weight
        ]
        assert seen == list(range(step * global_batch, (step + 1) * global_batch))


def test_every_rank_has_the_same_number_of_micro_batches() -> None:
    parts = [micro_batches(share(0, 7, rank, 3), 2) for rank in range(3)]
    assert {len(batches) for batches in parts} == {2}
    assert sum(sum(b.weights) for batches in parts for b in batches) == 7
    assert Pretrain().samples_per_pass(3, pipeline=1) == 3
    assert Pretrain().samples_per_pass(3, pipeline=2) == 1  # more of them than stages
    assert Pretrain(micro_batch=4).samples_per_pass(3, pipeline=2) == 3


def test_the_micro_batch_that_a_launch_chose_holds_for_auto_only() -> None:
    assert Pretrain().samples_per_pass(16, pipeline=1, chosen=6) == 6
    assert Pretrain().samples_per_pass(4, pipeline=1, chosen=6) == 4
    assert Pretrain(micro_batch=2).samples_per_pass(16, pipeline=1, chosen=6) == 2


def test_mixed_numbers_are_spread_and_order_counts() -> None:
    values = {mix(a, b) for a in range(50) for b in range(50)}
    assert len(values) == 2500
    assert all(0 <= value < 2**63 for value in values)
    halves = [value >> 62 for value in values]
    assert 1100 < sum(halves) < 1400


def test_initial_values_do_not_depend_on_the_sharding() -> None:
    whole = torch.empty(1500, 1000)
    fill(whole, 1, "some.weight", 0.02)
    again = torch.empty(1500, 1000)
    fill(again, 1, "some.weight", 0.02)
    assert torch.equal(whole, again)
    assert whole.std().item() == pytest.approx(0.02, rel=0.01)
    fill(again, 1, "other.weight", 0.02)
    assert not torch.equal(whole, again)


def test_no_two_matrices_of_a_model_start_equal() -> None:
    model = Transformer(Model(dim=32, num_layers=12, num_heads=2))
    begins: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        deviation = model.standard_deviation(name)
        if deviation is not None:
            fill(parameter, 0, name, deviation)
            begins[name] = parameter.detach().flatten()[:1024] / deviation
    for (name, values), (other, others) in combinations(begins.items(), 2):
        # Those drawn from one seed differ by rounding; independent ones correlate by 1/32.
        both = torch.stack([values, others])
        assert torch.corrcoef(both)[0, 1].abs() < 0.25, f"{name} and {other}"


@pytest.mark.parametrize("kv_heads", [None, 1, 2])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_parameter_count_is_that_of_the_model(kv_heads: int | None, qk_norm: bool) -> None:
    config = Model(dim=32, num_layers=2, num_heads=4, num_kv_heads=kv_heads, qk_norm=qk_norm)
    model = Transformer(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())


def test_flops_per_token_are_those_of_the_published_formula() -> None:
    config = Model(dim=256, num_layers=4, num_heads=4)
    dense = num_parameters(config) - 256 * 256
    assert flops_per_token(config, 128) == 6 * dense + 6 * 4 * 4 * (64 + 64) * 128


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_transformer_is_causal(kv_heads: int) -> None:
    torch.manual_seed(0)
    config = Model(dim=32, num_layers=2, num_heads=4, num_kv_heads=kv_heads)
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        fill(parameter, 0, name, model.standard_deviation(name))
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :8], after[0, :8], atol=1e-6)
    assert not torch.allclose(before[0, 8:], after[0, 8:])


def test_with_qk_norm_the_size_of_queries_and_keys_has_no_effect() -> None:
    config = Model(dim=32, num_layers=1, num_heads=4, num_kv_heads=2, qk_norm=True)
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        fill(parameter, 0, name, model.standard_deviation(name))
    tokens = torch.arange(12)[None]
    before = model(tokens)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                parameter *= 50
    assert torch.allclose(before, model(tokens), atol=1e-3)
