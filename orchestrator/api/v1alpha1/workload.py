"""The job's workload: nodes, resources, entrypoint, fabric."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from holdfast.orchestrator import limits

from ..launchers import Program
from . import command_line
from .base import Auto, Choice, Part, Quantity, Word
from .recipe import Recipe

LINE_PATTERN = r"^[^\r\n]*$"
# Anything that `python -m` can find, also a file with a dash in its name; nothing relative.
MODULE_PATTERN = r"^[^./\s]+(\.[^./\s]+)*$"
CHECKPOINT = "{checkpoint}"
"""Placeholder for the path in resumeArgs."""
BESIDE = {
    ("recipe", "args"): "got args beside a recipe; expected recipe.config instead",
    (
        "recipe",
        "resume_args",
    ): "got resumeArgs beside a recipe; expected none: it is restored",
    ("command", "args"): "got args beside a command; expected them in the command",
    ("recipe", "python"): "got python beside a recipe; expected it for scripts and modules only",
}
"""A kind of entrypoint and a field that it excludes -> the problem."""
_PLACEHOLDER = re.compile(r"(?<!\$)\{\w+\}")


class Nodes(Part):
    """Number of nodes. A node is one agent with its workers."""

    min: int = Field(default=1, ge=1, le=limits.MAX_NODES)
    """Nodes that the job needs to train; with fewer it waits."""
    max: int = Field(default=1, ge=1, le=limits.MAX_NODES)
    """Nodes that the job requests; after a loss it grows back to this size."""
    spares: int = Field(default=0, ge=0, le=limits.MAX_NODES)
    """Further nodes that wait without ranks; a spare replaces a lost node at once."""


class Resources(Part):
    """Resources of one worker (one process)."""

    cpu: Quantity | None = None
    """CPU cores, such as 2 or 500m, and threads of a worker. Default: the workers of a node share
    its cores."""
    memory: Quantity | None = None
    """Main memory in bytes, such as 4Gi. Default: no limit."""
    gpu: Auto | Annotated[int, Field(ge=0, le=limits.MAX_GPUS)] = "auto"
    """GPUs of a worker: 0 trains on the CPU with gloo; 1 on one GPU with NCCL; more, for scripts
    only, are all visible to the worker. auto, decided at submission: 1 where nodes have a GPU for
    each worker, 0 where they have none."""

    @property
    def num_gpus(self) -> int:
        """GPUs of a worker. 0 for `auto`, which only a spec has that was not submitted yet, or was
        journaled before `auto` existed: 0 was the default then."""
        return 0 if self.gpu == "auto" else self.gpu


class Entrypoint(Choice):
    """Program of each worker: exactly one of script, module, command and recipe."""

    choices = ("script", "module", "command", "recipe")

    script: str | None = Field(default=None, min_length=1)
    """Path of a Python file, relative to workingDirectory; runs as torchrun would run it."""
    module: str | None = Field(default=None, pattern=MODULE_PATTERN)
    """Full name of a Python module; runs as `python -m` would run it."""
    command: str | None = Field(default=None, min_length=1, max_length=limits.MAX_COMMAND_CHARS)
    """A command line without a shell. `torchrun`, `accelerate launch`, `deepspeed` and `uv run` are
    recognised; any other program runs once per rank, with torchrun's variables."""
    recipe: Recipe | None = None
    """A training loop that is part of Holdfast."""
    args: tuple[Word, ...] = ()
    """Arguments of the script or module. `kubectl apply` needs quotes around numbers."""
    resume_args: Annotated[tuple[Word, ...], Field(max_length=limits.MAX_RESUME_WORDS)] = ()
    """Arguments added in each start that finds a complete checkpoint of the script, such as
    `["--resume", "{checkpoint}"]`; `{checkpoint}` becomes its path."""
    python: str | None = Field(default=None, min_length=1)
    """Interpreter of the script or module, or the directory of its environment, relative to
    workingDirectory. Default: Holdfast's own Python, which starts faster in a recovery."""
    _program: Program = PrivateAttr(default=Program())

    @model_validator(mode="after")
    def _check_others(self) -> Entrypoint:
        for (kind, name), problem in BESIDE.items():
            if getattr(self, kind) and getattr(self, name):
                raise ValueError(problem)
        self._program = self._parsed()
        return self

    def _parsed(self) -> Program:
        if self.recipe is not None:
            return Program()
        if self.command is not None:
            program = command_line.read(self.command)
        else:
            words = [self.script or self.module or "", *self.args]
            program = command_line.started(words, is_module=self.module is not None)
        other = program.python or " ".join(program.runner[:2])
        if self.python and other:
            raise ValueError(
                f"python: got {self.python} beside {other} in the command; expected one of both"
            )
        return replace(program, python=self.python) if self.python else program

    @property
    def program(self) -> Program:
        """The program that each worker starts, parsed once; an empty one for a recipe."""
        return self._program

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that Holdfast's Python on a node needs for it beside every node's."""
        more = self.recipe.config.packages if self.recipe is not None else ()
        return () if self._program.is_foreign else ("torch", *more)

    @field_validator("resume_args")
    @classmethod
    def _check_placeholder(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            for name in _PLACEHOLDER.findall(word.replace(CHECKPOINT, "")):
                raise ValueError(f"got {name}; expected {CHECKPOINT}, or no word in braces")
        return words

    @property
    def script_field(self) -> str:
        """The field that names the script."""
        return "spec.entrypoint.script" if self.command is None else "spec.entrypoint.command"


class Fabric(Part):
    """The network between nodes, and NCCL's settings for it."""

    profile: Literal["auto", "tcp", "roce", "ib", "efa", "nvlink-only"] = "auto"
    """Network settings of the workers. auto: by the devices of the node; `holdfast spec plan` shows
    choice and reason."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces for sockets, such as eth0. Default: the one with the node's address."""
    hcas: tuple[str, ...] = ()
    """RDMA devices, such as mlx5_0. Default: chosen by the profile."""
