"""Activation checkpointing: which blocks compute their activations again in the backward pass."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from holdfast.orchestrator.api.v1alpha1.parallelism import ActivationCheckpointing


def checkpoint_blocks(
    model: nn.Module, blocks: list[nn.Module], settings: ActivationCheckpointing
) -> list[nn.Module]:
    """Wrap blocks within `model` as the settings say. Returns the blocks as they are then."""
    if settings.mode == "none":
        return blocks
    every = settings.every_nth_block
    wrapped = {id(block): checkpoint_wrapper(block) for block in blocks[every - 1 :: every]}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in wrapped:
                parent.register_module(name, wrapped[id(child)])
    return [wrapped.get(id(block), block) for block in blocks]
