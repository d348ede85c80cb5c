"""Time of a step: compute, what of the communication it hides, and what stays exposed.

Compute of a block is the sum of its matrix products, attention, and passes over memory. FSDP's and
DDP's collectives run beside it, so a block takes the longer of the two. Collectives of the tensor
and the context axis are waited for. A pipeline adds its bubble.

The shares of the peaks in EFFICIENCY were fitted to TorchTitan's tables of Llama 3.1 on 8 to 512
H100 (bench/plan_published.py --fit), and those of a device in the catalogue to published runs on it
(bench/plan_devices.py --fit); a calibration replaces them by what was measured.
Sources: overlap: Miao et al. 2022 (Galvatron), section 3.3; latency and bandwidth of a message:
Hockney 1994; bubbles: Narayanan et al. 2021, section 2.2, and Qi et al. 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from ..catalogue.calibration import NOT_CALIBRATED, Calibration
from ..catalogue.types import Device, Link
from ..planner import adapters
from ..planner.activations import rank_tokens
from ..planner.memory import moment_bytes, rank_parameters
from ..planner.model import Architecture
from ..planner.workload import ParallelLayout, Workload
from ..protocol.mesh import Mesh
from .traffic import Collective, collectives


class Hardware(NamedTuple):
    """Devices and links of the ranks."""

    device: Device
    node_link: Link
    """Link between the devices of a node."""
    network: Link
    """Link of one device to the devices of other nodes."""
    calibration: Calibration | None = None
    efficiency: Efficiency | None = None
    """None: the GPUs' EFFICIENCY, with the device's shares."""

    @property
    def shares(self) -> Efficiency:
        if self.efficiency is not None:
            return self.efficiency
        device = self.device
        return EFFICIENCY._replace(
            matmul=device.matmul_share or EFFICIENCY.matmul,
            attention=device.attention_share or EFFICIENCY.attention,
        )

    @property
    def factors(self) -> Calibration:
        return self.calibration or NOT_CALIBRATED


class Efficiency(NamedTuple):
    """Shares of what a device sustains that are reached. The defaults were fitted to TorchTitan's
    28 rows."""

    matmul: float = 0.60
    float8: float = 0.52
    attention: float = 0.25
    """Flash attention 2, forward and backward together."""
    memory: float = 0.80
    overlap: float = 1.1
    """Factor on compute while a collective runs beside it (Galvatron: 1.1 to 1.3)."""


EFFICIENCY = Efficiency()
EAGER_PASSES = 3.1
"""Passes over memory of eager blocks / of compiled blocks, fitted as EFFICIENCY."""
RING_ATTENTION = 1.1
"""Time of attention in parts over a context axis / of attention in one piece, fitted as EFFICIENCY;
TorchTitan's rows with context 2, 4 and 8 are between 0.9 and 1.3."""
HOST_MEMORY_BANDWIDTH = 200e9
"""Bytes/s of a node's main memory, which offloaded optimizers of its workers share."""


class StepPart(NamedTuple):
    """A share of the step."""

    what: str
    seconds: float
    """Seconds of the step on the slowest rank."""
    exposed: bool
    """Communication or waiting that nothing hides; otherwise compute."""
    formula: Callable[[], str]
    source: str


class StepTime(NamedTuple):
    parts: tuple[StepPart, ...]
    hidden: float
    """Seconds of communication beside compute."""

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def exposed(self) -> float:
        return sum(part.seconds for part in self.parts if part.exposed)


def mfu(work: Workload, layout: ParallelLayout, hardware: Hardware, seconds: float) -> float:
    """Model FLOPs of a step / what the devices could have computed in the format of the
    parameters; products in float8 are counted against bfloat16 as well."""
    flops = adapters.step_flops_per_token(work) * work.tokens_per_step
    return flops / (seconds * layout.mesh.world_size * peak_flops(work, hardware.device))


def peak_flops(work: Workload, device: Device) -> float:
    # Devices without bfloat16 compute it with their float32 units.
    peak = device.flops.get(work.format) or device.flops.get("float32")
    return peak or min(device.flops.values())


