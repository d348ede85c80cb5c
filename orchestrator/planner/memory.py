"""Memory of one rank's device, term by term, in the phases of a step.

A term is there in some phases of a step; the peak is the phase whose terms add up to most. States
are exact. Transients, activations and logits follow what torch keeps, and bench/plan_accuracy
compares them with traces; still, plan to USABLE of a device.

Sources: states: Rajbhandari et al. 2020 (ZeRO), section 3, with FSDP2's float32 shards as the only
master copy. Activations: Korthikanti et al. 2022, section 4, counted for RMSNorm and SwiGLU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from ..protocol.host_memory import RESERVE
from ..protocol.mesh import Mesh
from . import adapters
from .activations import activation_terms, in_flight, layer_bytes, rank_tokens
from .model import Counts, block_matrices, factor_rank
from .terms import (
    ALWAYS,
    BACKWARD_BEGINS,
    BACKWARD_ENDS,
    CATEGORIES,
    EMBEDDING,
    FORWARD,
    LOSS,
    STEP,
    Category,
    Term,
    by_phase,
    peak,
)
from .workload import WHOLE, ParallelLayout, StageEnds, Workload, parts_of

USABLE = 0.8
"""Share of a device's memory: 454 published runs below it never ran out (arXiv 2411.06465)."""

CERTAINLY_TOO_MUCH = 1.1
"""Share of a device's memory: estimates are within a tenth of what torch takes, so a job that needs
more is refused. In between it is warned about."""

CONTEXT_BYTES = 2e9
"""Bytes of the CUDA context and NCCL's buffers; 1 to 2 GB on any job."""

MAIN_MEMORY_PER_DEVICE = 240 * 2**30
"""Bytes of a node's main memory for each of its devices that offloaded states may take: of the
2 TiB of a DGX H100 with 8 devices, less what processes need. An assumption."""

PROCESS_BYTES = 2**30
"""Main memory of a worker process beside tensors: the interpreter, torch's libraries and a CUDA
context. An assumption; a CPU worker of the recipe has 0.3 GiB."""

BYTES_IN_8_BITS = 2 * (1 + 4 / 256)
"""Bytes of the two moments of a parameter: an index of one byte, and 4 bytes for each 256
values."""

_ZERO = "ZeRO (Rajbhandari et al. 2020), section 3.1"
_FSDP2 = "FSDP2 of torch, by trace (bench/plan_accuracy)"


def device_terms(work: Workload, layout: ParallelLayout) -> tuple[Term, ...]:
    """All that one rank's device holds in a step; of a pipeline, the rank that holds most."""
    return max(_rank_terms(work, layout), key=peak)


def device_bytes(work: Workload, layout: ParallelLayout) -> int:
    """Peak memory of one rank's device over the phases of a step."""
    return math.ceil(max(peak(terms) for terms in _rank_terms(work, layout)))


def peak_by_category(work: Workload, layout: ParallelLayout) -> dict[Category, int]:
    """device_bytes by category, without what CUDA takes, in the phase that needs most."""
    terms = max(_rank_terms(work, layout), key=peak)
    sums = by_phase(terms)
    bit, num_bytes = 1 << sums.index(max(sums)), dict[Category, int]()
    for term in terms:
        if term.phases & bit and term.category != "context":
            num_bytes[term.category] = num_bytes.get(term.category, 0) + round(term.num_bytes)
    return {name: num_bytes[name] for name in CATEGORIES if num_bytes.get(name)}


def _rank_terms(work: Workload, layout: ParallelLayout) -> Iterator[tuple[Term, ...]]:
    """Terms of the ranks of a pipeline that may hold most: the first and the last."""
    for part in parts_of(layout):
        terms = [] if layout.offload else [*state_terms(work, layout, part)]
        if layout.offload and layout.mesh.replicate > 1 and layout.mesh.pipeline == 1:
            # Shards whose sum over replicas is under way stay on the device until backward ends.
            terms += _gradients_so_far(work, layout)
        terms += _gathered(work, layout, part)
        terms += activation_terms(work, layout, part)
        if work.on_gpu:
            terms.append(_CONTEXT)
        yield tuple(terms)


