"""Commands over http:// that look at a running job: they read what its controller has published in
Ray's log directory. Every other command, and one that finds nothing there, runs as a Ray job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import typer

from holdfast.orchestrator.backends.ray import names
from holdfast.orchestrator.backends.ray.remote_files import LogFilter, matching
from holdfast.orchestrator.backends.ray.state_api import ControllerProcess, StateApi
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.cli.log_files import older_part, print_files
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol.messages import Reply
from holdfast.orchestrator.runtime.control_api import view_body
from holdfast.orchestrator.runtime.job_directory import JobDirectory
from holdfast.orchestrator.runtime.observe.view import JobView

from ..base import Launch, RunResult, Target
from ..remote_job import LogSelector, RemoteJob
from ..tempdir import scratch
from .jobs_api import OWNER, follow, forward, submit

COMMANDS = ("status", "logs", "run", "submit")
POLL_S = 0.2
"""Seconds between two looks for a view."""
MAX_LOGS = 32
"""Files that are read one after the other; of more, every Ray node reads its own at once."""
OLD_S = 60.0
"""A view that is older, by the clock of this machine, is not shown: its controller may be stuck,
and would not answer a command in the cluster either."""

NOT_YET = "the job's controller has published nothing yet"
START_S = 3.0
"""A controller that has just started has published nothing yet; a Ray job takes longer."""


class DashboardTarget(Target):
    """One cluster, by the address of its dashboard."""

    takes_runtime_env = True

    def __init__(
        self,
        address: str,
        *,
        open_api: Callable[[str], Any] = StateApi,
        run_inside: Callable[[str, str], int] = forward,
    ) -> None:
        self._address, self._open, self._run_inside = address, open_api, run_inside

    def find(self, name: str) -> RemoteJob:
        view_found, why, give_up = None, "", time.monotonic() + START_S
        try:
            api = self._open(self._address)
            while (controller := api.controller(name)) is not None:
                view, why = self._view(api, name, controller)
                view_found = view
                if why != NOT_YET or time.monotonic() > give_up:
                    break
                time.sleep(POLL_S)
        except Exception as error:  # of Ray, of requests, of a file that another version wrote
            why = _failed(f"the state of job {name} cannot be read", error)
        if view_found is None:
            self._inside(why=why)
        return RemoteJob(DashboardTransport(api, view_found, self._inside))

    def _view(
        self, api: StateApi, name: str, controller: ControllerProcess
    ) -> tuple[JobView | None, str]:
        """(What the controller has published, why it is not shown)."""
        published = json.loads(api.log_file(controller.ray_node, names.view_file(name)))
        if published["pid"] != controller.pid:
            return None, NOT_YET
        view = msgspec.convert(published["view"], JobView)
        old_s = abs(time.time() - view.now_ns / SECOND_NS)
        if old_s > OLD_S:
            return None, f"the published state of job {name} is {old_s:.0f} s old by this clock"
        return view, ""

    def _inside(self, *_given: object, why: str = "", **_options: object) -> NoReturn:
        raise typer.Exit(self._run_inside(self._address, why))

    def views(self) -> list[JobView]:
        self._inside()

    def empty_message(self) -> str:
        self._inside()

    def command(self, *words: str) -> str:
        return " ".join(["holdfast", *words, "--ray", self._address])

    def run(self, launch: Launch, display: Display) -> RunResult:
        submitted = submit(launch, self._address, display.note)
        try:
            return RunResult(None, follow(submitted))
        except KeyboardInterrupt:
            display.note(
                f"Job {submitted.job} continues in the cluster. Watch it again with "
                f"`{self.command('attach', submitted.job)}`"
            )
            return RunResult(None, 130)

    def submit(self, launch: Launch, display: Display) -> dict[str, str]:
        submitted = submit(launch, self._address, display.note)
        display.note(f"its log: `ray job logs -f {submitted.ray_job} --address {self._address}`")
        while not self._exists(submitted.job):
            if submitted.api.running(OWNER, submitted.job) is None:  # the cluster rejects it
                outcome, output = submitted.api.wait(submitted.ray_job)
                if outcome.status != "SUCCEEDED":
                    raise HoldfastError.of_command(outcome.exit_code, output)
                break
            time.sleep(POLL_S)
        return {"job": submitted.job, "ray_job": submitted.ray_job}

    def _exists(self, job: str) -> bool:
        with suppress(Exception):  # of Ray and of requests, as in `find`
            return self._open(self._address).controller(job) is not None
        return True

    def attach(self, name: str, display: Display) -> RunResult:
        self._inside()


class DashboardTransport:
    """A running job by the view that its controller has published."""

    def __init__(self, api: StateApi, view: JobView, inside: Callable[..., NoReturn]) -> None:
        self._api, self._view, self._inside = api, view, inside
        self.job: Any = None
        self.remark = self.check_code = self.upload = self.delete_code_except = inside
        self.print_events = self.storage = self.manifests = self.command = inside
        self.describe_deletion = self.delete = inside

    @property
    def name(self) -> str:
        return self._view.name

    def perform(self, verb: str, arguments: dict[str, Any]) -> Reply:
        if verb != "status":
            self._inside()
        return Reply(ok=True, body=view_body(self._view))

    def recorded(self) -> JobView:
        return self._view

    def has_ended(self) -> bool:
        return False

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None:
        if follow:
            self._inside()
        why = ""
        with scratch("holdfast-logs-") as place:
            copy = JobDirectory(place / self.name)
            try:
                complete = self._fetch(copy.logs, LogFilter(*wanted, since=0))
            except Exception as error:  # of Ray, of requests, of a file that is gone
                why = _failed(f"logs of job {self.name} cannot be read", error)
                complete = False
            if complete:
                print_files(copy, *wanted)
        if not complete:
            self._inside(why=why)

    def _fetch(self, root: Path, wanted: LogFilter) -> bool:
        """Copy the wanted files to `root`, and make empty ones of all others. False: too many."""
        directory = names.logs(self.name, self._view.job_id)
        places: dict[Path, tuple[str, str]] = {}
        for ray_node in self._api.ray_nodes():
            for file in self._api.log_files(ray_node, f"{directory}/**/*.log*"):
                places.setdefault(root / file.removeprefix(f"{directory}/"), (ray_node, file))
        for path in places:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        files = matching(root, wanted)
        files |= {older_part(path) for path in files}
        if len(files & places.keys()) > MAX_LOGS:
            return False
        for path in files & places.keys():
            path.write_bytes(self._api.log_file(*places[path]))
        return True


def _failed(what: str, error: Exception) -> str:
    """Reason why a command runs as a Ray job, which takes longer."""
    text = str(error).partition("\n")[0] or type(error).__name__
    return f"{what} through the dashboard ({text})"
