"""Search for the fastest division of a model over devices, and why the others lost.

Every combination of replicate, shard, tensor, context, pipeline, schedule, activation
checkpointing, resharding, offload, micro-batch and accumulation that the recipe can run is
estimated. One that needs more than USABLE of a device has lost. The order of candidates decides
between equals, the plainest first, so the same question has the same answer.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ..api.v1alpha1.parallelism import (
    ActivationCheckpointing,
    Recomputation,
    SelectiveRecomputation,
)
from ..planner.memory import USABLE, device_bytes, main_memory_holds, model_state_bytes
from ..planner.workload import ParallelLayout, Workload
from ..protocol.mesh import Mesh
from .step_time import Hardware, StepTime, mfu, step_time

CHECKPOINTING = (
    ActivationCheckpointing(),
    ActivationCheckpointing(selective=SelectiveRecomputation()),
    ActivationCheckpointing(selective=SelectiveRecomputation(keep=("attention",))),
    ActivationCheckpointing(full=Recomputation()),
)
CHUNK_TOKENS = 2048
"""Tokens of a chunk where the loss is computed in chunks."""
MAX_PIPELINE = 64
AXIS_MUST_GAIN = 0.03
"""Share of tokens/s that each tensor, context or pipeline axis must gain to be ranked before a
plainer layout: two estimates do not differ by less."""
MIN_TOKENS_PER_RANK = 1024
"""Tokens of a sequence that a context axis divides; shorter parts leave attention no work to
hide."""


class Cluster(NamedTuple):
    """Devices that the job may use."""

    devices: int
    per_node: int
    hardware: Hardware
    memory_bytes: int
    """Memory of one device."""
    host_bytes: int | None = None
    """Main memory for the offloaded states of one device; None: as in the usual nodes."""


class Candidate(NamedTuple):
    """One layout with its estimates."""

    layout: ParallelLayout
    num_bytes: int
    time: StepTime
    tokens_per_s: float
    mfu: float

    @property
    def strategy(self) -> str:
        return self.layout.mesh.strategy

    @property
    def axes(self) -> int:
        """Product of tensor, context and pipeline."""
        mesh = self.layout.mesh
        return (mesh.tensor > 1) + (mesh.context > 1) + (mesh.pipeline > 1)

    @property
    def worth(self) -> float:
        """Tokens/s less what the axes must gain."""
        return float(self.tokens_per_s * (1 - AXIS_MUST_GAIN) ** self.axes)


class Lost(NamedTuple):
    """The layout of a strategy that needs least memory, and still too much."""

    strategy: str
    layout: ParallelLayout
    num_bytes: int
    why: str


class Found(NamedTuple):
    """The answer. `ranked`: the best layout of each strategy that fits, best first; `lost`: of
    the strategies of which nothing fits, the layout that needs least memory, least first."""

    ranked: tuple[Candidate, ...]
    lost: tuple[Lost, ...]
    num_considered: int


def search(work: Workload, cluster: Cluster) -> Found:
    """The best layout of each strategy on all devices of the cluster."""
    room = USABLE * cluster.memory_bytes
    best: dict[str, Candidate] = {}
    least: dict[str, tuple[int, ParallelLayout]] = {}
    considered = 0
    for mesh in meshes(work, cluster):
        name, plainer = mesh.strategy, _Plainer()
        for layout in layouts(work, mesh, cluster.per_node, cluster.host_bytes):
            considered += 1
            if plainer.is_as_good_as(layout, _sizes(layout)[-1]):
                continue  # it fits with the largest micro-batch, so nothing has to be saved
            fitting_layouts = _largest_that_fits(work, layout, room)
            if isinstance(fitting_layouts, int):
                if name not in least or fitting_layouts < least[name][0]:
                    least[name] = (fitting_layouts, layout)
                continue
            if plainer.is_as_good_as(layout, fitting_layouts[-1].micro_batch):
                continue
            plainer.add(layout, fitting_layouts[-1].micro_batch)
            for fitting in fitting_layouts:
                candidate = estimate(work, fitting, cluster.hardware)
                if name not in best or candidate.tokens_per_s > best[name].tokens_per_s:
                    best[name] = candidate
    ranked = sorted(best.values(), key=lambda one: -one.worth)
    lost = sorted((needs, name, way) for name, (needs, way) in least.items() if name not in best)
    return Found(
        tuple(ranked),
        tuple(
            Lost(name, layout, needs, _too_big(work, layout, needs, cluster))
            for needs, name, layout in lost
        ),
        considered,
    )


class _Plainer:
    """The layouts of one mesh that fit so far. Checkpointing, chunks and offload only save memory:
    a layout with more of them and no larger micro-batch is slower, and needs no estimate."""

    def __init__(self) -> None:
        self._found: dict[object, list[tuple[tuple[int, bool, bool], int]]] = {}

    def add(self, layout: ParallelLayout, micro_batch: int) -> None:
        smaller = self._found.setdefault((layout.schedule, layout.reshard), [])
        smaller.append((_saves(layout), micro_batch))

    def is_as_good_as(self, layout: ParallelLayout, micro_batch: int) -> bool:
        smaller = self._found.get((layout.schedule, layout.reshard))
        if not smaller:
            return False
        saves, pipeline = _saves(layout), layout.mesh.pipeline > 1
        for less, size in smaller:
            # Without a pipeline larger micro-batches are never slower.
            same = size == micro_batch if pipeline else size >= micro_batch
            if same and all(a <= b for a, b in zip(less, saves, strict=True)):
                return True
        return False


def _saves(layout: ParallelLayout) -> tuple[int, bool, bool]:
    mode = next(n for n, mode_of in enumerate(CHECKPOINTING) if mode_of is layout.checkpointing)
    return mode, layout.chunk_tokens > 0, layout.offload


def estimate(work: Workload, layout: ParallelLayout, hardware: Hardware) -> Candidate:
    time = step_time(work, layout, hardware)
    tokens = work.tokens_per_step / time.seconds
    utilisation = mfu(work, layout, hardware, time.seconds)
    return Candidate(layout, device_bytes(work, layout), time, tokens, utilisation)


def meshes(work: Workload, cluster: Cluster) -> Iterator[Mesh]:
    """All meshes of exactly these devices that divide the model, plainest first."""
    model, world = work.model, cluster.devices
    plain = work.method != "full"  # frozen weights are divided by FSDP2 only
    for pipeline in _divisors(model.num_layers, 1 if plain else MAX_PIPELINE):
        for tensor in _divisors(model.num_kv_heads, 1 if plain else cluster.per_node):
            if cluster.per_node % tensor or not _divides(work, tensor):
                continue
            if tensor > 1 and work.optimizer != "adamw":
                continue  # the others work on the rows that FSDP2 divides
            for context in (1,) if plain else _contexts(work, tensor):
                inner = pipeline * tensor * context
                if world % inner:
                    continue
                data = world // inner
                if data > work.global_batch:
                    continue  # ranks without a sample
                for shard in _divisors(data, data):
                    yield Mesh(data // shard, shard, tensor, context, pipeline)


def _divides(work: Workload, tensor: int) -> bool:
    model = work.model
    sizes = (model.num_heads, model.ffn_dim, model.vocab_size, work.sequence_length)
    return all(size % tensor == 0 for size in sizes)


def _contexts(work: Workload, tensor: int) -> Iterator[int]:
    """Powers of two. A context axis has two pieces of a sequence on each rank, and a tensor axis
    divides each rank's share."""
    yield 1
    length, context = work.sequence_length, 2
    while length // context >= MIN_TOKENS_PER_RANK and length % (2 * context) == 0:
        if length % (context * tensor) == 0:
            yield context
        context *= 2