_CONTEXT = Term(
    "context", "CUDA context and NCCL", CONTEXT_BYTES, ALWAYS, lambda: "1 to 2 GB on any job",
    "estimate",
)  # fmt: skip


# -- states -------------------------------------------------------------------------------------
def moment_bytes(work: Workload) -> float:
    """Bytes of optimizer state per parameter, averaged over the model. Exact for adamw; others keep
    norms and small matrices as adamw does, which is not counted."""
    model, counts = work.model, work.counts
    if work.method != "full":
        return 8 * adapters.trained(work) / counts.total
    if work.optimizer == "adamw8bit" and model.dim % 256 == 0:
        other = model.num_layers * model.dim * model.ffn_dim * (model.ffn_dim % 256 != 0)
        return (BYTES_IN_8_BITS * (counts.total - other) + 8 * other) / counts.total
    if work.optimizer in ("muon", "dion"):
        in_blocks = counts.num_layers * counts.matrices
        factors = counts.num_layers * factor_elements(work) if work.optimizer == "dion" else 0
        return (4 * (in_blocks + factors) + 8 * (counts.total - in_blocks)) / counts.total
    return 8


def factor_elements(work: Workload) -> int:
    """Elements of the right factors that Dion keeps of one block: a row for each column of the
    matrix."""
    return sum(
        number * shape[1] * factor_rank(shape, work.rank_fraction)
        for shape, number in block_matrices(work.model).items()
    )


def state_bytes(work: Workload) -> float:
    """Bytes per parameter: 4 master copy, 4 gradient, the optimizer's; of frozen weights what they
    are kept in."""
    share = adapters.trained(work) / work.counts.total
    return adapters.frozen_bytes(work) / work.counts.total + 8 * share + moment_bytes(work)


def checkpoint_bytes(work: Workload) -> float:
    """Bytes per parameter: as state_bytes without gradients and frozen weights."""
    return 4 * adapters.trained(work) / work.counts.total + moment_bytes(work)


def rank_parameters(counts: Counts, layout: ParallelLayout) -> float:
    """Parameters of which a rank keeps the master copy; of a pipeline the largest stages."""
    mesh = layout.mesh
    return stage_parameters(counts, layout) / (mesh.tensor * mesh.num_fsdp_shards)


def stage_parameters(counts: Counts, layout: ParallelLayout) -> int:
    """Parameters of the stages of one rank of a pipeline, the largest, which the other axes
    divide."""
    return max(_parameters_of(counts, layout, part) for part in parts_of(layout))


def _parameters_of(counts: Counts, layout: ParallelLayout, part: StageEnds) -> int:
    layers = counts.num_layers // layout.mesh.pipeline * counts.layer
    return layers + counts.embedding * part.embedding + counts.head * part.head


class WorkerMemory(NamedTuple):
    """Bytes that one worker has; None: not known."""

    device: int | None = None
    """Bytes of its devices, or spec.resources.memory for a job on CPUs."""
    host: int | None = None
    """Bytes of its node's main memory, for offloaded states."""


UNKNOWN = WorkerMemory()


def host_share(node_bytes: int, workers: int) -> int:
    """Bytes of main memory that each of `workers` workers may fill on a node with so many: without
    the node's reserve and the worker's process."""
    return max(0, int((1 - RESERVE) * node_bytes / workers) - PROCESS_BYTES)


def whole_share(host_bytes: int) -> float:
    """A worker's share of its node's main memory with nothing held back, at least: what host_share
    was computed from. States above it certainly do not fit; a small worker takes less than
    PROCESS_BYTES."""
    return (host_bytes + PROCESS_BYTES) / (1 - RESERVE)


def describe_host(host_bytes: int | None) -> str:
    """Sentence about the main memory that offloaded states may take."""
    if host_bytes is None:
        each = f"{MAIN_MEMORY_PER_DEVICE / 2**30:.0f} GiB"
        return f"{each} of main memory per worker, assumed: the nodes' memory is not known"
    return f"{host_bytes / 2**30:.1f} GiB of main memory per worker, of what its node has"


