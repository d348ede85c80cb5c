"""The planner's counts are those of the model that the recipe trains."""

from __future__ import annotations

import pytest
import torch

from holdfast.orchestrator.api.v1alpha1.recipe import Data, Model, Pretrain
from holdfast.orchestrator.planner.model import count_parameters, flops_per_token
from holdfast.workers.training.models import transformer

CONFIGS = [
    pytest.param(Model(), id="the default"),
    pytest.param(Model(dim=128, num_heads=8, num_kv_heads=2, ffn_dim=500), id="grouped queries"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_parameters_are_counted_exactly(config: Model) -> None:
    with torch.device("meta"):
        model = transformer.Transformer(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(config).total == counted == transformer.num_parameters(config)


@pytest.mark.parametrize("config", CONFIGS)
def test_flops_are_those_that_mfu_is_reported_with(config: Model) -> None:
    settings = Pretrain(model=config, data=Data(sequence_length=256))
    assert flops_per_token(settings) == transformer.flops_per_token(config, 256)
