"""Bytes that one rank sends in a step, per kind of collective and group.

A ring collective over N ranks moves (N-1)/N of the bytes per rank for a gather or a reduce-scatter,
and twice that for an all-reduce. Source: ZeRO (Rajbhandari et al. 2020), section 7, in bytes
instead of elements; FSDP2 gathers in the format of forward and reduces in its own. On CPUs a
reduce-scatter counts twice: torch's gloo has none and reduces the whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from ..planner import adapters
from ..planner.activations import key_value_dim, rank_tokens
from ..planner.memory import factor_elements, stage_parameters
from ..planner.model import block_matrices, factor_rank
from ..planner.workload import ParallelLayout, Workload
from ..protocol.mesh import Mesh

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]


class Collective(NamedTuple):
    """One row: what one rank sends per step within one kind of group."""

    what: str
    kind: Kind
    axes: tuple[str, ...]
    """Axes of the mesh whose ranks form the group."""
    ranks: int
    num_bytes: float
    calls: int
    """Messages in a step; each pays the latency once."""
    formula: Callable[[], str]
    source: str
    of_optimizer: bool = False
    """Part of the optimizer's step, which waits for it."""

    @property
    def group(self) -> str:
        return f"{' x '.join(self.axes)}, {self.ranks} ranks"


def collectives(work: Workload, layout: ParallelLayout) -> tuple[Collective, ...]:
    mesh = layout.mesh
    rows: list[Collective] = []
    if mesh.tensor > 1:
        rows += _tensor(work, layout)
    if mesh.context > 1:
        rows.append(_context(work, layout))
    if mesh.pipeline > 1:
        rows.append(_pipeline(work, layout))
    rows += _shards(work, layout)
    if mesh.replicate > 1:
        rows.append(_replicas(work, layout))
    if work.optimizer in ("muon", "dion") and mesh.num_fsdp_shards > 1:
        rows += _muon(work, layout) if work.optimizer == "muon" else _dion(work, layout)
    return tuple(rows)


def blocks_computed_twice(layout: ParallelLayout, num_layers: int) -> int:
    """Blocks whose forward is computed again in the backward pass."""
    again = layout.checkpointing.blocks
    return num_layers // again.every_nth_block if again else 0


def _scatter_factor(work: Workload) -> int:
    """Bytes that a reduce-scatter sends / a ring's bytes."""
    return 1 if work.on_gpu else 2


def _tensor(work: Workload, layout: ParallelLayout) -> Iterator[Collective]:
    """Each block gathers its input twice and scatters its output twice, forward and backward; what
    is computed again stops before the last scatter. The embedding scatters, and the head gathers.
    Gradients of the norms, which each rank computes for its part of the sequence, are summed."""
    mesh, model, micro = layout.mesh, work.model, layout.num_micro_batches
    boundary = work.width * rank_tokens(work, layout) * model.dim
    again = blocks_computed_twice(layout, model.num_layers)
    edges = 4 if mesh.pipeline == 1 or layout.schedule == "zbvZeroBubble" else 2
    count = (8 * model.num_layers + 3 * again) // mesh.pipeline + edges
    scatters = (4 * model.num_layers + again) // mesh.pipeline + edges // 2
    sent = count + scatters * (_scatter_factor(work) - 1)
    ring = (mesh.tensor - 1) / mesh.tensor
    source = "Korthikanti et al. 2022, section 4.2.2"
    yield Collective(
        "gathers and scatters of activations", "all-gather", ("tensor",), mesh.tensor,
        sent * micro * boundary * ring, count * micro,
        lambda: f"{sent} x m {micro} x {work.width} sbh x (T-1)/T", source,
    )  # fmt: skip
    norms = 2 * model.num_layers // mesh.pipeline + 1
    each = (
        norms * model.dim + 2 * model.num_layers // mesh.pipeline * model.head_dim * model.qk_norm
    )
    yield Collective(
        "all-reduce of the norms' gradients", "all-reduce", ("tensor",), mesh.tensor,
        2 * ring * micro * work.width * each, norms * micro,
        lambda: f"2 x m {micro} x {work.width} x {each:,} x (T-1)/T", source,
    )  # fmt: skip