def min_batch(work: Workload, cluster: Cluster) -> int:
    """The fewest samples of a step with which these devices have a layout: one for each
    data-parallel rank, and as many micro-batches as a pipeline has stages."""
    unlimited = msgspec.structs.replace(work, global_batch=cluster.devices)
    return min(
        mesh.data_parallel_size * max(mesh.pipeline - 1, 1) + (mesh.pipeline > 1)
        for mesh in meshes(unlimited, cluster)
    )


def _divisors(number: int, most: int) -> Iterator[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor * divisor != number]
    return (divisor for divisor in (*small, *large) if divisor <= most)


def layouts(
    work: Workload, mesh: Mesh, per_node: int, host_bytes: int | None = None
) -> Iterator[ParallelLayout]:
    """Layouts of one mesh; the micro-batch is left at one sample."""
    share = -(-work.global_batch // mesh.data_parallel_size)
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1),)
    if mesh.pipeline > 1:
        if share < mesh.pipeline:
            return  # fewer micro-batches than stages
        if work.model.num_layers % (2 * mesh.pipeline) == 0 and share % mesh.pipeline == 0:
            schedules = (("1f1b", 1), ("interleaved1f1b", 2))
            if not work.compiled:  # compiled blocks compute all gradients at once
                schedules += (("zbvZeroBubble", 2),)
    sharded = mesh.num_fsdp_shards > 1
    may_offload = sharded and work.on_gpu and (work.optimizer, work.method) == ("adamw", "full")
    may_offload = may_offload and main_memory_holds(work, mesh, host_bytes)
    offloads = (False, True) if may_offload else (False,)
    # A tensor axis passes whole logits to the loss.
    chunks = (0, CHUNK_TOKENS) if mesh.tensor == 1 else (0,)
    reshards: tuple[bool, ...] = (True, False) if sharded and mesh.pipeline == 1 else (True,)
    for schedule, stages in schedules:
        for offload in offloads:
            for reshard in reshards:
                for checkpointing, chunk in itertools.product(CHECKPOINTING, chunks):
                    yield ParallelLayout(
                        mesh=mesh,
                        workers_per_node=per_node,
                        micro_batch=1,
                        num_micro_batches=share,
                        reshard=reshard,
                        checkpointing=checkpointing,
                        chunk_tokens=chunk,
                        offload=offload,
                        schedule=schedule,
                        stages_per_rank=stages,
                    )


