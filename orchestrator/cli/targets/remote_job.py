"""One job, as the commands see it: they ask its controller (ControlApi.perform) through a
transport, and read what is kept of it where none answers.

Every method raises HoldfastError, and UserError for what cannot be done at all.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.protocol.messages import Reply
from holdfast.orchestrator.runtime.observe.view import JobView

from ..output import date, stderr

if TYPE_CHECKING:
    from holdfast.orchestrator.api.v1alpha1 import TrainingJob

    from ..code_files import Code

BY = "HOLDFAST_BY"
"""Environment variable with the name of the user who typed a command that runs in a cluster."""
MAX_BY_CHARS = 64
"""The name is kept in the job's journal."""
_NOTHING_TO = {"chaos": "break", "checkpoint": "save", "stacks": "look at", "again": "restart"}
"""Verb of a request -> what cannot be done to a job that has ended, where the words differ."""


class ControllerGone(HoldfastError):
    """The controller of the job does not answer."""


class RequestRefused(HoldfastError):
    """The controller rejected the request; the text is its reason."""

    exit_code = 2


class LogSelector(NamedTuple):
    """Selection of a job's logs."""

    rank: int | None = None
    generation: int | None = None
    node: str | None = None
    """The agent of this node instead of workers."""


class Transport(Protocol):
    """The way to one job of a target."""

    @property
    def name(self) -> str: ...

    @property
    def job(self) -> TrainingJob:
        """The job as its record has it."""
        ...

    def perform(self, verb: str, arguments: dict[str, Any]) -> Reply:
        """The controller's reply. Raises ControllerGone."""
        ...

    def recorded(self) -> JobView:
        """The view that the job's record gives without a controller."""
        ...

    def has_ended(self) -> bool:
        """True if nothing of the job is left to control."""
        ...

    def remark(self, view: JobView) -> str:
        """Remark on a view that no controller updates; empty: one does."""
        ...

    def check_code(self) -> bool:
        """True if edited code must be uploaded. Raises UserError for code that cannot start."""
        ...

    def upload(self, code: Code) -> None: ...

    def delete_code_except(self, *names: str) -> None: ...

    def print_events(self, *, follow: bool, as_json: bool) -> None: ...

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None: ...

    def storage(self) -> AbstractContextManager[str]:
        """The directory or URL of its checkpoints, readable by this process inside the context."""
        ...

    def manifests(self) -> tuple[str, list[Manifest]] | None:
        """Path of the committed checkpoints, and their manifests, oldest first. None: this
        process cannot read them; the view has what is known."""
        ...

    def describe_deletion(self, keep: Path | None) -> str:
        """Sentence that asks for a confirmation of `delete`. Raises UserError if it must not."""
        ...

    def delete(self, keep: Path | None) -> list[str]:
        """Delete the job's record. Returns remarks to print."""
        ...

    def command(self, *words: str) -> str:
        """A command line for the job's target, as the user would type it."""
        ...


class RemoteJob:
    """One existing job."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.name = transport, transport.name
        self.print_events, self.print_logs = transport.print_events, transport.print_logs
        self.storage, self.manifests = transport.storage, transport.manifests
        self.describe_deletion, self.delete = transport.describe_deletion, transport.delete

    def view(self) -> JobView:
        return view_through(self.transport)

    def remarks(self, view: JobView) -> list[str]:
        """Warnings for a reader of the view, for example that no controller updates it."""
        attended = view.controller_alive or view.state in TERMINAL
        return [] if attended else [self.transport.remark(view)]

    def request(self, verb: str, **arguments: Any) -> Reply:
        """Any verb of runtime/control_api.py but `watch`. Raises RequestRefused."""
        try:
            reply = self.transport.perform(verb, {"by": requester(), **arguments})
        except ControllerGone:
            if self.transport.has_ended():
                expect_not_ended(self.transport.recorded(), verb)
            raise
        if not reply.ok:
            raise RequestRefused(f"job {self.name}: {reply.detail}")
        return reply

    def again(self, directory: Path | None) -> Reply:
        """Request a new generation with newly edited code. `directory`: where that is, as the user
        has named it."""
        from .. import job_code

        if not self.transport.check_code():
            if directory is not None:
                expected = "nothing: a job of this machine reads its files where they are"
                raise UserError.of("FILE", str(directory), expected)
            return self.request("again")
        if self.transport.has_ended():
            state, expected = self.transport.recorded().state, "a job that has not ended"
            fix = (
                f"remove it with `{self.transport.command('delete', self.name)}`, and run it again"
            )
            raise UserError.of("job", state, expected, fix)
        code = job_code.edited(self.transport.job, directory or Path.cwd())
        self.transport.upload(code)
        reply = self.request("again", code=code.name)
        self.transport.delete_code_except(code.name, str(reply.body.get("before", "")))
        detail = f"{job_code.describe(code)}; {reply.detail}"
        return Reply(ok=True, detail=detail, body={"code": code.name})


def view_through(transport: Transport) -> JobView:
    """The controller's view, or the recorded one when no controller answers."""
    try:
        reply = transport.perform("status", {})
    except ControllerGone:
        return transport.recorded()
    return msgspec.convert(reply.body, JobView) if reply.ok else transport.recorded()


def readable(names: Iterable[str], find: Callable[[str], RemoteJob]) -> list[JobView]:
    """The views of these jobs. Jobs that cannot be read are reported on stderr."""
    views = []
    for name in names:
        try:
            views.append(find(name).view())
        except HoldfastError as error:
            stderr().print(f"{name}: {error}", markup=False, soft_wrap=True)
    return views


def expect_not_ended(view: JobView, verb: str) -> None:
    """Raises UserError for a request to a job that has ended."""
    if view.state in TERMINAL:
        has = "was" if view.state == "cancelled" else "has"
        at = f" ({date(view.finished_ns)})" if view.finished_ns else ""
        what = _NOTHING_TO.get(verb, verb)
        raise UserError(f"job {view.name}: {has} {view.state}{at}; nothing to {what}")


def expect_ended(view: JobView, command: str) -> None:
    """Raises UserError for the deletion of a job that has not ended. `command`: what ends it."""
    if view.state not in TERMINAL:
        ends = f"{', '.join(TERMINAL[:-1])} or {TERMINAL[-1]}"
        raise UserError(
            f"job {view.name}: is {view.state}; only a job that is {ends} can be deleted; end it "
            f"with {command}"
        )


def extra_s(verb: str, arguments: Mapping[str, Any]) -> float:
    """Seconds that this answer may take beyond others: agents are asked for it."""
    if verb == "profile":
        return float(arguments["seconds"]) + limits.QUESTION_TIMEOUT_S
    return limits.QUESTION_TIMEOUT_S if verb == "stacks" else 0.0


def requester() -> str:
    """The user who typed the command, here or on the machine that sent it. It is shown in events,
    and not verified: printable characters only, and no line breaks."""
    name = os.environ.get(BY)
    if name is None:
        try:
            name = getpass.getuser()
        except (KeyError, OSError):
            name = ""
    return "".join(filter(str.isprintable, name))[:MAX_BY_CHARS]
