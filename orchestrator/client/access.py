"""How the client reaches the jobs of one target.

Jobs of this machine are read in this process, as their files and their controller's socket are
here. Everything else is a command in a child process.
"""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..cli.targets.local import LocalTarget
from ..core.transitions import TERMINAL
from ..errors import HoldfastError
from ..runtime.job_directory import Home
from ..runtime.observe.view import JobView
from .commands import Commands, failure

POLL_S = 0.2
"""Interval of looks at files of this machine."""
_VIEW_LINE = re.compile(r"^\d\d:\d\d:\d\d  ", re.MULTILINE)
"""What `holdfast run` prints of a view, without a terminal: the job exists."""


class ClusterAccess(Commands):
    """Jobs of a cluster. They run there without this machine."""

    def __init__(self, *options: str, start_with: Sequence[str], what: str) -> None:
        """`start_with`: the command that starts a job and then shows it."""
        super().__init__(options)
        self._start_with, self.what = tuple(start_with), what

    def free_name(self, wanted: str) -> str:
        return f"{wanted}-{secrets.token_hex(2)}"

    def start(self, file: Path, name: str, output: Path) -> None:
        """Start the job in a file; returns when it exists. `output`: a new file for what the
        command prints. Raises UserError for what the target refuses."""
        with output.open("wb") as stream:
            child = self.begin([*self._start_with, str(file)], stream, subprocess.STDOUT)
        try:
            _until(lambda: child.poll() is not None or _shows_a_view(output))
        finally:
            child.terminate()  # it would only watch
            child.wait()
        if not _shows_a_view(output):
            raise failure(child.returncode, output)

    def view(self, name: str) -> JobView:
        return _decoded(self.run("status", name, "--json"))

    def views(self) -> list[JobView]:
        return msgspec.json.decode(self.run("status", "--json"), type=list[JobView])

    def delete(self, name: str, keep: Sequence[str]) -> None:
        self.run("delete", name, "--yes", *keep)

    def wait(self, name: str, timeout_s: float | None) -> JobView:
        """The last view. Raises TimeoutError."""
        return _decoded(self.run("attach", name, "--json", timeout_s=timeout_s))


class LocalAccess(Commands):
    """Jobs of this machine. The controller of each is a process in a session of its own, which
    outlives this one."""

    what = "this machine"

    def __init__(self, home: Home) -> None:
        super().__init__(("--home", str(home.path)))
        self._home, self._target = home, LocalTarget(home.path)
        self._controllers: list[subprocess.Popen[str]] = []

    def free_name(self, wanted: str) -> str:
        return self._target.free_name(wanted)

    def start(self, file: Path, name: str, output: Path) -> None:
        """Start it; on a cluster, too, and then the controller writes to `output`."""
        self._controllers = [one for one in self._controllers if one.poll() is None]
        with output.open("wb") as stream:
            child = self.begin(["run", str(file), "--json"], stream, subprocess.STDOUT)
        self._controllers.append(child)
        directory = self._home.directory(name)

        def has_started() -> bool:
            return (directory.controller() or {}).get("pid") == child.pid

        try:
            _until(lambda: child.poll() is not None or has_started())
        except BaseException:
            child.terminate()  # the user waits no longer: it cancels the job
            raise
        if child.poll() not in (None, 0) and not _has_report(output):
            raise failure(child.returncode, output)

    def view(self, name: str) -> JobView:
        return self._target.find(name).view()

    def views(self) -> list[JobView]:
        return self._target.views()

    def delete(self, name: str, keep: Sequence[str]) -> None:
        self.run("delete", name, "--yes", *keep)
        shutil.rmtree(client_directory(self._home, name), ignore_errors=True)

    def wait(self, name: str, timeout_s: float | None) -> JobView:
        """The last view, when the controller has ended too. Raises TimeoutError, and HoldfastError
        when there is no controller."""
        directory = self._home.find(name)
        job = self._target.find(name)

        def has_ended() -> bool:
            if directory.controller_alive():
                return False
            view = job.view()
            if view.state not in TERMINAL:
                raise HoldfastError(f"job {name}: {' '.join(job.remarks(view))}")
            return True

        _until(has_ended, timeout_s)
        return job.view()


Access = LocalAccess | ClusterAccess


def client_directory(home: Home, name: str) -> Path:
    """Directory of what the client made for jobs of this name: the scripts of functions, and
    output."""
    return home.path / "client" / name


def _until(condition: Callable[[], bool], timeout_s: float | None = None) -> None:
    """Raises TimeoutError."""
    give_up = None if timeout_s is None else time.monotonic() + timeout_s
    while not condition():
        if give_up is not None and time.monotonic() >= give_up:
            raise TimeoutError
        time.sleep(POLL_S)


def _shows_a_view(output: Path) -> bool:
    return _VIEW_LINE.search(_text(output)) is not None


def _has_report(output: Path) -> bool:
    """Whether a command with --json has printed the report of a job that has ended."""
    return re.search(r"^\{$", _text(output), re.MULTILINE) is not None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _decoded(text: str) -> JobView:
    return msgspec.json.decode(text, type=JobView)
