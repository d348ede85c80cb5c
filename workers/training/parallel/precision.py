"""Number formats of forward, backward and gradient reduction."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from holdfast.orchestrator.api.v1alpha1 import Precision

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
