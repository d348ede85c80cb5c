"""Commands over http:// that only look at a running job: they read what its controller has
published. Where that is not possible, the command runs inside the cluster, as a Ray job."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import typer

from holdfast.orchestrator.backends.ray import names
from holdfast.orchestrator.backends.ray.remote_files import LogFilter, matching
from holdfast.orchestrator.backends.ray.state_api import StateApi
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.cli.log_files import print_files
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.hosts.local.job_directory import JobDirectory
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.runtime.observe.view import JobView

from ..base import LogSelector, Response, RunResult
from ..tempdir import scratch
from .jobs_api import forward

COMMANDS = ("status", "report", "logs")
MAX_LOGS = 32
"""Files that are read one after the other; of more, every Ray node reads its own at once."""
OLD_S = 60.0
"""A view that is older, by the clock of this machine, is not shown: its controller may be stuck,
and would not answer a command in the cluster either."""

log = logging.getLogger("holdfast.ray")


class DashboardTarget:
    """One cluster, by the address of its dashboard."""

    def __init__(
        self,
        address: str,
        *,
        open_api: Callable[[str], Any] = StateApi,
        run_inside: Callable[[str], int] = forward,
    ) -> None:
        self._address, self._open, self._run_inside = address, open_api, run_inside

    def find(self, name: str) -> DashboardJob:
        try:
            api = self._open(self._address)
            view = self._view(api, name)
        except Exception as error:  # of Ray, of requests, of a file that another version wrote
            log.debug("job %s: nothing published: %s", name, error)
            view = None
        if view is None:
            self._inside()
        return DashboardJob(api, view, self._inside)

    def _view(self, api: StateApi, name: str) -> JobView | None:
        controller = api.controller(name)
        if controller is None:
            return None
        found = json.loads(api.log_file(controller.ray_node, names.view_file(name)))
        if found["pid"] != controller.pid:
            return None  # of an earlier process
        view = msgspec.convert(found["view"], JobView)
        is_old = abs(time.time() - view.now_ns / SECOND_NS) > OLD_S
        return None if is_old else view

    def _inside(self) -> NoReturn:
        raise typer.Exit(self._run_inside(self._address))

    def views(self) -> list[JobView]:
        self._inside()

    def empty_message(self) -> str:
        self._inside()

    def command(self, *words: str) -> str:
        return " ".join(["holdfast", *words, "--ray", self._address])

    def can_read(self, path: str) -> bool:
        return True  # on a Ray node

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, file: Path | None, attach: str | None, display: Display) -> RunResult:
        self._inside()


class DashboardJob:
    """A running job whose controller has published its view."""

    def __init__(self, api: StateApi, view: JobView, inside: Callable[[], NoReturn]) -> None:
        self._api, self._view, self._inside = api, view, inside

    @property
    def name(self) -> str:
        return self._view.name

    def view(self) -> JobView:
        return self._view

    def remarks(self, view: JobView) -> list[str]:
        return []

    def request(self, verb: str, **arguments: Any) -> Response:
        self._inside()

    def print_events(self, *, follow: bool, as_json: bool) -> None:
        self._inside()

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None:
        if follow:
            self._inside()
        with scratch("holdfast-logs-") as place:
            copy = JobDirectory(place / self.name)
            try:
                complete = self._fetch(copy.logs, LogFilter(*wanted))
            except Exception as error:  # of Ray, of requests, of a file that is gone
                log.debug("job %s: logs cannot be read: %s", self.name, error)
                complete = False
            if complete:
                print_files(copy, *wanted)
        if not complete:
            self._inside()

    def _fetch(self, root: Path, wanted: LogFilter) -> bool:
        """Copy the wanted files to `root`, and make empty ones of all others. False: too many."""
        directory = names.logs(self.name, self._view.job_id)
        places: dict[Path, tuple[str, str]] = {}
        for ray_node in self._api.ray_nodes():
            for file in self._api.log_files(ray_node, f"{directory}/**/*.log"):
                places.setdefault(root / file.removeprefix(f"{directory}/"), (ray_node, file))
        for path in places:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        found = matching(root, wanted)
        if len(found) > MAX_LOGS:
            return False
        for path in found & places.keys():
            path.write_bytes(self._api.log_file(*places[path]))
        return True

    def storage(self) -> AbstractContextManager[str]:
        self._inside()

    def manifests(self) -> tuple[str, list[Manifest]] | None:
        self._inside()

    def describe_deletion(self, keep: Path | None) -> str:
        self._inside()

    def delete(self, keep: Path | None) -> list[str]:
        self._inside()


def can_look(words: list[str] | None = None) -> bool:
    """Whether this command may do without a Ray job."""
    return (sys.argv[1:] if words is None else words)[:1] in ([name] for name in COMMANDS)
