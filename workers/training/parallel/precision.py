"""Number formats of forward, backward and gradient reduction, and the loss scale of float16."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from holdfast.orchestrator.api.v1alpha1 import Precision

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_INITIAL_SCALE = 2.0**16
_MAX_SCALE = 2.0**24
"""Gradients are reduced in a format with the range of float32: squares of norms up to 1e12 fit."""
_GROW_AFTER = 2000
"""Steps without overflow."""


def parameter_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Format of parameters in forward and backward; auto is bfloat16 on GPUs, float32 on CPUs."""
    if precision.parameters == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[precision.parameters]


def reduce_dtype(precision: Precision) -> torch.dtype:
    """Format in which gradients are reduced."""
    return _DTYPES[precision.reduce]


def autocast(
    dtype: torch.dtype, device: torch.device, fully_sharded: bool
) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward: autocast with DDP or one process; FSDP2 casts by itself."""
    if fully_sharded or dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


class LossScale:
    """The number that multiplies the loss for float16, whose smallest gradients would vanish.

    The decision is made from the gradient norm over all ranks, which is the same number on each of
    them, so all ranks skip the same steps. Its numbers are state that a checkpoint keeps.
    Source: Micikevicius et al., "Mixed precision training", 2018, section 3.2; the constants are
    those of torch.amp.GradScaler, which decides per rank.
    """

    def __init__(self) -> None:
        self.value = _INITIAL_SCALE
        self._good_steps = 0

    def update(self, norm: float) -> bool:
        """True if the step may be taken, from the norm over all ranks. An overflow halves the
        scale. Raises FloatingPointError if gradients without a scale are not finite either."""
        if not math.isfinite(norm):
            if self.value <= 1.0:
                raise FloatingPointError(f"the gradient norm is {norm} with a loss scale of 1")
            self.value, self._good_steps = max(1.0, self.value / 2), 0
            return False
        self._good_steps += 1
        if self._good_steps >= _GROW_AFTER:
            self.value, self._good_steps = min(_MAX_SCALE, self.value * 2), 0
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Nothing of a checkpoint that was trained without a scale."""
        self.value = float(state.get("loss_scale", _INITIAL_SCALE))
        self._good_steps = int(state.get("good_steps", 0))