def main_memory_holds(work: Workload, mesh: Mesh, host_bytes: int | None = None) -> bool:
    """True if main memory holds the offloaded states of a rank: `host_bytes`, or where that is not
    known its share of the usual nodes."""
    room = MAIN_MEMORY_PER_DEVICE if host_bytes is None else host_bytes
    return state_bytes(work) * work.counts.total / mesh.num_shards <= room


def model_state_bytes(work: Workload, layout: ParallelLayout) -> int:
    """Bytes of master copy, gradients and optimizer state of one rank, wherever they are."""
    return math.ceil(state_bytes(work) * rank_parameters(work.counts, layout))


def shard_bytes(work: Workload, layout: ParallelLayout) -> int:
    """Bytes that one worker stages for a checkpoint."""
    return math.ceil(checkpoint_bytes(work) * rank_parameters(work.counts, layout))


_MOMENTS_OF = {
    "adamw": "AdamW moments",
    "adamw8bit": "AdamW moments of 8 bits",
    "muon": "momentum of Muon",
    "dion": "momentum and factors of Dion",
}


def state_terms(
    work: Workload, layout: ParallelLayout, part: StageEnds = WHOLE
) -> tuple[Term, ...]:
    """Master copy, moments and gradients of one rank, wherever they are."""
    if work.method != "full":
        return tuple(adapters.state_terms(work, layout))
    mesh, ranks = layout.mesh, layout.mesh.tensor * layout.mesh.num_fsdp_shards
    total = _parameters_of(work.counts, layout, part)
    mine = total / ranks
    # Every rank of a tensor axis has the norms whole, which are not counted.
    exact, per = ranks == mesh.num_fsdp_shards and mesh.pipeline == 1, moment_bytes(work)

    def by(number: float) -> str:
        largest = "; P of one stage" if mesh.pipeline > 1 else ""
        return f"{number:.4g} P / S = {number:.4g} x {total:,.0f} / {ranks}{largest}"

    fp32 = "float32 parameters" if ranks == 1 else "float32 shards of the parameters"
    terms = [
        Term("master", fp32, 4 * mine, ALWAYS, lambda: by(4), _ZERO, exact),
        Term(
            "moments", _MOMENTS_OF[work.optimizer], per * mine, ALWAYS, lambda: by(per), _ZERO,
            exact and work.optimizer == "adamw",
        ),
    ]  # fmt: skip
    if work.in_backward:
        size = 4 * work.counts.largest_block / ranks
        text = "4 x the largest group: stepped in backward"
        during = BACKWARD_BEGINS | BACKWARD_ENDS
        terms.append(Term("gradients", "gradients", size, during, lambda: text, _ZERO))
        return tuple(terms)
    always = _gradients_stay(layout)
    when = ALWAYS if always else STEP
    terms.append(Term("gradients", "gradients", 4 * mine, when, lambda: by(4), _ZERO, exact))
    if not always and not layout.accumulate_whole and mesh.pipeline == 1:
        terms += _gradients_so_far(work, layout)
    return tuple(terms)


def _gradients_so_far(work: Workload, layout: ParallelLayout) -> Iterator[Term]:
    """Reduced gradients during backward. With FSDP2 the first block has none while it computes, nor
    have the embedding and the block whose gradients are being reduced."""
    counts, ranks = work.counts, layout.mesh.tensor * layout.mesh.num_fsdp_shards
    rows = (
        (BACKWARD_ENDS, 2 * counts.layer + counts.embedding, "two blocks - embedding"),
        (EMBEDDING, counts.embedding, "embedding"),
    )
    for phase, missing, text in rows:
        missing *= layout.fsdp
        formula = f"4 x (P - {text}) / S" if layout.fsdp else "4 P"
        size = 4 * max(0, counts.total - missing) / ranks
        yield Term(
            "gradients", "gradients so far", size, phase, functools.partial(str, formula), _FSDP2
        )


def _gradients_stay(layout: ParallelLayout) -> bool:
    """True if float32 gradients are there in all phases: the sums of earlier micro-batches, or
    DDP's buckets, of which they are views."""
    several = layout.num_micro_batches > 1
    if layout.mesh.pipeline > 1:
        return False  # whole ones take their place until the end of the step
    if layout.fsdp:
        return several and not layout.accumulate_whole
    return several or (layout.mesh.replicate > 1 and layout.bucket_view)


