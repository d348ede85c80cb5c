"""Prepares what a worker runs, in this process or in its place.

A script or module of Holdfast's own Python runs in the forked process. For anything else the
process becomes that program (exec): with the same process id, group, descriptors and exit code, so
that stops, kills and logs are the same. Only the imports of the forkserver are lost.
"""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.launchers import Program
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.workload import CHECKPOINT
from holdfast.orchestrator.errors import Problem, UserError
from holdfast.orchestrator.protocol import files
from holdfast.orchestrator.protocol.environment import RESUME_FROM
from holdfast.workers import worker_transport

from ..linux import output, processes
from . import accelerate_launch, file_audit, framework_hooks, interpreters, launcher_shim
from .interpreters import Interpreter

_OTHER_PYTHON = str(Path(__file__).with_name("other_python.py"))
_INLINE_REQUIREMENTS = re.compile(rb"^# /// script\s*$", re.MULTILINE)
"""PEP 723: `uv run FILE` makes an environment for this file alone."""


@dataclass(frozen=True)
class Descriptors:
    """Descriptors of a worker, which a program in its place inherits."""

    wire: int
    stack: int
    asked: int


def prepare(job: TrainingJob, descriptors: Descriptors, *, again: bool = False) -> Program:
    """The script or module to run, `again` or not, in this process; for another program this does
    not return.
    Raises UserError for a program that this node lacks."""
    program = job.spec.entrypoint.program
    if program.local_rank_option:
        option = f"{program.local_rank_option}={os.environ['LOCAL_RANK']}"
        program = replace(program, args=(option, *program.args))
    if newest := os.environ.get(RESUME_FROM):
        words = (word.replace(CHECKPOINT, newest) for word in job.spec.entrypoint.resume_args)
        program = program.with_arguments(words)
    if program.words:
        if program.python:
            os.environ.update(interpreters.named(program.python, Path.cwd()).environment)
        _become(program.words, descriptors, "spec.entrypoint.command")
    interpreter = _interpreter(program, descriptors)
    if interpreter is not None:
        os.environ.update(interpreter.environment)
        if not interpreter.is_ours:
            _become_python(job, program, interpreter, descriptors)
    if program.launcher == "accelerate launch":
        os.environ.update(_variables(program))
    os.environ.update(launcher_shim.variables(os.environ))
    if job.spec.entrypoint.recipe is None and job.spec.checkpoint.guard.chosen != "never":
        framework_hooks.install(again=again)
        file_audit.install(descriptors.wire)
    return program


def _interpreter(program: Program, descriptors: Descriptors) -> Interpreter | None:
    """None: no other is named."""
    if program.python:
        return interpreters.named(program.python, Path.cwd())
    if not program.runner:
        return None
    if program.runner[0].endswith("uv") and program.script:
        script = files.resolve(Path.cwd(), program.script)
        if _INLINE_REQUIREMENTS.search(script.read_bytes()):
            words = (*program.runner, program.script, *program.args)
            _become(words, descriptors, "spec.entrypoint.command")
    return interpreters.of_runner(program.runner)


def _variables(program: Program) -> dict[str, str]:
    try:
        return accelerate_launch.variables([*program.launcher_args])
    except (accelerate_launch.NotSupported, ValueError, OSError) as error:
        text = str(error)
        if "; expected" not in text:
            text = str(Problem("spec.entrypoint.command", text, "options that accelerate accepts"))
        raise UserError(text) from None


def _become_python(
    job: TrainingJob, program: Program, interpreter: Interpreter, descriptors: Descriptors
) -> NoReturn:
    script = ""
    if program.script is not None:
        script = str(files.resolve(Path.cwd(), program.script).resolve())
    is_accelerate = program.launcher == "accelerate launch"
    order = {
        "script": script,
        "module": program.module,
        "argv": [program.script or program.module, *program.args],
        "accelerate": list(program.launcher_args) if is_accelerate else None,
        "wire": descriptors.wire,
        "stack": descriptors.stack,
        "asked": descriptors.asked,
        "signal": processes.STACK_SIGNAL,
        "bytes": limits.MAX_TRACEBACK_BYTES,
        "audit": job.spec.checkpoint.guard.chosen != "never",
    }
    words = (interpreter.path, _OTHER_PYTHON, json.dumps(order))
    _become(words, descriptors, "spec.entrypoint.python")


def _become(words: tuple[str, ...], descriptors: Descriptors, field: str) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # as under torchrun: a kill loses no line
    os.environ.update(launcher_shim.variables(os.environ))
    worker_transport.hand_over(descriptors.asked)
    os.set_inheritable(descriptors.stack, True)
    output.flush()
    try:
        os.execvp(words[0], words)
    except OSError as error:
        why = error.strerror
        fix = "a script needs a first line such as #!/bin/bash" if error.errno == 8 else ""
        got = f"{words[0]} ({why} on this node)"
        raise UserError.of(field, got, "a program of every node", fix) from None
