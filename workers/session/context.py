"""Context parallel: each rank of the context axis has a part of every sequence, and attention sees
the whole by passing keys and values around a ring.

This is torch's `context_parallel`, which replaces `scaled_dot_product_attention` and divides
sequences so that causal attention costs each rank the same: of 2 C pieces, rank r of C has pieces r
and 2 C - 1 - r. On GPUs torch's ring runs the flash, memory-efficient and cuDNN kernels. It has no
entry for the flash kernel of CPUs, which is added here, so CPUs run the same ring.
Sources: Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers", 2023; Dubey et al.,
"The Llama 3 herd of models", 2024, section 3.3.2, for the order of the pieces.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.orchestrator.errors import UserError

_SEQUENCE = 2
"""Dimension of the sequence in queries, keys and values (B, H, T, E)."""
_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]
"""Kernels of the ring. Where none of them fits, torch would compute attention with plain operators,
whose causal mask does not follow the order of the pieces; so that is an error instead."""


@contextlib.contextmanager
def divide(mesh: DeviceMesh, *whole: Tensor, dim: int = 1) -> Iterator[tuple[Tensor, ...]]:
    """This rank's parts of `whole`, tensors that have the sequence in dimension `dim`, and after
    them the positions of these parts in the sequence (T / C) of int64. The same sequences are given
    on all ranks of `mesh`, the context axis of C ranks. Inside, attention is that of the whole
    sequence: forward and backward belong there.

    Raises UserError for a sequence that 2 C does not divide.
    """
    length, pieces = whole[0].shape[dim], 2 * mesh.size()
    if length % pieces:
        raise UserError(
            f"parallelism.context: got {mesh.size()} for a sequence of {length}; expected a "
            f"sequence that {pieces} divides, as each rank has two pieces; pad it, or change "
            "parallelism.context"
        )
    if whole[0].device.type == "cpu":
        _add_kernel_of_cpus()
    # torch writes the part into the tensor that it is given.
    parts = [torch.arange(length, device=whole[0].device)]
    parts += [tensor.clone(memory_format=torch.contiguous_format) for tensor in whole]
    dims = [0] + [dim] * len(whole)
    with (
        context_parallel(mesh, buffers=parts, buffer_seq_dims=dims, no_restore_buffers=set(parts)),
        sdpa_kernel(_KERNELS),
    ):
        positions_t, *own = parts
        yield (*own, positions_t)


# -- the ring on CPUs -----------------------------------------------------------------------------
@functools.cache
def _add_kernel_of_cpus() -> None:
    """Adds the two operators to the table that `context_parallel` hands to DTensor."""
    operators = torch.ops.aten
    ring.custom_ops[operators._scaled_dot_product_flash_attention_for_cpu.default] = (
        functools.partial(_on_local_parts, _forward)
    )
    ring.custom_ops[operators._scaled_dot_product_flash_attention_for_cpu_backward.default] = (
        functools.partial(_on_local_parts, _backward)
    )


def _on_local_parts(
    compute: Any, _operator: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, ...]:
    """A handler of DTensor: all tensors are divided by sequence, so are the results."""
    divided = next(arg for arg in args if isinstance(arg, DTensor))
    local = [arg.to_local() if isinstance(arg, DTensor) else arg for arg in args]
    results = compute(divided.device_mesh.get_group(), *local, **kwargs)
    return tuple(
        DTensor.from_local(result, divided.device_mesh, divided.placements, run_check=False)
        for result in results
    )


def _forward(
    group: Any,
    query_bhte: Tensor,
    key_bkte: Tensor,
    value_bkte: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """(output, log of the sum of exponentials)."""
    if attn_mask is not None or not is_causal:
        raise UserError(
            "scaled_dot_product_attention: got "
            f"{'a mask' if attn_mask is not None else 'is_causal=False'} inside of a context "
            "axis; expected is_causal=True without a mask"
        )
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return ring._templated_ring_attention(
        group, _SEQUENCE, kernel, query_bhte, key_bkte, value_bkte, is_causal=True,
        dropout_p=dropout_p, scale=scale,
    )  # fmt: skip


def _backward(
    group: Any,
    gradient_bhte: Tensor,
    query_bhte: Tensor,
    key_bkte: Tensor,
    value_bkte: Tensor,
    output_bhte: Tensor,
    logsumexp_bht: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return ring._templated_ring_attention_backward(
        group, _SEQUENCE, kernel, gradient_bhte, "grad_out", query_bhte, key_bkte, value_bkte,
        output_bhte, logsumexp_bht, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
    )  # fmt: skip
