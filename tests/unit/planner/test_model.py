"""Counts of parameters and FLOPs against published numbers and the recipe's model."""

from __future__ import annotations

import pytest
import torch

from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.orchestrator.planner.model import count_parameters, flops_per_token, of_recipe
from holdfast.workers.training.models import transformer

LLAMA_8B = Model(
    vocab_size=128256, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336
)

CONFIGS = [
    pytest.param(Model(), id="default"),
    pytest.param(Model(dim=128, num_heads=8, num_kv_heads=2, ffn_dim=500), id="grouped queries"),
    pytest.param(Model(num_heads=2, num_kv_heads=1, qk_norm=True), id="normalised queries"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_parameters_are_counted_exactly(config: Model) -> None:
    with torch.device("meta"):
        model = transformer.Transformer(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    counts = count_parameters(of_recipe(config))
    assert counts.total == counted == transformer.num_parameters(config)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    assert counts.layer == block
    matrices = (p.numel() for p in model.blocks[0].parameters() if p.ndim == 2)
    assert counts.matrices == sum(matrices)


@pytest.mark.parametrize("config", CONFIGS)
def test_flops_equal_those_of_the_mfu_report(config: Model) -> None:
    assert flops_per_token(of_recipe(config), 256) == transformer.flops_per_token(config, 256)


def test_llama_3_1_8b_has_its_published_number_of_parameters() -> None:
    assert count_parameters(of_recipe(LLAMA_8B)).total == 8_030_261_248


def test_llama_3_1_8b_needs_the_flops_that_torchtitan_counts() -> None:
    # 5,762 tokens/s per H100 (989 TFLOP/s) are reported as 33 to 34 % MFU.
    flops = flops_per_token(of_recipe(LLAMA_8B), 8192)
    assert 5762 * flops / 989e12 == pytest.approx(0.337, abs=0.005)
