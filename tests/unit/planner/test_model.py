"""Counts of parameters and FLOPs against published numbers."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.orchestrator.planner.model import count_parameters, flops_per_token, of_recipe

LLAMA_8B = Model(
    vocab_size=128256, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336
)


def test_llama_3_1_8b_has_its_published_number_of_parameters() -> None:
    assert count_parameters(of_recipe(LLAMA_8B)).total == 8_030_261_248


def test_llama_3_1_8b_needs_the_flops_that_torchtitan_counts() -> None:
    # 5,762 tokens/s per H100 (989 TFLOP/s) are reported as 33 to 34 % MFU.
    flops = flops_per_token(of_recipe(LLAMA_8B), 8192)
    assert 5762 * flops / 989e12 == pytest.approx(0.337, abs=0.005)
