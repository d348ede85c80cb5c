"""Matrix products of the blocks in float8, by torchao. Weights stay in the format of the
parameters, so that checkpoints are the same with and without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from holdfast.orchestrator.errors import UserError

FIELD = "spec.parallelism.precision.linear"
MULTIPLE = 16
"""Both sides of a weight are multiples of this, as the matrix units need it."""


def expect_device(device: torch.device) -> None:
    """Raises UserError for a device without float8 matrix units."""
    fix = "expected a GPU of compute capability 8.9 or above; use another one, or linear: auto"
    if device.type != "cuda":
        raise UserError(f"{FIELD}: got float8 on {device.type}; {fix}")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise UserError(f"{FIELD}: got float8 on {name} of compute capability {version}; {fix}")


def recipe_of(device: torch.device) -> str:
    """torchao's name of the scales: one for each row where the device has it, which is the more
    exact one; else one for a tensor."""
    return "rowwise" if torch.cuda.get_device_capability(device) >= (9, 0) else "tensorwise"


def convert(blocks: Iterable[nn.Module], recipe: str, *, emulate: bool = False) -> None:
    """Replace the linear layers within `blocks`; the weights stay the same objects. `emulate`
    computes the rounding without matrix units.

    Raises UserError where torchao is not installed, or no layer has a size that float8 can have.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError(
            f"{FIELD}: got float8 without torchao ({error}); expected it in the environment of the "
            "workers; pip install torchao, or use linear: auto"
        ) from None
    config: Any = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=emulate)
    num_converted = 0

    def fits(module: nn.Module, _: str) -> bool:
        nonlocal num_converted
        assert isinstance(module, nn.Linear)
        fits = module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
        num_converted += fits
        return fits

    for block in blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=fits)
    if not num_converted:
        raise UserError(
            f"{FIELD}: got float8, and no layer of a block with sides that are multiples of "
            f"{MULTIPLE}; expected such sizes (model.dim, numHeads, ffnDim); or use linear: auto"
        )
