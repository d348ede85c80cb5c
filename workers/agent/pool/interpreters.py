"""Finds the Python that a job names: `entrypoint.python`, or what `uv run` and the like use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import files

_MARK = "holdfast-interpreter:"
_QUERY = (
    "import json, os, sys; "
    f"print('{_MARK}' + json.dumps([sys.executable, sys.prefix, dict(os.environ)]))"
)
_OF_THE_QUERY = ("_", "SHLVL", "PWD", "OLDPWD")


@dataclass(frozen=True)
class Interpreter:
    path: str
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that its environment sets."""
    is_ours: bool = False
    """The Python that the forkserver runs in."""


def named(written: str, directory: Path) -> Interpreter:
    """An interpreter by its path or name, or by the directory of its environment; relative to
    `directory`. Raises UserError."""
    place = files.resolve(directory, written)
    prefix = place
    if place.is_dir():
        path = place / "bin" / "python"
    elif "/" in written or place.is_file():
        path, prefix = place, place.parent.parent
    else:
        program = shutil.which(written)
        if program is None:
            raise _missing(written, "no program of this name is in PATH on this node")
        path = Path(program)
        prefix = path.parent.parent
    if not path.is_file():
        raise _missing(written, f"{path} does not exist on this node")
    if not os.access(path, os.X_OK):
        raise _missing(written, f"{path} is not executable")
    here = path.absolute() == Path(sys.executable).absolute()
    ours = (prefix / "pyvenv.cfg").is_file() and prefix.resolve() == Path(sys.prefix).resolve()
    return Interpreter(str(path.absolute()), of_prefix(prefix.absolute()), here or ours)


def _missing(written: str, why: str) -> UserError:
    expected = "a Python, or the directory of an environment, of every node"
    fix = "relative paths begin in spec.workingDirectory"
    return UserError.of("spec.entrypoint.python", f"{written} ({why})", expected, fix)


def of_prefix(prefix: Path) -> dict[str, str]:
    """Variables that the activation of an environment sets: programs in it come first."""
    environment = {}
    if (prefix / "pyvenv.cfg").is_file():
        environment["VIRTUAL_ENV"] = str(prefix)
    elif (prefix / "conda-meta").is_dir():
        environment["CONDA_PREFIX"] = str(prefix)
    else:
        return {}
    path = os.environ.get("PATH", os.defpath)
    environment["PATH"] = f"{prefix / 'bin'}{os.pathsep}{path}"
    return environment


def of_runner(runner: Sequence[str]) -> Interpreter:
    """The interpreter with which `uv run python` starts, in the current directory, after uv has
    made its environment; and the variables of that. Raises UserError."""
    name = " ".join(runner[:2])
    try:
        done = subprocess.run(
            [*runner, "python", "-c", _QUERY],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError as error:
        got = f"{runner[0]} ({error.strerror} on this node)"
        raise _command_error(got, "a program of every node", "install it there") from None
    line = next((text for text in done.stdout.splitlines() if text.startswith(_MARK)), "")
    if done.returncode or not line:
        last = " ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        got = f"{name}, which ended with exit code {done.returncode} ({last})"
        raise _command_error(got, f"an environment in which `{name} python` starts", "")
    path, prefix, environment = json.loads(line.removeprefix(_MARK))
    changed = {
        key: value
        for key, value in environment.items()
        if os.environ.get(key) != value and key not in _OF_THE_QUERY
    }
    return Interpreter(path, changed, Path(prefix).resolve() == Path(sys.prefix).resolve())


def _command_error(got: str, expected: str, fix: str) -> UserError:
    return UserError.of("spec.entrypoint.command", got, expected, fix)