def _largest_that_fits(
    work: Workload, layout: ParallelLayout, room: float
) -> list[ParallelLayout] | int:
    """The layout with the largest micro-batch that fits, in a pipeline also with half of it, which
    may be faster; or the bytes that one sample at a time needs."""
    states = model_state_bytes(work, layout)
    if not layout.offload and states > room:
        return states
    share = layout.num_micro_batches
    least = device_bytes(work, layout)
    if least > room:
        return least
    sizes = _sizes(layout)

    def at(size: int) -> ParallelLayout:
        return msgspec.structs.replace(
            layout, micro_batch=size, num_micro_batches=-(-share // size)
        )

    def needs(size: int) -> int:
        return device_bytes(work, at(size))

    number = bisect.bisect_right(sizes, room, lo=1, key=needs)
    first = number - 2 if layout.mesh.pipeline > 1 else number - 1
    return [at(size) for size in sizes[max(0, first) : number]]


def _sizes(layout: ParallelLayout) -> list[int]:
    """Sizes of a micro-batch: powers of two; a pipeline has one micro-batch for each rank."""
    most = max(1, layout.num_micro_batches // layout.mesh.pipeline)
    return [2**power for power in range(most.bit_length())]


def _too_big(work: Workload, layout: ParallelLayout, needs: int, cluster: Cluster) -> str:
    have = f"{cluster.memory_bytes / 2**30:.1f} GiB"
    states = model_state_bytes(work, layout)
    what = "its states alone need" if needs == states else "it needs at least"
    return f"{what} {needs / 2**30:.1f} of {have}"