class _Block(NamedTuple):
    """Seconds of one block on one rank for one micro-batch."""

    matmul: float
    attention: float
    passes: float
    again: float
    """Part that backward computes a second time."""
    products: float = 2.0
    """Products of backward for each of forward's; a frozen matrix has no gradient."""

    @property
    def forward(self) -> float:
        return self.matmul + self.attention + self.passes

    @property
    def backward(self) -> float:
        # Flash attention computes 5 products for its 2.
        return self.products * self.matmul + 2.5 * self.attention + 2 * self.passes + self.again


def step_time(work: Workload, layout: ParallelLayout, hardware: Hardware) -> StepTime:
    """The parts of a step on the slowest rank."""
    micro = layout.num_micro_batches
    blocks = work.model.num_layers // layout.mesh.pipeline
    block, head = _block(work, layout, hardware), _head(work, layout, hardware)
    sent = _seconds_by_axis(work, layout, hardware)
    hidden, exposed = _beside(work, layout, sent, block, blocks)
    waits = sum(t for name, t in sent.items() if name.startswith(("tensor", "context")))
    passed = sent.get("pipeline:send", 0.0)
    stepping = sum(t for name, t in sent.items() if name.startswith("optimizer"))
    of_micro_batch = blocks * (block.forward + block.backward) + head
    idle = _bubble(layout)
    bubble = idle * (of_micro_batch + (waits + passed) / micro)
    overlap = hardware.shares.overlap
    slower = (overlap - 1) * min(hidden, of_micro_batch * micro)
    optimizer = _optimizer(work, layout, hardware)
    parts = [
        *_compute(block, head, micro, blocks),
        StepPart(
            "optimizer", optimizer, False, lambda: f"{_state_traffic(work):.3g} bytes x P / S",
            "passes over the states",
        ),
        StepPart(
            "slowed by communication", slower, False,
            lambda: f"{overlap - 1:.0%} of {min(hidden, of_micro_batch * micro):.3g} s",
            "Galvatron, section 3.3",
        ),
        StepPart(
            "parameters and gradients", exposed, True,
            lambda: f"of {hidden + exposed:.3g} s what compute does not hide", _LINKS,
        ),
        StepPart("tensor and context axes", waits, True, lambda: "all of it is waited for", _LINKS),
        StepPart("between stages", passed, True, lambda: "activations and gradients", _LINKS),
        StepPart("exchanges of the optimizer", stepping, True, lambda: "waited for", _LINKS),
        StepPart(
            "pipeline bubble", bubble, True, lambda: f"{idle:.3g} micro-batches",
            "Narayanan et al. 2021, section 2.2; Qi et al. 2023",
        ),
    ]  # fmt: skip
    return StepTime(tuple(part for part in parts if part.seconds > 0), hidden)


_FITTED = "FLOPs and bytes over the device's peaks x EFFICIENCY"
_LINKS = "latency and bytes / bandwidth (Hockney 1994)"


def _compute(block: _Block, head: float, micro: int, blocks: int) -> Iterator[StepPart]:
    passes = micro * blocks

    def part(what: str, times: float, seconds: float) -> StepPart:
        return StepPart(
            what, times * seconds, False, lambda: f"{times:g} x {seconds:.3g} s", _FITTED
        )

    yield part("matrix products", (1 + block.products) * passes, block.matmul)
    yield part("attention", 3.5 * passes, block.attention)
    yield part("passes over memory", 3 * passes, block.passes)
    yield part("recomputation", passes, block.again)
    yield part("head and loss", micro, head)


def _seconds_by_axis(
    work: Workload, layout: ParallelLayout, hardware: Hardware
) -> dict[str, float]:
    """Seconds in a step of the collectives of one kind on one axis, as "shard:all-gather", or of
    the optimizer."""
    seconds: dict[str, float] = {}
    for row in collectives(work, layout):
        name = f"{'optimizer' if row.of_optimizer else row.axes[0]}:{row.kind}"
        seconds[name] = seconds.get(name, 0.0) + transfer(row, layout, hardware)
    if layout.offload:
        _over_the_bus(work, layout, hardware, seconds)
    return seconds