# -- gathered parameters, gradients before they are reduced ---------------------------------------
def _gathered(work: Workload, layout: ParallelLayout, part: StageEnds) -> Iterator[Term]:
    mesh, width = layout.mesh, work.width
    if work.method != "full":
        yield from adapters.gathered(work, layout)
        return
    if not layout.fsdp:
        yield from _without_shards(work, layout)
        return
    total = _parameters_of(work.counts, layout, part) / mesh.tensor
    by = f" / {mesh.tensor} of the tensor axis" if mesh.tensor > 1 else ""
    keep = layout.reshard
    if mesh.pipeline > 1:
        # Kept from the first micro-batch to the last; gradients are summed in float32.
        formula = f"{width} P{by}; P of one stage"
        during = FORWARD | LOSS | BACKWARD_BEGINS | BACKWARD_ENDS
        yield Term("weights", "gathered parameters", width * total, during, lambda: formula, _FSDP2)
        whole = f"4 P{by}; P of one stage"
        # All micro-batches may be in flight before the first gradient.
        again = layout.num_micro_batches > in_flight(layout, part)
        when = during if again else BACKWARD_ENDS
        yield Term("gradients", "whole gradients", 4 * total, when, lambda: whole, _FSDP2)
        if not again:
            # They appear while the activations of the block are freed.
            freed = layer_bytes(work, layout) * rank_tokens(work, layout)
            first = max(0.0, 4 * work.counts.layer / mesh.tensor - freed)
            yield Term(
                "gradients", "gradients of a block beyond its activations", first, BACKWARD_BEGINS,
                lambda: f"4 x a block ({work.counts.layer:,}){by} - its activations", _FSDP2,
            )  # fmt: skip
        return
    until_backward = FORWARD | LOSS | BACKWARD_BEGINS  # each block frees its parameters there
    if keep is False:
        kept, formula = width * total, f"{width} P{by}: reshardAfterForward is false"
        yield Term("weights", "gathered parameters", kept, until_backward, lambda: formula, _FSDP2)
    elif keep is not True and 1 < keep < mesh.num_fsdp_shards:
        kept, formula = width * total / keep, f"{width} P{by} / {keep}: reshardAfterForward"
        what = "parameters of the small group"
        yield Term("weights", what, kept, until_backward, lambda: formula, _FSDP2)
    if layout.accumulate_whole and layout.num_micro_batches > 1:
        reduce = work.reduce_width
        text = f"{reduce} P{by}: accumulateGradients is whole"
        during = FORWARD | LOSS | BACKWARD_BEGINS | BACKWARD_ENDS
        yield Term("gradients", "whole gradients", reduce * total, during, lambda: text, _FSDP2)
    transients = _root_transients if work.own_loop else _transients
    yield from transients(work, layout, by)


def _transients(work: Workload, layout: ParallelLayout, by: str) -> Iterator[Term]:
    """Transient memory of FSDP2. A group's gather has a buffer beside the parameters, which in
    forward are those of one group and in backward of two. When backward begins the input of the
    head's reduction is there; later those of a block, with its whole gradients."""
    counts, width, tensor = work.counts, work.width, layout.mesh.tensor
    reduce, ahead = work.reduce_width, layout.prefetch_blocks
    block, head = counts.layer / tensor, counts.head / tensor
    kept = layout.reshard is False
    forward = width if kept else width * (2 + ahead)
    largest = max(block, head, counts.embedding / tensor)
    yield Term(
        "transients", "gathered blocks", forward * largest, FORWARD,
        lambda: f"{forward} x the largest group ({largest * tensor:,.0f}){by}", _FSDP2,
    )  # fmt: skip
    if layout.chunk_tokens and not kept:  # the loss in chunks is computed by the head
        size = width * (head + max(1, ahead) * block)
        yield Term(
            "transients", "the head, and gathered blocks", size, LOSS,
            lambda: f"{width} x (the head + {max(1, ahead)} x a block){by}", _FSDP2,
        )  # fmt: skip
    gathered = 0 if kept else width * (1 + max(1, ahead))
    matrix = work.model.dim * work.model.ffn_dim / tensor
    yield Term(
        "transients", "gathered blocks, the head's reduction",
        gathered * block + reduce * head + width * matrix, BACKWARD_BEGINS,
        lambda: f"{gathered} x a block + {reduce} x the head + {width} x a matrix{by}", _FSDP2,
    )  # fmt: skip
    whole = gathered + width + reduce
    yield Term(
        "transients", "gathered blocks, gradients of one and their reduction", whole * block,
        BACKWARD_ENDS, lambda: f"{whole} x a block ({counts.layer:,}){by}", _FSDP2,
    )  # fmt: skip
    # Its gradient is whole on each rank of a tensor axis, which then copies its part.
    table = counts.embedding / tensor
    computed = width * (table + counts.embedding + table * (tensor > 1)) + reduce * block
    reduced = (width + reduce) * table + reduce * table / layout.mesh.num_fsdp_shards
    yield Term(
        "transients", "gradient of the embedding and its reduction", max(computed, reduced),
        EMBEDDING, lambda: f"V D = {counts.embedding:,}{by}; whole while it is computed", _FSDP2,
    )  # fmt: skip


