"""Activation checkpointing: what the backward pass computes again instead of keeping it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from holdfast.orchestrator.api.v1alpha1.parallelism import ActivationCheckpointing

_aten: Any = torch.ops.aten
_OPERATIONS = {
    "matmul": ("mm", "addmm", "bmm", "_scaled_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
}
"""Operators behind each name of `keep`, on all devices."""


def checkpoint_blocks(
    model: nn.Module, blocks: list[nn.Module], settings: ActivationCheckpointing
) -> list[nn.Module]:
    """Wrap blocks within `model` as the settings say. Returns the blocks as they are then."""
    if settings.budget is not None:
        import torch._functorch.config as partitioner  # read when a block is compiled

        partitioner.activation_memory_budget = settings.budget
    if settings.blocks is None:
        return blocks
    options: dict[str, Any] = {}
    if settings.selective:
        kept = {
            getattr(_aten, operation).default
            for name in settings.selective.keep
            for operation in _OPERATIONS[name]
        }
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy(kept))
    interval = settings.blocks.every_nth_block
    chosen = blocks[interval - 1 :: interval]
    wrapped = {id(block): checkpoint_wrapper(block, **options) for block in chosen}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in wrapped:
                parent.register_module(name, wrapped[id(child)])
    return [wrapped.get(id(block), block) for block in blocks]


def _policy(kept: set[Any]) -> Any:
    def of(_: SelectiveCheckpointContext, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        must_save = operation in kept
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

    return of
