"""Float8: refused where the device lacks it; elsewhere its rounding, emulated, changes little."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.orchestrator.errors import UserError
from holdfast.workers.training.initial_values import fill
from holdfast.workers.training.models.transformer import Transformer
from holdfast.workers.training.parallel import float8


def transformer(dim: int) -> Transformer:
    model = Transformer(Model(dim=dim, num_layers=2, num_heads=2))
    for name, parameter in model.named_parameters():
        fill(parameter, 0, name, model.standard_deviation(name))
    return model


def test_a_device_without_float8_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"precision\.linear: got float8 on cpu; expected a GPU"):
        float8.expect_device(torch.device("cpu"))


def test_without_torchao_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"precision\.linear: .*pip install torchao"):
        float8.convert([nn.Linear(16, 16)], "rowwise")


def test_a_model_without_a_layer_of_such_sizes_is_refused() -> None:
    with pytest.raises(UserError, match="multiples of 16"):
        float8.convert([nn.Sequential(nn.Linear(8, 24))], "rowwise")


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_emulated_products_are_close_and_the_weights_stay_the_same_objects(recipe: str) -> None:
    torch.manual_seed(0)
    model = transformer(32)
    exact = copy.deepcopy(model)
    names = dict(model.named_parameters())
    float8.convert(model.blocks, recipe, emulate=True)
    assert dict(model.named_parameters()) == names
    inputs_bt = torch.randint(0, 256, (2, 8))
    outputs = []
    for one in (model, exact):
        output = one(inputs_bt)
        output.square().mean().backward()
        outputs.append(output.detach())
    assert not torch.equal(*outputs)
    torch.testing.assert_close(*outputs, rtol=0, atol=0.1 * float(outputs[1].std()))
    for (name, got), expected in zip(names.items(), exact.parameters(), strict=True):
        assert got.grad is not None and expected.grad is not None
        difference = (got.grad - expected.grad).norm() / expected.grad.norm()
        assert difference < 0.15, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_on_the_device_are_close() -> None:
    device = torch.device("cuda")
    try:
        float8.expect_device(device)
    except UserError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    model = transformer(256).to(device, torch.bfloat16)
    exact = copy.deepcopy(model)
    float8.convert(model.blocks, float8.recipe_of(device))
    inputs_bt = torch.randint(0, 256, (2, 64), device=device)
    found, expected = model(inputs_bt).float(), exact(inputs_bt).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1 * float(expected.std()))
