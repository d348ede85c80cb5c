"""Fine-tuning with adapters: what is trained, and what the frozen weights cost.

`lora` keeps frozen weights in the format of forward, `qlora` keeps the matrices of the blocks in 4
bits and computes with each in the format of forward. Adapters are on all matrices of the blocks.
They have what full training has of every parameter: a float32 copy, a gradient and two moments.
Sources: Hu et al. 2021 (LoRA), section 4.1; Dettmers et al. 2023 (QLoRA), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from .model import attention_flops_per_token, block_matrices, flops_per_token
from .terms import ALWAYS, BACKWARD_BEGINS, BACKWARD_ENDS, FORWARD, LOSS, STEP, Category, Term
from .workload import ParallelLayout, Workload

Method = Literal["full", "lora", "qlora"]
NAMES: dict[Method, str] = {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a weight in NF4 with double quantization: 4 bits, 8 bits of scale for each 64 weights,
and 32 bits for each 256 scales (QLoRA, section 3)."""
_LORA, _QLORA = "Hu et al. 2021, section 4.1", "Dettmers et al. 2023, section 3"
_FSDP2 = "FSDP2 of torch; not traced with frozen blocks"


def trained(work: Workload) -> int:
    """Parameters with gradients and optimizer state: all, or the adapters' only."""
    if work.method == "full":
        return work.counts.total
    each = sum(n * (rows + columns) for (rows, columns), n in block_matrices(work.model).items())
    return work.adapter_rank * each * work.counts.num_layers


def frozen_bytes(work: Workload) -> float:
    """Bytes of all weights without gradients; 0 in full training."""
    if work.method == "full":
        return 0
    counts = work.counts
    return counts.num_layers * _block_bytes(work) + work.width * (counts.embedding + counts.head)


def _block_bytes(work: Workload) -> float:
    """Bytes of the frozen weights of a block."""
    counts, per = work.counts, NF4_BYTES if work.method == "qlora" else work.width
    return per * counts.matrices + work.width * (counts.layer - counts.matrices)


def merged_bytes(work: Workload) -> int:
    """Bytes of the model with its adapters merged, as it is exported."""
    return work.width * work.counts.total


def state_terms(work: Workload, layout: ParallelLayout) -> Iterator[Term]:
    """Frozen weights, and all that adapters have, of one rank."""
    ranks, number, source = layout.mesh.num_fsdp_shards, trained(work), _LORA
    frozen, per = frozen_bytes(work), f"{work.width} P"
    if work.method == "qlora":
        source = _QLORA
        per = f"{NF4_BYTES:.4g} x the matrices of the blocks + {work.width} x the rest"
    yield Term("weights", "frozen weights", frozen / ranks, ALWAYS, lambda: f"{per}, / {ranks}",
               source)  # fmt: skip
    parts: tuple[tuple[Category, str, int], ...] = (
        ("master", "float32 adapters", 4),
        ("moments", "AdamW moments of adapters", 8),
        ("gradients", "gradients of adapters", 4),
    )
    for category, what, size in parts:
        text = f"{size} A / S = {size} x {number:,} / {ranks}; rank {work.adapter_rank}"
        yield Term(category, what, size * number / ranks, ALWAYS, text.__str__, _LORA)


def gathered(work: Workload, layout: ParallelLayout) -> Iterator[Term]:
    """Weights that are whole for a while. FSDP2 gathers them as they are kept: a block and the next
    one, and embedding with head, of the root group. A product in 4 bits needs its matrix in the
    format of forward."""
    counts, width, ahead = work.counts, work.width, layout.prefetch_blocks
    block, during = _block_bytes(work), FORWARD | LOSS | BACKWARD_BEGINS | BACKWARD_ENDS
    if work.method == "qlora":
        matrix = width * max(rows * columns for rows, columns in block_matrices(work.model))
        yield Term("transients", "a matrix out of 4 bits", matrix, during,
                   lambda: f"{width} x the largest matrix", _QLORA)  # fmt: skip
    if not layout.fsdp:
        return
    if layout.reshard is False:
        yield Term("weights", "gathered weights", frozen_bytes(work), during,
                   lambda: "all that is frozen: reshardAfterForward is false", _FSDP2)  # fmt: skip
        return
    root = width * (counts.embedding + counts.head)
    yield Term("weights", "embedding and head, of the root group", root, ALWAYS ^ STEP,
               lambda: f"{width} x (embedding + head)", _FSDP2)  # fmt: skip
    for phase, blocks in (
        (FORWARD, 2 + ahead), (BACKWARD_BEGINS | BACKWARD_ENDS, 1 + max(1, ahead)),
    ):  # fmt: skip
        text = f"{blocks} x a block as it is kept ({block:,.0f} bytes)"
        yield Term("transients", "gathered blocks", blocks * block, phase, text.__str__, _FSDP2)


def kept_per_token(work: Workload) -> int:
    """Bytes that the adapters of a block keep for backward per token: the result of each first
    product. Their inputs are kept without them too."""
    if work.method == "full":
        return 0
    return work.width * work.adapter_rank * sum(block_matrices(work.model).values())


def step_flops_per_token(work: Workload) -> float:
    """Model FLOPs of one token, forward and backward. A frozen matrix has no gradient: two products
    instead of three."""
    whole = flops_per_token(work.model, work.sequence_length)
    if work.method == "full":
        return whole
    attention = attention_flops_per_token(work.model, work.sequence_length)
    return (whole - attention) * 2 / 3 + attention + 6.0 * trained(work)
