"""Devices, links and architectures, as the planner computes with them."""

from __future__ import annotations

import msgspec


class Price(msgspec.Struct, frozen=True):
    """What one device costs to rent."""

    per_hour: float
    """US dollars."""
    date: str
    """The day on which the price was read, as 2026-11-25."""
    source: str


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of accelerator."""

    name: str
    """Such as H100-80."""
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
    """What connects devices: time of a message is latency + bytes / bandwidth."""

    name: str
    """Such as nvlink4 or infiniband-400."""
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


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names, such as the repository's on the Hugging Face hub."""
    vocab_size: int
    dim: int
    """Width of the residual stream."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a head; num_heads x head_dim need not be dim."""
    ffn_dim: int
    gated_ffn: bool = True
    """Three matrices in the feed-forward part (SwiGLU), otherwise two (GELU)."""
    qk_norm: bool = False
    """A norm over each head's query and key."""
    qkv_bias: bool = False
    biases: bool = False
    """Biases of all other linear layers of a block."""
    layer_norm: bool = False
    """Norms with a bias (LayerNorm), otherwise RMSNorm."""
    tied_embeddings: bool = False
    """The head's matrix is the embedding's."""
    learned_positions: int = 0
    """Rows of a learned position embedding; 0: rotary or none."""
    max_sequence_length: int = 0
    """Longest sequence that the model was made for; 0: not known."""
    source: str = ""