# -- compute ------------------------------------------------------------------------------------
def _block(work: Workload, layout: ParallelLayout, hardware: Hardware) -> _Block:
    model, tensor, tokens = work.model, layout.mesh.tensor, rank_tokens(work, layout)
    device, scale, shares = hardware.device, hardware.factors.block, hardware.shares
    peak = device.sustained * peak_flops(work, device)
    products = peak * shares.matmul
    if work.float8 and device.flops.get("float8"):
        products = device.sustained * device.flops["float8"] * shares.float8
    matmul = 2 * work.counts.matrices * tokens / tensor / products
    # Causal: half of the products of all queries with all keys.
    heads = model.num_heads * model.head_dim * (RING_ATTENTION if layout.mesh.context > 1 else 1)
    attention = 2 * heads * work.sequence_length * tokens / tensor / (peak * shares.attention)
    moved = passes_per_token(model) * work.width * tokens / tensor
    passes = moved / (device.memory_bandwidth * shares.memory)
    if not work.compiled:
        passes *= EAGER_PASSES
    backward = 2.0
    if work.method != "full":
        extra = adapters.trained(work) / (model.num_layers * work.counts.matrices)
        matmul, backward = matmul * (1 + extra), (1 + 2 * extra) / (1 + extra)
    if work.method == "qlora":
        # Out of 4 bits once in forward and once in backward, while other passes are 1 and 2.
        unpacked = (adapters.NF4_BYTES + work.width) * work.counts.matrices
        passes += 2 / 3 * unpacked / (device.memory_bandwidth * shares.memory)
    again = _again(layout, matmul, attention, passes)
    return _Block(scale * matmul, scale * attention, scale * passes, scale * again, backward)


def _again(layout: ParallelLayout, matmul: float, attention: float, passes: float) -> float:
    settings = layout.checkpointing
    if settings.budget is not None:
        return (1 - settings.budget) * (matmul + attention + passes)
    if settings.blocks is None:
        return 0.0
    seconds = passes + (0 if "matmul" in settings.keep else matmul)
    seconds += 0 if "attention" in settings.keep else attention
    return seconds / settings.blocks.every_nth_block


def passes_per_token(model: Architecture) -> float:
    """Elements that a block reads and writes beside its matrix products, if it is compiled: two
    norms with the residual sums (8 D), rotation (2 D + 2 K) and the activation (3 F)."""
    keys = model.num_kv_heads * model.head_dim
    return 10 * model.dim + 2 * keys + (2 + model.gated_ffn) * model.ffn_dim


def _head(work: Workload, layout: ParallelLayout, hardware: Hardware) -> float:
    """Seconds of the head and the loss for one micro-batch: three products, or with chunks four,
    and about 30 bytes read and written for each logit."""
    tokens, device = rank_tokens(work, layout), hardware.device
    share = tokens * work.model.vocab_size / layout.mesh.tensor
    each = (8 if layout.chunk_tokens else 6) - 2 * (work.method != "full")
    products = each * work.model.dim * share
    peak = device.sustained * peak_flops(work, device)
    seconds = products / (peak * hardware.shares.matmul)
    seconds += 30 * share / (device.memory_bandwidth * hardware.shares.memory)
    return hardware.factors.head * seconds


def _state_traffic(work: Workload) -> float:
    """Bytes per parameter that a step of the optimizer reads and writes."""
    return 12 * adapters.trained(work) / work.counts.total + 2 * moment_bytes(work)


def _optimizer(work: Workload, layout: ParallelLayout, hardware: Hardware) -> float:
    parameters = rank_parameters(work.counts, layout)
    if layout.offload:
        moved = _state_traffic(work) * parameters
        return moved * layout.workers_per_node / HOST_MEMORY_BANDWIDTH
    return update_seconds(work, parameters, hardware)


def update_seconds(work: Workload, parameters: float, hardware: Hardware) -> float:
    """Seconds in which the optimizer steps so many parameters of a rank, on its device."""
    bandwidth = hardware.device.memory_bandwidth * hardware.shares.memory
    return hardware.factors.optimizer * _state_traffic(work) * parameters / bandwidth


def parts_alone(work: Workload, layout: ParallelLayout, hardware: Hardware) -> tuple[float, float]:
    """(seconds of forward and backward of a block, of the head and the loss) for one micro-batch,
    with no other rank: what a calibration measures."""
    alone = msgspec.structs.replace(layout, mesh=Mesh())
    block = _block(work, alone, hardware)
    return block.forward + block.backward, _head(work, alone, hardware)


