"""The planner's counts of parameters, FLOPs and optimizer states, against the recipe's model."""

from __future__ import annotations

import pytest
import torch

from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.orchestrator.planner.memory import moment_bytes
from holdfast.orchestrator.planner.model import count_parameters, flops_per_token, of_recipe
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.training.models import transformer
from holdfast.workers.training.optimizers import Optimizers, make_optimizer
from tests.unit.planner.builders import make_job, planned

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


@pytest.mark.parametrize(
    ("name", "ffn"), [("adamw", 256), ("adamw8bit", 256), ("adamw8bit", 320), ("muon", 256)]
)
def test_bytes_of_optimizer_state_are_those_of_the_optimizer(name: str, ffn: int) -> None:
    model = {"dim": 256, "numLayers": 1, "numHeads": 4, "ffnDim": ffn}
    job = make_job(recipe={"model": model, "optimizer": {name: {}}})
    recipe = job.spec.entrypoint.recipe
    assert recipe is not None
    parameters = dict(transformer.Transformer(recipe.config.model).named_parameters())
    optimizer = make_optimizer(recipe.config.optimizer, parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    both = optimizer.optimizers.values() if isinstance(optimizer, Optimizers) else [optimizer]
    kept = sum(
        tensor.numel() * tensor.element_size()
        for one in both
        for state in one.state.values()
        for key, tensor in state.items()
        if key != "step"
    )
    numel = sum(parameter.numel() for parameter in parameters.values())
    work, _layout = planned(job, Mesh())
    assert moment_bytes(work) == pytest.approx(kept / numel, rel=0.01)
