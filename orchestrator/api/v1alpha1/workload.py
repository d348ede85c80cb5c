"""What runs and on what: nodes, resources, entrypoint, parallelism, fabric.

Owns: these fields, their defaults and the checks that need one field only. Checks across fields
live in job.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from holdfast.orchestrator import limits

from .base import Auto, Part
from .quantity import Quantity
from .recipe import Recipe

DType = Literal["auto", "float32", "bfloat16", "float16"]
Axis = Annotated[int, Field(ge=1, le=limits.MAX_AXIS)]

# Whatever `python -m` may find, a file with a dash in its name as well; nothing relative.
MODULE_PATTERN = r"^[^./\s]+(\.[^./\s]+)*$"


class Nodes(Part):
    """How many nodes the job trains on. A node is one agent with all its workers."""

    min: int = Field(default=1, ge=1, le=limits.MAX_NODES)
    """Fewer than this and the job waits instead of training."""
    max: int = Field(default=1, ge=1, le=limits.MAX_NODES)
    """The size the job wants and grows back to."""
    spares: int = Field(default=0, ge=0, le=limits.MAX_NODES)
    """Nodes kept warm and idle; one takes the place of a lost node at once."""


class Resources(Part):
    """What one worker (one process) gets."""

    cpu: Quantity | None = None
    """CPU cores, such as 2 or 500m. Sets the threads of a worker; without it cores are shared."""
    memory: Quantity | None = None
    """Main memory, such as 4Gi."""
    gpu: int = Field(default=0, ge=0, le=1)
    """GPUs of a worker: 0 trains on the CPU with gloo, 1 on a GPU with NCCL."""


class Entrypoint(Part):
    """What each worker runs. Exactly one of script, module and recipe."""

    script: str | None = Field(default=None, min_length=1)
    """A Python file, relative to workingDirectory, as torchrun would run it."""
    module: str | None = Field(default=None, pattern=MODULE_PATTERN)
    """A Python module, as `python -m` would run it."""
    recipe: Recipe | None = None
    """A training loop of Holdfast's own, by name."""
    args: tuple[str, ...] = ()
    """Command line arguments of the script or module."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Entrypoint:
        given = [n for n in ("script", "module", "recipe") if getattr(self, n) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"got {found}; expected exactly one of script, module, recipe")
        if self.recipe and self.args:
            raise ValueError("got args beside a recipe; expected recipe.config instead")
        return self


class Precision(Part):
    """Number formats. auto: bfloat16 parameters on GPUs, float32 on CPUs."""

    parameters: DType = "auto"
    """Format of parameters in forward and backward; the sharded master copy stays float32."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Format in which gradients are summed; bfloat16 risks loss spikes."""


class ActivationCheckpointing(Part):
    """Recompute activations in the backward pass to save memory."""

    mode: Literal["none", "full"] = "none"
    """full recomputes a block from its input: about one more forward pass."""
    every_nth_block: int = Field(default=1, ge=1, le=limits.MAX_LAYERS)
    """With full: only every Nth block."""


class Parallelism(Part):
    """Axes of the device mesh. Their product times replicate is the world size.

    shard = 1 is DDP; shard > 1 is FSDP2; shard > 1 with more than one replica is HSDP. replicate is
    the elastic axis: it follows the number of nodes, and shrinks and grows in whole replica groups.
    """

    replicate: int | Auto = Field(default="auto")
    """Full copies of the model at nodes.max. auto: as many as fit the world."""
    shard: int | Auto = Field(default="auto")
    """Ranks that share one copy of the model. auto: the planner picks by memory."""
    tensor: Axis = 1
    """Tensor parallel axis, innermost; handed to your own loop through the mesh."""
    context: Axis = 1
    """Context parallel axis, handed to your own loop through the mesh."""
    pipeline: Axis = 1
    """Pipeline axis, outermost; handed to your own loop through the mesh."""
    reshard_after_forward: bool | Annotated[int, Field(le=limits.MAX_COUNT)] = True
    """true: ZeRO-3. false: ZeRO-2, parameters stay gathered between forward and backward. An
    integer: reshard to that smaller group."""
    precision: Precision = Precision()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    offload: Literal["none", "cpu"] = "none"
    """cpu keeps shards, gradients and optimizer state in main memory."""

    @model_validator(mode="after")
    def _positive(self) -> Parallelism:
        for name in ("replicate", "shard"):
            value = getattr(self, name)
            if value != "auto" and value < 1:
                raise ValueError(f"{name}: got {value}; expected auto or a number >= 1")
        return self


class Fabric(Part):
    """The network between nodes, and what NCCL is told about it."""

    profile: Literal["auto", "tcp", "roce", "ib", "efa", "nvlink-only"] = "auto"
    """auto looks at what the node has; `holdfast plan` shows what was chosen and why."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces for sockets, such as eth0; empty: chosen by profile."""
    hcas: tuple[str, ...] = ()
    """RDMA devices, such as mlx5_0; empty: chosen by profile."""