# -- communication ------------------------------------------------------------------------------
def transfer(row: Collective, layout: ParallelLayout, hardware: Hardware) -> float:
    """Seconds of all calls of a collective in a step, if nothing else used its links.

    A ring enters and leaves each node once, and NCCL makes as many rings as the node has devices
    with a network port in the group; so K members on a node share K ports.
    """
    stride, size = span(row, layout)
    together = max(1, min(row.ranks, layout.workers_per_node // stride))
    if size < layout.workers_per_node:  # where it does not divide a node, some groups are on two
        together = max(1, math.gcd(size, layout.workers_per_node) // stride)
    nodes = -(-row.ranks // together)
    local, network = hardware.node_link, hardware.network
    bandwidth, hops = local.bandwidth, (row.ranks - nodes) * local.latency
    if nodes > 1:
        ports = together * network.bandwidth
        if network.shared:  # all groups of the node go through one port
            ports = network.bandwidth * together / layout.workers_per_node
        bandwidth = min(local.bandwidth, ports) if together > 1 else ports
        hops += (nodes - 1) * network.latency
    if row.kind == "send":
        hops = network.latency if nodes > 1 else local.latency
    if row.kind == "all-reduce":
        hops *= 2
    return row.num_bytes / bandwidth + row.calls * hops


def _over_the_bus(
    work: Workload, layout: ParallelLayout, hardware: Hardware, seconds: dict[str, float]
) -> None:
    """Offloaded float32 shards are copied to the device before each gather, and gradients back."""
    copied = 4 * rank_parameters(work.counts, layout) / hardware.device.host_bandwidth
    micro = 1 if layout.mesh.pipeline > 1 else layout.num_micro_batches
    gathers = micro * (1 if layout.reshard is False or layout.mesh.pipeline > 1 else 2)
    gather, reduce = "shard:all-gather", "shard:reduce-scatter"
    seconds[gather] = seconds.get(gather, 0.0) + gathers * copied
    seconds[reduce] = seconds.get(reduce, 0.0) + micro * copied


def span(row: Collective, layout: ParallelLayout) -> tuple[int, int]:
    """(ranks between two neighbours of the group, ranks from its first to its last)."""
    mesh = layout.mesh
    inner = {"tensor": 1, "context": mesh.tensor, "shard": mesh.tensor * mesh.context}
    if row.axes == ("shard", "context"):
        stride = mesh.tensor
    elif row.axes[0] in inner:
        stride = inner[row.axes[0]]
    else:
        stride = mesh.tensor * mesh.context * mesh.shard
        stride *= mesh.replicate if row.axes[0] == "pipeline" else 1
    return stride, stride * row.ranks


def crosses_nodes(row: Collective, layout: ParallelLayout) -> bool:
    """True if any group of the collective crosses nodes."""
    _stride, size = span(row, layout)
    return layout.workers_per_node % size != 0


def _beside(
    work: Workload, layout: ParallelLayout, seconds: dict[str, float], block: _Block, blocks: int
) -> tuple[float, float]:
    """(hidden, exposed) seconds of the collectives of parameters and gradients in a step."""
    gather = seconds.get("shard:all-gather", 0.0)
    reduce = seconds.get("shard:reduce-scatter", 0.0) + seconds.get("replicate:all-reduce", 0.0)
    if not gather + reduce:
        return 0.0, 0.0
    micro, groups = layout.num_micro_batches, blocks + 2
    passes = 1 if layout.mesh.pipeline > 1 else micro
    forward, backward = passes * blocks * block.forward, passes * blocks * block.backward
    ahead = gather if layout.reshard is False else gather / 2
    behind = gather - ahead + reduce
    exposed = max(0.0, ahead - forward) + max(0.0, behind - backward)
    # The first block waits for its parameters, and the step for the last gradients.
    edges = (ahead + reduce) / groups / max(1, passes)
    exposed = min(gather + reduce, exposed + edges)
    return gather + reduce - exposed, exposed


def _bubble(layout: ParallelLayout) -> float:
    """Micro-batches for which a rank of the pipeline idles."""
    p, v = layout.mesh.pipeline, layout.stages_per_rank
    idle = (p - 1) / v
    return {"interleavedZeroBubble": idle / 3, "zbvZeroBubble": 0.0}.get(layout.schedule, idle)
