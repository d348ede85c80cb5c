"""Commands of `holdfast` as child processes: what they print, and their errors as exceptions.

In a notebook a command cannot run in the process itself: an event loop runs there already, output
belongs to a cell, the process may be a driver of another Ray cluster, and Ctrl-C or the end of the
kernel would reach the controller of a job.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

from ..errors import HoldfastError
from ..protocol import python_command

PROGRAM = "holdfast.orchestrator.cli.main"
END_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
_INTERACTIVE = ("FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR", "TTY_COMPATIBLE")


class Commands:
    """The commands for one target."""

    def __init__(self, options: Sequence[str]) -> None:
        """`options`: those that choose the target, such as `--ray ADDRESS`."""
        self.options = tuple(options)

    def run(self, *words: str, timeout_s: float | None = None) -> str:
        """Command's stdout. Raises UserError for exit code 2 and HoldfastError for others; with
        JSON on stdout, 1 is the exit code of a job that failed. Raises TimeoutError; the command
        has then ended."""
        child = self.begin(words, subprocess.PIPE, subprocess.PIPE)
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            _end(child)
        if child.returncode and not (child.returncode == 1 and out.startswith("{")):
            raise HoldfastError.of_command(child.returncode, err)
        return str(out)

    def lines(self, *words: str) -> Iterator[str]:
        """Each line of its stdout when it comes. Raises as `run`. The command ends with the
        iterator."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            child = self.begin(words, subprocess.PIPE, errors)
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    yield line.rstrip("\n")
                child.wait()
            finally:
                _end(child)
            if child.returncode:
                errors.seek(0)
                raise HoldfastError.of_command(child.returncode, errors.read())

    def begin(
        self, words: Sequence[str], stdout: int | IO[Any], stderr: int | IO[Any]
    ) -> subprocess.Popen[str]:
        """A command in a session of its own: signals of this process's terminal and the end of a
        notebook's kernel do not reach it."""
        return subprocess.Popen(
            [*python_command.start(PROGRAM), *words, *self.options],
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment(),
            text=True, encoding="utf-8", errors="replace", start_new_session=True,
        )  # fmt: skip


def environment() -> dict[str, str]:
    """The environment of this process, without what a notebook's kernel sets for its own output:
    workers on this machine inherit it."""
    variables = {name: value for name, value in os.environ.items() if name not in _INTERACTIVE}
    if "inline" in variables.get("MPLBACKEND", ""):
        del variables["MPLBACKEND"]
    path = python_command.import_path()
    return variables | ({"PYTHONPATH": path} if path else {})


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
