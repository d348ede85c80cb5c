"""What a job runs and on what: nodes, resources, entrypoint, parallelism, fabric."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from holdfast.orchestrator import limits

from .base import Auto, AutoOrCount, Count, Part, Quantity
from .recipe import Recipe

DType = Literal["auto", "float32", "bfloat16", "float16"]
Axis = Annotated[int, Field(ge=1, le=limits.MAX_NODES)]

# Anything that `python -m` can find, also a file with a dash in its name; nothing relative.
MODULE_PATTERN = r"^[^./\s]+(\.[^./\s]+)*$"


class Nodes(Part):
    """Number of nodes. A node is one agent with all its workers."""

    min: int = Field(default=1, ge=1, le=limits.MAX_NODES)
    """Smallest number of nodes to train with; with fewer the job waits."""
    max: int = Field(default=1, ge=1, le=limits.MAX_NODES)
    """Number of nodes that the job requests; after a loss it grows back to this size."""
    spares: int = Field(default=0, ge=0, le=limits.MAX_NODES)
    """Further nodes that are kept ready without ranks; a spare replaces a lost node at once."""


class Resources(Part):
    """Resources of one worker (one process)."""

    cpu: Quantity | None = None
    """CPU cores, such as 2 or 500m; also sets the number of threads of a worker. Default: the
    workers of a node share its cores."""
    memory: Quantity | None = None
    """Main memory in bytes, such as 4Gi. Default: no limit."""
    gpu: Auto | Annotated[int, Field(ge=0, le=limits.MAX_GPUS)] = "auto"
    """GPUs of a worker: 0 trains on the CPU with gloo, 1 on one GPU with NCCL. auto: 1 where nodes
    have a GPU for each worker, 0 where they have none; decided once, at submission, and shown by
    `holdfast plan` and `holdfast status`. With more than 1, for scripts and modules only, a worker
    sees that many devices, cuda:0 and following; `restore` of holdfast.session takes models on
    cuda:0."""

    @property
    def num_gpus(self) -> int:
        """Of a worker. 0 for `auto`, which only a spec has that was not submitted yet, or was
        journaled before `auto` existed: 0 was the default then."""
        return 0 if self.gpu == "auto" else self.gpu


class Entrypoint(Part):
    """What each worker runs: exactly one of script, module and recipe."""

    script: str | None = Field(default=None, min_length=1)
    """Path of a Python file, relative to workingDirectory; runs as torchrun would run it."""
    module: str | None = Field(default=None, pattern=MODULE_PATTERN)
    """Full name of a Python module; runs as `python -m` would run it."""
    recipe: Recipe | None = None
    """A training loop that is part of Holdfast."""
    args: tuple[str, ...] = ()
    """Command line arguments of the script or module."""

    @model_validator(mode="after")
    def _check_one_kind(self) -> Entrypoint:
        given = [n for n in ("script", "module", "recipe") if getattr(self, n) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"got {found}; expected exactly one of script, module, recipe")
        if self.recipe and self.args:
            raise ValueError("got args beside a recipe; expected recipe.config instead")
        return self


class Precision(Part):
    """Number formats of training."""

    parameters: DType = "auto"
    """Format of the parameters in forward and backward. auto: bfloat16 on GPUs, float32 on CPUs.
    The sharded master copy is always float32."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Format in which gradients are reduced; bfloat16 halves the traffic and risks loss spikes."""


class ActivationCheckpointing(Part):
    """Recomputing activations in the backward pass, which saves memory."""

    mode: Literal["none", "full"] = "none"
    """none: keep activations; full: recompute each block from its input, which costs about one more
    forward pass."""
    every_nth_block: int = Field(default=1, ge=1, le=limits.MAX_COUNT)
    """With mode full: recompute every Nth block only."""


class Parallelism(Part):
    """Sizes of the device mesh's axes. Their product is the world size.

    shard = 1 is DDP; shard > 1 is FSDP2; shard > 1 with more than one replica is HSDP. replicate is
    the elastic axis: it follows the number of nodes, and shrinks and grows in whole replica groups.
    With shard: world the shard axis does so instead.
    """

    replicate: AutoOrCount = "auto"
    """Replicas of the model with nodes.max nodes. auto: as many as the workers allow."""
    shard: Auto | Literal["world"] | Count = "auto"
    """Ranks that share one replica of the model. auto: the planner chooses by memory; for a loop
    of your own that shards its model over all ranks, as world. world: all ranks, however many
    nodes there are."""
    tensor: Axis = 1
    """Size of the tensor parallel axis, the innermost. The recipe divides heads, the width of the
    feed-forward part, vocabulary and sequence over it, within a node; your own loop uses it through
    the mesh."""
    context: Axis = 1
    """Size of the context parallel axis; your own loop uses it through the mesh."""
    pipeline: Axis = 1
    """Size of the pipeline axis, the outermost; your own loop uses it through the mesh."""
    reshard_after_forward: bool | Annotated[int, Field(le=limits.MAX_COUNT)] = True
    """true: free the gathered parameters after forward (ZeRO-3); false: keep them until backward
    (ZeRO-2); an integer: reshard to groups of that many ranks."""
    precision: Precision = Precision()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    offload: Literal["none", "cpu"] = "none"
    """cpu: keep shards, gradients and optimizer state in main memory."""


class Fabric(Part):
    """The network between nodes, and NCCL's settings for it."""

    profile: Literal["auto", "tcp", "roce", "ib", "efa", "nvlink-only"] = "auto"
    """Which network settings the workers get. auto: chosen from the devices of the node;
    `holdfast plan` shows the choice and its reason."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces for sockets, such as eth0. Empty: chosen by the profile."""
    hcas: tuple[str, ...] = ()
    """RDMA devices, such as mlx5_0. Empty: chosen by the profile."""
