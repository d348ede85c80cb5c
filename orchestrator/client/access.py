"""Client's access to the jobs of one target.

Jobs of this machine are read in this process, as their files and their controller's socket are
here. Everything else is a command in a child process.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..cli.targets.local import LocalTarget, LocalTransport, attended_view
from ..cli.targets.remote_job import view_through
from ..core.transitions import TERMINAL
from ..runtime.job_directory import Home
from ..runtime.observe.view import JobView
from .commands import Commands

POLL_S = 0.2
"""Interval of looks at files of this machine."""


class ClusterAccess(Commands):
    """Jobs of a cluster. They run there without this machine."""

    def __init__(self, *options: str, what: str) -> None:
        super().__init__(options)
        self.what = what

    def free_name(self, wanted: str) -> str:
        return f"{wanted}-{secrets.token_hex(2)}"

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

    def free_name(self, wanted: str) -> str:
        return self._target.free_name(wanted)

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
        transport = LocalTransport(directory)

        def has_ended() -> bool:
            return not directory.controller_alive() and attended_view(transport).state in TERMINAL

        _until(has_ended, timeout_s)
        return view_through(transport)


Access = LocalAccess | ClusterAccess


def client_directory(home: Home, name: str) -> Path:
    """Directory of the scripts that the client made of functions for jobs of this name."""
    return home.path / "client" / name


def _until(condition: Callable[[], bool], timeout_s: float | None = None) -> None:
    """Raises TimeoutError."""
    give_up = None if timeout_s is None else time.monotonic() + timeout_s
    while not condition():
        if give_up is not None and time.monotonic() >= give_up:
            raise TimeoutError
        time.sleep(POLL_S)


def _decoded(text: str) -> JobView:
    return msgspec.json.decode(text, type=JobView)
