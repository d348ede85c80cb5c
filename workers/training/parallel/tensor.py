"""Tensor and sequence parallel: which layer of the transformer is divided how over the tensor axis.

Between the matrices of a block the activations are divided by heads and by the width of the
feed-forward part; everywhere else, norms and residual stream included, by sequence. The embedding
and the head are divided by vocabulary, and the loss is computed from divided logits.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., "Reducing activation
recomputation in large transformer models", 2022, section 4.2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from holdfast.workers.training.models.transformer import Transformer

BY_SEQUENCE = Shard(1)


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Divide the parameters over `mesh`, which has one axis. Call it before checkpoint wrappers and
    fully_shard. The tensor axis must divide heads, key and value heads, the width of the
    feed-forward part, vocabulary and sequence length. The logits come as a DTensor that is divided
    by vocabulary: compute the loss and its backward in `loss_parallel()`."""
    for block in model.blocks:
        of_block = _block_plan() | (_norm_plan() if model.config.qk_norm else {})
        parallelize_module(block, mesh, of_block)
    model.sequence_parts = mesh.size()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=BY_SEQUENCE),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=BY_SEQUENCE, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    here = {name: style for name, style in plan.items() if getattr(model, name) is not None}
    parallelize_module(model, mesh, here)
    if model.embedding is not None:
        model.embedding.register_forward_hook(copied)


def copied(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """The embedding's output is an AsyncCollectiveTensor, a view of a DTensor's local part. With
    torch 2.15 a compiled block that gets it computes wrong gradients, without an error: their norm
    was three quarters. With a copy it is right."""
    return output.clone()


def _block_plan() -> dict[str, Any]:
    whole = Replicate()
    return {
        "attention_norm": SequenceParallel(),
        # x by sequence -> whole; cos and sin are the same on all ranks.
        "attention": PrepareModuleInput(
            input_layouts=(BY_SEQUENCE, None, None), desired_input_layouts=(whole, None, None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=BY_SEQUENCE),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(BY_SEQUENCE,), desired_input_layouts=(whole,)),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=BY_SEQUENCE),
    }


def _norm_plan() -> dict[str, Any]:
    """Each rank normalises its own heads (B, T, H, E), by weights that all ranks share."""
    heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {"attention.query_norm": heads, "attention.key_norm": heads}