def _root_transients(work: Workload, layout: ParallelLayout, by: str) -> Iterator[Term]:
    """Transients where embedding and head are in the root group: it is gathered from the first
    block to the end of backward, and the head's whole gradient waits for the embedding's."""
    counts, width, reduce = work.counts, work.width, work.reduce_width
    tensor, ahead = layout.mesh.tensor, layout.prefetch_blocks
    block, head = counts.layer / tensor, counts.head / tensor
    root, kept = (counts.embedding + counts.head) / tensor, layout.reshard is False
    if not kept:
        yield Term(
            "weights", "embedding and head, of the root group", width * root, ALWAYS ^ STEP,
            lambda: f"{width} x (embedding + head){by}", _FSDP2,
        )  # fmt: skip
    gathered = 0 if kept else width * (1 + max(1, ahead))
    waiting = width * head
    for phase, size in (
        (FORWARD, 0 if kept else width * (2 + ahead) * block),
        (BACKWARD_BEGINS, gathered * block + waiting),
        (BACKWARD_ENDS, (gathered + width + reduce) * block + waiting),
        (EMBEDDING, (width + reduce) * root + reduce * root / layout.mesh.num_fsdp_shards),
    ):
        yield Term(
            "transients", "gathered blocks and whole gradients", size, phase,
            lambda: f"groups of a block and of the root{by}", _FSDP2,
        )  # fmt: skip


def _without_shards(work: Workload, layout: ParallelLayout) -> Iterator[Term]:
    """DDP, or one process."""
    counts = work.counts
    if work.width < 4:
        # autocast casts each matrix in forward. Backward needs the copies, unless it computes
        # forward again: then only the head's.
        size = work.width * (counts.num_layers * counts.matrices)
        head = work.width * work.model.dim * work.model.vocab_size
        until = FORWARD if layout.checkpointing.full else FORWARD | LOSS | BACKWARD_BEGINS
        formula = f"{work.width} x the matrices of the blocks: copies of autocast"
        what, source = "matrices in the format of forward", "torch.autocast, by trace"
        yield Term("weights", what, size, until, lambda: formula, source)
        of_head = f"{work.width} x the head: copy of autocast"
        yield Term("weights", "head in the format of forward", head, FORWARD | LOSS,
                   lambda: of_head, source)  # fmt: skip
    if layout.mesh.replicate > 1 and layout.num_micro_batches > 1:
        size = 4 * counts.total
        yield Term(
            "gradients", "gradients of earlier micro-batches", size, ALWAYS ^ STEP,
            lambda: "4 P: not in DDP's buckets until the last micro-batch", "torch DDP, by trace",
        )  # fmt: skip
    if layout.mesh.replicate > 1 and not layout.bucket_view:
        size = 4 * counts.total
        yield Term(
            "gradients", "DDP's buckets", size, ALWAYS, lambda: "4 P: not views of the gradients",
            "torch DDP, gradient_as_bucket_view",
        )  # fmt: skip
