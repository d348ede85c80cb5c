"""Targets, where jobs live, as the commands use them.

Every method raises HoldfastError, and UserError for what a target cannot do at all.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.runtime.observe.view import JobView

from ..display import Display
from ..script_job import ScriptRun
from .remote_job import RemoteJob


class RunResult(NamedTuple):
    """Result of `holdfast run`."""

    view: JobView | None
    """None: the job continues without this process, so there is nothing to report."""
    exit_code: int


class Launch(NamedTuple):
    """A job to start."""

    file: Path
    """File with the job's spec."""
    directory: Path
    """The spec's, which is uploaded to a cluster."""
    script: ScriptRun | None = None
    """Script from which the spec was made; None: the user has written one."""
    runtime_env: Path | None = None
    """Ray's, in YAML."""
    show: Callable[[], None] = lambda: None
    """Prints the spec, once this machine's checks have accepted it."""


def exit_code(view: JobView) -> int:
    """Exit code of a command that shows a job until its end."""
    return 0 if view.state == "succeeded" else 1


def first_free(wanted: str, used: Container[str]) -> str:
    """`wanted`, or the first of `wanted-2`, `wanted-3` ... that is not in use."""
    numbered = (f"{wanted}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([wanted], numbered) if name not in used)


def name_taken(name: str, where: str, fix: str) -> UserError:
    """`where` the other job is; `fix`: what a user may do with that."""
    return UserError.of(
        "metadata.name", f"{name}, which exists in {where}", "a name that is free",
        f"{fix}, or choose another metadata.name",
    )  # fmt: skip


class Target(Protocol):
    """Place of jobs: this machine, a Kubernetes cluster or a Ray cluster."""

    takes_runtime_env: bool = False
    """True if the target submits Ray jobs, with `Launch.runtime_env`; `run` shows their output."""

    def find(self, name: str) -> RemoteJob:
        """Raises UserError that lists the existing jobs."""
        ...

    def views(self) -> list[JobView]:
        """The views of all jobs, sorted by name. Jobs that cannot be read are reported on
        stderr."""
        ...

    def empty_message(self) -> str:
        """Output of `status` when there are no jobs."""
        ...

    def command(self, *words: str) -> str:
        """A command line for a job of this target, as the user would type it."""
        ...

    def can_read(self, path: str) -> bool:
        """True if the checkpoint commands can read this checkpoint path, here or in the cluster."""
        return True

    def rejections(self) -> dict[str, str]:
        """Verb of a request that this user may not send -> the right that is missing."""
        return {}

    def guard(self) -> AbstractContextManager[None]:
        """Wraps a command: turns the loss of the target into an error message."""
        return nullcontext()

    def free_name(self, wanted: str) -> str:
        """A name for the job of a run without a spec; here without a look at the target."""
        return f"{wanted}-{secrets.token_hex(2)}"

    def run(self, launch: Launch, display: Display) -> RunResult:
        """Start a job, and show it until it ends."""
        ...

    def submit(self, launch: Launch, display: Display) -> dict[str, str]:
        """Start a job, and leave it to itself: {"job": its name}, and what else names it."""
        ...

    def attach(self, name: str, display: Display) -> RunResult:
        """Show an existing job until it ends."""
        ...


@runtime_checkable
class RunsEnded(Target, Protocol):
    """This machine: its nodes read the files where they are."""

    def run_ended(self, name: str, display: Display) -> RunResult:
        """Run a job that has ended again, from its newest checkpoint."""
        ...
