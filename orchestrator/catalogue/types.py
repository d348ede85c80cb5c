"""Devices and links, as the planner computes with them."""

from __future__ import annotations

import msgspec


class Price(msgspec.Struct, frozen=True):
    """Rent of one device."""

    per_hour: float
    """US dollars."""
    date: str
    """The day on which the price was read, as 2026-11-25."""
    source: str


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of accelerator."""

    name: str
    """Name such as H100-80."""
    aliases: tuple[str, ...] = ()
    """Other names that people write, and names that drivers report."""
    memory_bytes: int
    """Bytes as torch reports them for a device of this kind, which is a little less than the name
    says."""
    flops: dict[str, float]
    """Peak FLOP/s of dense matrix products by format: float32, bfloat16, float16, float8."""
    sustained: float = 1.0
    """Share of the peaks that its power limit leaves for long computations, fitted; MFU counts
    against the whole peak."""
    matmul_share: float | None = None
    """Share of `sustained` peaks that matrix products reach, fitted to published runs; None: the
    planner's."""
    attention_share: float | None = None
    """Same for flash attention, forward and backward together."""
    memory_bandwidth: float
    """Bytes/s of the device's memory."""
    link: str
    """Name of the link between the devices of one node."""
    per_node: int = 8
    """Devices of a usual node."""
    host_bandwidth: float
    """Bytes/s between the device and main memory, in one direction."""
    price: Price | None = None
    source: str = ""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Connection of devices: a message takes latency + bytes / bandwidth."""

    name: str
    """Name such as nvlink4 or infiniband-400."""
    aliases: tuple[str, ...] = ()
    bandwidth: float
    """Bytes/s that one device sends in one direction in a collective, as measured, not the sum of
    both directions that data sheets state. Of a network: through one adapter. A group with n
    devices on each node uses n adapters, so its collectives move n x bandwidth between nodes, until
    the link inside the node is the limit (nccl-tests reports both as bus bandwidth)."""
    latency: float
    """Seconds of one step of a ring."""
    shared: bool = False
    """The devices of a node share one adapter: collectives between nodes move bandwidth in all."""
    source: str = ""
