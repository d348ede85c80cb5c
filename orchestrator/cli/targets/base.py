"""What the commands ask of the place where jobs live, and of one job there.

Owns: that interface, small enough for a third place. Must not: know any of them. Whatever cannot be
done is a HoldfastError with a sentence; what a place cannot offer at all is a UserError.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.runtime.observe.view import JobView

from ..display import Display


class Response(NamedTuple):
    """To a request: what will happen, in words and as facts."""

    detail: str
    body: dict[str, Any]


class LogSelector(NamedTuple):
    """Which lines of a job's logs."""

    rank: int | None = None
    generation: int | None = None
    node: str | None = None
    """The agent of this node instead of workers."""


class RunResult(NamedTuple):
    """How `holdfast run` came back."""

    view: JobView | None
    """None: the job goes on somewhere else, there is nothing to report."""
    exit_code: int


class TargetJob(Protocol):
    """One job that exists."""

    @property
    def name(self) -> str: ...

    def view(self) -> JobView:
        """All that is known of it now."""
        ...

    def remarks(self, view: JobView) -> list[str]:
        """What a reader of the view must be told, such as that nobody keeps it current."""
        ...

    def request(self, verb: str, **arguments: Any) -> Response:
        """resize, suspend, resume, cancel, chaos or checkpoint, see runtime/control_api.py."""
        ...

    def print_events(self, *, follow: bool, as_json: bool) -> None: ...

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None: ...

    def storage(self) -> AbstractContextManager[str]:
        """Directory or URL that holds its checkpoints, to be read by this process meanwhile."""
        ...

    def manifests(self) -> tuple[str, list[Manifest]] | None:
        """Where its committed checkpoints are, and what they are, oldest first. None: they are not
        read from here, and what the view knows of them is all."""
        ...

    def deleting(self, keep: Path | None) -> str:
        """What would go, to ask about it. Raises UserError where it must not."""
        ...

    def delete(self, keep: Path | None) -> list[str]:
        """Forget the job. What is to be said afterwards."""
        ...


class Target(Protocol):
    """Somewhere that jobs live."""

    def find(self, name: str) -> TargetJob:
        """Raises UserError, naming the jobs that there are."""
        ...

    def views(self) -> list[JobView]:
        """Of all jobs, by name. One that cannot be read is told on stderr."""
        ...

    def nothing(self) -> str:
        """What is said where there are none."""
        ...

    def command(self, *words: str) -> str:
        """A command as the person would type it for a job here."""
        ...

    def reads(self, path: str) -> bool:
        """Whether the checkpoint commands can read a job's place for checkpoints."""
        ...

    def ending(self) -> AbstractContextManager[None]:
        """Around a command: how it ends when the place goes away meanwhile."""
        ...

    def run(self, file: Path | None, attach: str | None, display: Display) -> RunResult:
        """Start a job, or go on with one, and show it until it ends."""
        ...
