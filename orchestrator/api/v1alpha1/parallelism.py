"""spec.parallelism: the mesh, and how the recipe keeps and computes a model on it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from holdfast.orchestrator import limits

from .base import Auto, AutoOrCount, Choice, Count, Part

DType = Literal["auto", "float32", "bfloat16", "float16"]
Axis = Annotated[int, Field(ge=1, le=limits.MAX_NODES)]


ONE_STAGE_PER_RANK = ("gpipe", "1f1b")
ZERO_BUBBLE = ("interleavedZeroBubble", "zbvZeroBubble")
"""Schedules that compute the gradients of weights apart from activations' gradients."""


class Precision(Part):
    """Number formats of training."""

    parameters: DType = "auto"
    """Format of the parameters in forward and backward; the sharded master copy is float32. auto:
    bfloat16 on GPUs, float32 on CPUs."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Format in which gradients are reduced; bfloat16 halves the traffic and risks loss spikes."""
    linear: Literal["auto", "float8"] = "auto"
    """Format of the matrix products of the blocks, without attention. auto: as the parameters;
    float8: by torchao, on GPUs of compute capability 8.9 or above."""


Kept = Literal["matmul", "attention"]


class Recomputation(Part):
    """Recomputing whole blocks."""

    every_nth_block: int = Field(default=1, ge=1, le=limits.MAX_COUNT)
    """Recompute every Nth block only."""


class SelectiveRecomputation(Recomputation):
    """Recomputing blocks except the results of some operations."""

    keep: Annotated[tuple[Kept, ...], Field(min_length=1, max_length=2)] = ("matmul", "attention")
    """The operations whose results are kept."""


class ActivationCheckpointing(Choice):
    """Recomputing activations in the backward pass, which saves memory. With none of these fields
    all activations are kept."""

    choices = ("full", "selective", "budget")
    default_choice = "none"

    full: Recomputation | None = None
    """Recompute each block from its input, which costs about one more forward pass."""
    selective: SelectiveRecomputation | None = None
    """Recompute each block except the results of some operations."""
    budget: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    """Share of the activation memory of a compiled block that may be used; torch.compile chooses
    what it recomputes."""

    @property
    def blocks(self) -> Recomputation | None:
        """Recomputation of blocks."""
        return self.full or self.selective

    @property
    def keep(self) -> tuple[Kept, ...]:
        """Operations of a recomputed block whose results are kept."""
        return self.selective.keep if self.selective else ()


class Ddp(Part):
    """DistributedDataParallel: shard is 1."""

    bucket_mib: int = Field(default=25, ge=1, le=limits.MAX_COUNT)
    """MiB of gradients that one all-reduce sends."""
    static_graph: bool = False
    """true: DDP reorders its buckets after the first step;
    a recovered job then equals an undisturbed one up to rounding, not to the bit."""
    gradient_as_bucket_view: bool = True
    """true: gradients are views of the buckets, which saves their size in memory."""


class Fsdp(Part):
    """FSDP2 without a pipeline."""

    reshard_after_forward: bool | Annotated[int, Field(le=limits.MAX_COUNT)] = True
    """true: free the gathered parameters after forward (ZeRO-3); false: keep them until backward
    (ZeRO-2); an integer: reshard to groups of that many ranks."""
    accumulate_gradients: Literal["sharded", "whole"] = "sharded"
    """Gradients of several micro-batches. sharded: reduce after each; whole: reduce once,
    after the last. whole with reshardAfterForward: false is ZeRO-1."""
    prefetch_blocks: int = Field(default=0, ge=0, le=limits.MAX_COUNT)
    """Blocks ahead for which FSDP2 gathers parameters; 0: torch decides (one in backward)."""


class PipelineAxis(Part):
    """The outermost axis, over which the recipe divides the layers. It may span nodes."""

    ranks: Annotated[int, Field(ge=2, le=limits.MAX_NODES)]
    """Size of the axis."""
    schedule: Literal[
        "gpipe", "1f1b", "interleaved1f1b", "interleavedZeroBubble", "zbvZeroBubble"
    ] = "1f1b"
    """Order of the micro-batches. gpipe keeps the activations of all, 1f1b of as many as there are
    stages; the others have several stages on each rank, which idles less."""
    stages_per_rank: Auto | Count = "auto"
    """Parts of the layers on one rank. auto: 1 with gpipe and 1f1b, else 2."""


class Parallelism(Choice):
    """Sizes of the device mesh's axes. Their product is the world size.

    shard = 1 is DDP, without a tensor or context axis; shard > 1 is FSDP2; shard > 1 with more than
    one replica is HSDP. replicate is the elastic axis: it follows the number of nodes
    in whole replica groups. With shard: world the shard axis does so instead.
    """

    choices = ("ddp", "fsdp", "pipeline")
    default_choice = "none"

    replicate: AutoOrCount = "auto"
    """Replicas of the model with nodes.max nodes. auto: as many as the workers allow."""
    shard: Auto | Literal["world"] | Count = "auto"
    """Ranks that share one replica of the model. auto: chosen by memory, 1 with ddp; world: all
    ranks, at any number of nodes."""
    tensor: Axis = 1
    """Size of the tensor parallel axis, the innermost; the recipe divides heads, feed-forward
    width, vocabulary and sequence over it."""
    tensor_over_nodes: bool = False
    """true: the tensor axis may span nodes, for links that are as fast between nodes as within one.
    """
    context: Axis = 1
    """Size of the context parallel axis, over which the recipe divides every sequence (ring
    attention) and the parameters. It may span nodes."""
    ddp: Ddp | None = None
    fsdp: Fsdp | None = None
    pipeline: PipelineAxis | None = None
    precision: Precision = Precision()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    offload: Literal["none", "cpu"] = "none"
    """cpu: keep shards, gradients and optimizer state in main memory."""

    @model_validator(mode="before")
    @classmethod
    def _ddp_has_one_shard(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("ddp") is not None:
            return {**value, "shard": 1} if value.get("shard", "auto") == "auto" else value
        return value

    @model_validator(mode="after")
    def _check_shard(self) -> Parallelism:
        if self.ddp is not None and self.shard != 1:
            raise ValueError(f"shard: got {self.shard} with ddp; expected 1; remove one of the two")
        return self

    @property
    def ddp_settings(self) -> Ddp:
        return self.ddp or Ddp()

    @property
    def fsdp_settings(self) -> Fsdp:
        return self.fsdp or Fsdp()

    @property
    def pipeline_ranks(self) -> int:
        return self.pipeline.ranks if self.pipeline else 1

    @property
    def pipeline_schedule(self) -> str:
        return self.pipeline.schedule if self.pipeline else "1f1b"

    @property
    def stages_per_rank(self) -> int:
        if self.pipeline and self.pipeline.stages_per_rank != "auto":
            return self.pipeline.stages_per_rank
        return 1 if self.pipeline_schedule in ONE_STAGE_PER_RANK else 2

    @property
    def num_stages(self) -> int:
        """Parts of the layers over all ranks of a pipeline."""
        return self.pipeline_ranks * self.stages_per_rank

    @property
    def inner(self) -> int:
        """Ranks of one part of the data: tensor x context x pipeline."""
        return self.tensor * self.context * self.pipeline_ranks
