"""What a job runs and on what: nodes, resources, entrypoint, fabric."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from holdfast.orchestrator import limits

from .base import Auto, Part, Quantity
from .recipe import Recipe

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


class Fabric(Part):
    """The network between nodes, and NCCL's settings for it."""

    profile: Literal["auto", "tcp", "roce", "ib", "efa", "nvlink-only"] = "auto"
    """Which network settings the workers get. auto: chosen from the devices of the node;
    `holdfast plan` shows the choice and its reason."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces for sockets, such as eth0. Empty: chosen by the profile."""
    hcas: tuple[str, ...] = ()
    """RDMA devices, such as mlx5_0. Empty: chosen by the profile."""