def _context(work: Workload, layout: ParallelLayout) -> Collective:
    """Each layer gathers keys and values forward and backward, and passes their float32 gradients
    around the ring."""
    mesh, micro = layout.mesh, layout.num_micro_batches
    layers = work.model.num_layers // mesh.pipeline
    settings, width = layout.checkpointing, work.width
    gathers = 2 * layers
    if "attention" not in settings.keep:
        gathers += blocks_computed_twice(layout, layers)
    others, ring = mesh.context - 1, 4 * mesh.context * layers
    each = rank_tokens(work, layout) * key_value_dim(work.model, layout)
    return Collective(
        "keys and values, and their gradients", "all-gather", ("context",), mesh.context,
        micro * each * (gathers * width * others + ring),
        micro * (gathers + layers),  # a ring has as many steps as a gather
        lambda: f"m {micro} x ({gathers} x {width} (C-1) + 4 C L) x {each:,}; C {mesh.context}",
        "torch's _templated_ring_attention with its rotation by all-gather",
    )  # fmt: skip


def _pipeline(work: Workload, layout: ParallelLayout) -> Collective:
    """Each stage passes its activations on, and their gradients back; the rank that sends most."""
    mesh, micro = layout.mesh, layout.num_micro_batches
    sends = hops_of_rank(layout)
    boundary = work.width * rank_tokens(work, layout) * work.model.dim // mesh.tensor
    by = f" / {mesh.tensor} of the tensor axis" if mesh.tensor > 1 else ""
    return Collective(
        "activations and their gradients", "send", ("pipeline",), mesh.pipeline,
        sends * micro * boundary, sends * micro,
        lambda: f"{sends} hops x m {micro} x {work.width} sbh{by}",
        "Narayanan et al. 2021, section 3.2",
    )  # fmt: skip


def hops_of_rank(layout: ParallelLayout) -> int:
    """Sends of one micro-batch, there and back, of the rank of a pipeline that sends most: two for
    each of its stages; the first stage sends nothing back, the last nothing on, and in a V the two
    stages in the middle are on one rank."""
    p, v = layout.mesh.pipeline, layout.stages_per_rank
    if p > 2:
        return 2 * v
    return 2 if layout.schedule == "zbvZeroBubble" else 2 * v - 1


def _shards(work: Workload, layout: ParallelLayout) -> Iterator[Collective]:
    mesh, shard = layout.mesh, layout.mesh.num_fsdp_shards
    if shard == 1:
        return
    total = stage_parameters(work.counts, layout) / mesh.tensor
    summed, kept, text, of = total, work.width * total, f"{work.width} P", "P"
    if work.method != "full":
        summed, of = adapters.trained(work), "A"
        kept, text = adapters.frozen_bytes(work) + work.width * summed, "weights"
    axes = _shard_axes(mesh)
    micro, keep = layout.num_micro_batches, layout.reshard is False
    if mesh.pipeline > 1:  # gathered and reduced once in a step
        micro, keep = 1, True
    groups = work.model.num_layers // mesh.pipeline + 3
    gathers, whole = 1 if keep else 2, layout.accumulate_whole
    gathered, reduced = 1 if keep and whole else micro, 1 if whole else micro
    ring, reduce = (shard - 1) / shard, work.reduce_width
    small = layout.reshard if layout.reshard is not True and layout.reshard is not False else 0
    if small > 1 and mesh.pipeline == 1:  # forward gathers over all, backward over the small group
        yield Collective(
            "all-gather of parameters in forward", "all-gather", axes, shard,
            gathered * kept * ring, gathered * groups,
            lambda: f"m {gathered} x {text} x (S-1)/S", _ZERO,
        )  # fmt: skip
        yield Collective(
            "all-gather of parameters in backward", "all-gather", axes, small,
            gathered * kept * (small - 1) / small, gathered * groups,
            lambda: f"m {gathered} x {text} x ({small}-1)/{small}: reshardAfterForward", _ZERO,
        )  # fmt: skip
    else:
        yield Collective(
            "all-gather of parameters", "all-gather", axes, shard,
            gathers * gathered * kept * ring, gathers * gathered * groups,
            lambda: f"{gathers} x m {gathered} x {text} x (S-1)/S", _ZERO,
        )  # fmt: skip
    factor = _scatter_factor(work)
    twice = "2 (gloo) x " if factor == 2 else ""
    yield Collective(
        "reduce-scatter of gradients", "reduce-scatter", axes, shard,
        factor * reduced * reduce * summed * ring, reduced * groups,
        lambda: f"{twice}m {reduced} x {reduce} {of} x (S-1)/S", _ZERO,
    )  # fmt: skip


