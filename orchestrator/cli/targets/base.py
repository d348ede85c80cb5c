"""What the commands need from a target (where jobs live) and from one job there.

Every method raises HoldfastError, and UserError for what a target cannot do at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Container
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.runtime.observe.view import JobView

from ..display import Display
from ..output import date


class Response(NamedTuple):
    """The answer to a request."""

    detail: str
    """One sentence: what will happen."""
    body: dict[str, Any]


class LogSelector(NamedTuple):
    """Which logs of a job to print."""

    rank: int | None = None
    generation: int | None = None
    node: str | None = None
    """The agent of this node instead of workers."""


class RunResult(NamedTuple):
    """How `holdfast run` ended."""

    view: JobView | None
    """None: the job goes on without this process, so there is nothing to report."""
    exit_code: int


_NOTHING_TO = {"chaos": "break", "checkpoint": "save", "stacks": "look at",
               "again": "restart"}  # fmt: skip
"""Verb of a request -> what cannot be done to a job that has ended, where the words differ."""


def expect_not_ended(view: JobView, verb: str) -> None:
    """Raises UserError for a request to a job that has ended."""
    if view.state in TERMINAL:
        has = "was" if view.state == "cancelled" else "has"
        at = f" ({date(view.finished_ns)})" if view.finished_ns else ""
        what = _NOTHING_TO.get(verb, verb)
        raise UserError(f"job {view.name}: {has} {view.state}{at}; nothing to {what}")


def exit_code(view: JobView) -> int:
    """Exit code of a command that shows a job until its end."""
    return 0 if view.state == "succeeded" else 1


def first_free(wanted: str, used: Container[str]) -> str:
    """`wanted`, or the first of `wanted-2`, `wanted-3` ... that is not in use."""
    numbered = (f"{wanted}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([wanted], numbered) if name not in used)


class TargetJob(Protocol):
    """One existing job."""

    @property
    def name(self) -> str: ...

    def view(self) -> JobView: ...

    def remarks(self, view: JobView) -> list[str]:
        """Warnings for a reader of the view, for example that no controller updates it."""
        ...

    def request(self, verb: str, **arguments: Any) -> Response:
        """resize, suspend, resume, cancel, chaos, checkpoint, stacks or profile; see
        runtime/control_api.py."""
        ...

    def again(self, directory: Path | None) -> Response:
        """Request a new generation with newly edited code. `directory`: where that is, as the user
        has named it."""
        ...

    def print_events(self, *, follow: bool, as_json: bool) -> None: ...

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None: ...

    def storage(self) -> AbstractContextManager[str]:
        """The directory or URL of its checkpoints, readable by this process inside the context."""
        ...

    def manifests(self) -> tuple[str, list[Manifest]] | None:
        """Where its committed checkpoints are, and their manifests, oldest first. None: this
        process cannot read them; the view has what is known."""
        ...

    def describe_deletion(self, keep: Path | None) -> str:
        """What `delete` would delete, for a confirmation. Raises UserError if it must not."""
        ...

    def delete(self, keep: Path | None) -> list[str]:
        """Delete the job's record. Returns remarks to print."""
        ...


@runtime_checkable
class RunsEnded(Protocol):
    """A target that can run a job again that has ended."""

    def run_ended(self, name: str, display: Display) -> RunResult:
        """With its code as it is now, from its newest checkpoint, and show it until it ends."""
        ...


@runtime_checkable
class Uploads(Protocol):
    """A target to which `run` uploads the directory of the spec."""

    uploads_code: bool


class Target(Protocol):
    """Where jobs live: this machine, a Kubernetes cluster or a Ray cluster."""

    def find(self, name: str) -> TargetJob:
        """Raises UserError that lists the existing jobs."""
        ...

    def views(self) -> list[JobView]:
        """The views of all jobs, sorted by name. Jobs that cannot be read are reported on
        stderr."""
        ...

    def empty_message(self) -> str:
        """What `status` prints when there are no jobs."""
        ...

    def command(self, *words: str) -> str:
        """A command line for a job of this target, as the user would type it."""
        ...

    def can_read(self, path: str) -> bool:
        """Whether the checkpoint commands can read this checkpoint path from here."""
        ...

    def guard(self) -> AbstractContextManager[None]:
        """Wraps a command: turns the loss of the target into an error message."""
        ...

    def free_name(self, wanted: str) -> str:
        """A name for the job of a run without a spec."""
        ...

    def run(
        self,
        file: Path | None,
        attach: str | None,
        display: Display,
        directory: Path | None = None,
    ) -> RunResult:
        """Start the job in `file`, or attach to an existing one, and show it until it ends.
        `directory`: of the spec; None: that of `file`."""
        ...
