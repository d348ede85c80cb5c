"""Runs the script of a launcher as this rank: `PYTHON launcher_shim.py INTERPRETER LAUNCHER ARGS`.

A rank that starts torchrun, accelerate or deepspeed, such as `bash run.sh`, reaches this program by
the files in shims/: by PATH (INTERPRETER is "") or from sitecustomize.py. The job decides the
sizes; the rest of the line counts as in entrypoint.command.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[4]))  # the rank may have replaced PYTHONPATH

from holdfast.orchestrator.api import launchers
from holdfast.orchestrator.api.launcher_names import REPLACED, launched
from holdfast.orchestrator.api.launchers import CommandRefused, Program

SHIMS = str(Path(__file__).with_name("shims"))
HOLDFAST_PYTHON = "HOLDFAST_PYTHON"
"""Environment variable of a rank: the Python that runs this program."""
USAGE_CODE = 2
NOT_FOUND_CODE = 127
"""Exit code of a shell for a command that is not there."""
_OF_THE_JOB = {
    "nodes": ("GROUP_WORLD_SIZE", "nodes"),
    "workers": ("LOCAL_WORLD_SIZE", "workers on each node"),
    "world": ("WORLD_SIZE", "workers"),
    "restarts": ("TORCHELASTIC_MAX_RESTARTS", "restarts"),
}
"""A launcher's size -> the variable that has the job's, and what it counts."""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a rank's launchers reach this program."""
    return {
        HOLDFAST_PYTHON: sys.executable,
        "PATH": _with_shims(environment.get("PATH", os.defpath)),
        "PYTHONPATH": _with_shims(environment.get("PYTHONPATH", "")),
    }


def _with_shims(path: str) -> str:
    return os.pathsep.join([SHIMS, *_others(path)])


def _others(path: str) -> list[str]:
    return [entry for entry in path.split(os.pathsep) if entry != SHIMS] if path else []


def main(interpreter: str, words: list[str]) -> int:
    """The exit code of a launcher that is refused; otherwise this does not return."""
    if not interpreter:
        path = os.pathsep.join(_others(os.environ["PATH"]))
        if own := shutil.which(words[0], path=path):
            os.environ["PYTHONPATH"] = _with_shims(os.environ.get("PYTHONPATH", ""))
            os.execv(own, [own, *words[1:]])
        interpreter = sys.executable
    launcher, rest = launched(words)
    if launcher not in REPLACED or "RANK" not in os.environ:
        print(f"holdfast: {words[0]}: not found", file=sys.stderr)
        return NOT_FOUND_CODE
    try:
        program = launchers.read(launcher, rest)
    except CommandRefused as error:
        # As argparse prints it: the agent does not start the rank again after a usage error.
        print(f"usage: {launcher} OPTIONS SCRIPT ARGS", file=sys.stderr)
        print(f"holdfast: {replace(error.problem, field='command')}", file=sys.stderr)
        return USAGE_CODE
    if os.environ["RANK"] == "0":
        for remark in _remarks(program):
            print(f"holdfast: {remark}", file=sys.stderr, flush=True)
    command = _command(interpreter, program)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"holdfast: {launcher}: {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND_CODE


def _remarks(program: Program) -> Iterator[str]:
    for size in program.sizes:
        variable, what = _OF_THE_JOB[size.of]
        count = int(os.environ[variable])
        if not size.least <= count <= size.most:
            yield f"{program.launcher} with {size.option}: the job decides, and has {count} {what}"


def _command(interpreter: str, program: Program) -> list[str]:
    if program.words:
        return [*program.words]
    command = [interpreter, "-u", *(["-m"] if program.module else []), str(program)]
    if program.local_rank_option:
        command.append(f"{program.local_rank_option}={os.environ['LOCAL_RANK']}")
    command += program.args
    if program.launcher != "accelerate launch":
        return command
    own = str(Path(__file__).with_name("accelerate_launch.py"))
    return [interpreter, own, json.dumps(program.launcher_args), *command]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