_ZERO = "ZeRO (Rajbhandari et al. 2020), section 7, in bytes"


def _muon(work: Workload, layout: ParallelLayout) -> Iterator[Collective]:
    """Parts of as many equal matrices as there are ranks are exchanged, so that each rank has one
    whole matrix, and the results back. Buckets with fewer are filled up."""
    mesh, shard = layout.mesh, layout.mesh.num_fsdp_shards
    layers, elements, buckets = work.model.num_layers // mesh.pipeline, 0, 0
    for (rows, columns), number in block_matrices(work.model).items():
        full = -(-layers * number // shard)
        buckets, elements = buckets + full, elements + full * rows * columns
    # DTensor exchanges shards by an all-gather where the backend is gloo.
    factor = 1 if work.on_gpu else shard
    yield Collective(
        "matrices of Muon, and their updates", "all-to-all", _shard_axes(mesh), shard,
        factor * 4 * elements * (shard - 1) / shard, 2 * buckets,
        lambda: f"{'S (gloo) x ' * (factor > 1)}2 x 2 x {elements:,} x (S-1)/S; S {shard}",
        "Ahn et al. 2025 (Dion), section 3", True,
    )  # fmt: skip


def _dion(work: Workload, layout: ParallelLayout) -> Iterator[Collective]:
    """The right factor of a matrix is gathered; two Gram matrices and the product are summed."""
    mesh, shard = layout.mesh, layout.mesh.num_fsdp_shards
    layers, ring = work.model.num_layers // mesh.pipeline, (shard - 1) / shard
    matrices = layers * sum(block_matrices(work.model).values())
    factors, squares = (
        layers * factor_elements(work),
        layers
        * sum(
            number * factor_rank(shape, work.rank_fraction) ** 2
            for shape, number in block_matrices(work.model).items()
        ),
    )
    axes, source = _shard_axes(mesh), "Ahn et al. 2025 (Dion), algorithm 1"
    yield Collective(
        "factors of Dion", "all-gather", axes, shard, 4 * factors * ring, matrices,
        lambda: f"4 x {factors:,} x (S-1)/S; S {shard}", source, True,
    )  # fmt: skip
    summed = 2 * 8 * squares + 4 * factors  # bytes: Gram matrices in float64
    yield Collective(
        "Gram matrices and products of Dion", "all-reduce", axes, shard,
        2 * summed * ring, 3 * matrices,
        lambda: f"2 x {summed:,} x (S-1)/S; S {shard}", source, True,
    )  # fmt: skip


def _shard_axes(mesh: Mesh) -> tuple[str, ...]:
    return ("shard", "context") if mesh.context > 1 else ("shard",)


def _replicas(work: Workload, layout: ParallelLayout) -> Collective:
    mesh, shard, reduce = layout.mesh, layout.mesh.num_fsdp_shards, work.reduce_width
    total, of = stage_parameters(work.counts, layout) / mesh.tensor, "P"
    if work.method != "full":
        total, of = adapters.trained(work), "A"
    ring = (mesh.replicate - 1) / mesh.replicate
    return Collective(
        "all-reduce of gradients", "all-reduce", ("replicate",), mesh.replicate,
        2 * reduce * total / shard * ring, work.model.num_layers // mesh.pipeline + 3,
        lambda: f"2 x {reduce} {of} / S x (R-1)/R; S {shard}, R {mesh.replicate}", _ZERO,
    )  # fmt: skip
