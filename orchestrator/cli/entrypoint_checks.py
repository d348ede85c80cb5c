"""Checks of an entrypoint against the files of this machine, before a job starts: whether the
script is there and is Python that compiles, and what its interpreter or program is."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..api.launchers import Program
from ..api.v1alpha1 import TrainingJob
from ..errors import Problem
from ..protocol import files
from . import launch_sizes

PYTHON_FIELD = "spec.entrypoint.python"
COMMAND_FIELD = "spec.entrypoint.command"
ANSWER_S = 30.0
"""Limit for an interpreter that compiles one file, on a busy machine."""
_SNIFFED_BYTES = 8192
_SHELL = re.compile(rb"#!\s*\S*\b(env\s+)?(ba|da|z|k)?sh\b")
_OTHER_SHEBANG = re.compile(rb"#!\s*(\S+)(?:\s+(\S+))?")
_COMPILE = """
import json, sys
found = {"version": list(sys.version_info[:2])}
try:
    if len(sys.argv) > 1:
        with open(sys.argv[1], "rb") as file:
            compile(file.read(), sys.argv[1], "exec", dont_inherit=True)
except (SyntaxError, ValueError) as error:
    found["line"], found["why"] = getattr(error, "lineno", None), getattr(error, "msg", str(error))
print(json.dumps(found))
"""


def problems(job: TrainingJob, work: Path) -> Iterator[Problem]:
    """Everything that is wrong with what the job runs, in its working directory `work`."""
    try:
        yield from _problems(job, work)
    except OSError as error:  # such as a name that is too long
        entry = job.spec.entrypoint
        what = cut(entry.python or str(entry.program))
        yield Problem(entry.script_field, f"{what} ({error.strerror})", "names of files")


def _problems(job: TrainingJob, work: Path) -> Iterator[Problem]:
    entry = job.spec.entrypoint
    program = entry.program
    if program.words:
        yield from _program(work, program.words)
    python = None
    if program.python:
        field = PYTHON_FIELD if entry.python else COMMAND_FIELD
        python, problem = _find_python(work, program.python, field)
        if problem:
            yield problem
            return
    if program.runner and shutil.which(program.runner[0]) is None:
        got = f"{program.runner[0]}, which is not in PATH"
        yield Problem(COMMAND_FIELD, got, "a program of this machine", "install it")
    if program.script is not None:
        skipped = bool(program.runner)  # its interpreter is not known yet
        yield from script(work, program.script, entry.script_field, python, compiled=not skipped)
    if program.module is not None and not program.is_foreign:
        yield from _module(work, program.module, entry.command is not None)
    yield from _accelerate(job, program, work)


# -- scripts ------------------------------------------------------------------------------------
def script(
    work: Path, written: str, field: str, python: str | None = None, *, compiled: bool = True
) -> Iterator[Problem]:
    """Problems of a script. `python`: the interpreter that compiles it; None: this one."""
    try:
        path = files.resolve(work, written)
        is_file, is_directory = path.is_file(), path.is_dir()
    except OSError as error:  # such as a name that is too long
        yield Problem(field, f"{cut(written)} ({error.strerror})", "a Python file")
        return
    if not is_file:
        what = "is a directory" if is_directory else "does not exist"
        fix = "scripts are looked up in spec.workingDirectory, relative to the spec file"
        yield Problem(field, f"{written} ({path} {what})", "a Python file", fix)
        return
    try:
        with path.open("rb") as file:
            begin = file.read(_SNIFFED_BYTES)
    except OSError:
        yield Problem(field, f"{written} (no permission)", "a readable file")
        return
    if begin.startswith(b"PK\x03\x04"):
        return  # Python runs archives (zipapp)
    if other := _other_kind(written, path, begin):
        what, fix = other
        yield Problem(field, f"{written} ({what})", "a Python file", fix)
    elif compiled:
        yield from _compiles(path, written, field, python)


def _other_kind(written: str, path: Path, begin: bytes) -> tuple[str, str] | None:
    """(what a file is that is no Python, what to write instead)."""
    if path.suffix == ".ipynb":
        return "a notebook", f"`jupyter nbconvert --to script {written}` writes a Python file"
    as_program = written if "/" in written else f"./{written}"
    if begin.startswith(b"\x7fELF") or b"\0" in begin:
        return "a binary file", f"for a program write entrypoint.command: {as_program}"
    if path.suffix == ".sh" or _SHELL.match(begin):
        return "a shell script", f"write entrypoint.command: bash {written}"
    if match := _OTHER_SHEBANG.match(begin):
        words = b" ".join(word for word in match.groups() if word).decode(errors="replace")
        if "python" not in words and "uv" not in words:
            return f"a script for {words}", f"write entrypoint.command: {as_program}"
    return None


def _compiles(path: Path, written: str, field: str, python: str | None) -> Iterator[Problem]:
    if python is not None:
        answer = _ask(python, str(path))
        if not isinstance(answer, dict):
            yield Problem(PYTHON_FIELD, f"{python} ({answer})", "a Python that starts")
            return
        version = ".".join(map(str, answer["version"]))
        line, why = answer.get("line"), answer.get("why")
    else:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        line = why = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except SyntaxError as error:
            line, why = error.lineno, error.msg
        except (ValueError, RecursionError, MemoryError) as error:
            why = str(error) or type(error).__name__
    if why:
        where = f"line {line}: {why}" if line else why
        fix = f"`python -m py_compile {written}` shows it"
        yield Problem(
            field, f"{written} ({where})", f"a script that Python {version} compiles", fix
        )


# -- interpreters -------------------------------------------------------------------------------
def _find_python(work: Path, written: str, field: str) -> tuple[str | None, Problem | None]:
    """The interpreter, as agent/pool/interpreters.py finds it on a node."""
    place = files.resolve(work, written)
    if place.is_dir():
        path = place / "bin" / "python"
    elif "/" in written or place.is_file():
        path = place
    else:
        path = Path(shutil.which(written) or place)
    expected = "a Python, or the directory of an environment (with bin/python)"
    fix = "`python3 -m venv DIRECTORY` or `uv venv DIRECTORY` makes one; install torch there"
    if not path.is_file():
        return None, Problem(field, f"{written} ({path} does not exist)", expected, fix)
    if not os.access(path, os.X_OK):
        return None, Problem(field, f"{written} ({path} is not executable)", expected, fix)
    answer = _ask(str(path))
    if not isinstance(answer, dict):
        return None, Problem(field, f"{written} ({path} is not Python: {answer})", expected, fix)
    if tuple(answer["version"]) < (3, 8):
        version = ".".join(map(str, answer["version"]))
        return None, Problem(field, f"{written} (Python {version})", "Python 3.8 or later")
    return str(path), None


def _ask(python: str, *arguments: str) -> dict[str, Any] | str:
    """Answer of _COMPILE in another interpreter; a text: why it does not answer."""
    try:
        done = subprocess.run(
            [python, "-I", "-W", "ignore", "-c", _COMPILE, *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        return answer if isinstance(answer, dict) and "version" in answer else "no answer"
    except subprocess.TimeoutExpired:
        return f"no answer after {ANSWER_S:g} s"
    except OSError as error:
        return str(error.strerror)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:]
        return last[0] if last else f"exit code {done.returncode}"


# -- modules and programs -----------------------------------------------------------------------
def _module(work: Path, name: str, in_command: bool) -> Iterator[Problem]:
    field = COMMAND_FIELD if in_command else "spec.entrypoint.module"
    top = name.split(".")[0]
    try:
        here = (work / top).is_dir() or (work / f"{top}.py").is_file()
    except OSError as error:
        yield Problem(field, f"{cut(name)} ({error.strerror})", "a module")
        return
    if not here and importlib.util.find_spec(top) is None:
        fix = "install it, or set spec.workingDirectory to the directory that contains it"
        yield Problem(field, f"{name} (no module {top})", "a module", fix)


def _program(work: Path, words: tuple[str, ...]) -> Iterator[Problem]:
    """A program that each rank runs, and the shell script that it is given."""
    name = words[0]
    path = Path(shutil.which(name) or "") if "/" not in name else files.resolve(work, name)
    if not path.is_file():
        fix = "paths are relative to spec.workingDirectory; a program of it is ./NAME"
        yield Problem(COMMAND_FIELD, f"{name} (no such program)", "a program", fix)
        return
    if not os.access(path, os.X_OK):
        fix = f"`chmod +x {name}`, or name its interpreter: `bash {name}`"
        yield Problem(COMMAND_FIELD, f"{name} (not executable)", "a program", fix)
        return
    shells = ("bash", "sh", "dash", "zsh", "ksh")
    if path.name in shells and len(words) > 1 and not words[1].startswith("-"):
        inner = files.resolve(work, words[1])
        if not inner.is_file():
            fix = "paths are relative to spec.workingDirectory"
            yield Problem(COMMAND_FIELD, f"{words[1]} ({inner} does not exist)", "a script", fix)


def cut(written: str) -> str:
    """Shortens a name that is too long for a message."""
    return written if len(written) <= 200 else written[:197] + "..."


# -- accelerate ---------------------------------------------------------------------------------
def _accelerate(job: TrainingJob, program: Program, work: Path) -> Iterator[Problem]:
    """The sizes in accelerate's configuration file, which its own options override."""
    is_launched = program.launcher == "accelerate launch" and not program.is_foreign
    if is_launched and importlib.util.find_spec("accelerate") is None:
        got = "accelerate launch where accelerate is not installed"
        fix = "install it into Holdfast's Python, or name an environment in entrypoint.python"
        yield Problem(COMMAND_FIELD, got, "it in the Python of the workers", fix)
    config = launch_sizes.config_file(program, work, os.environ | job.spec.env)
    if config is None:
        return
    written, path = config
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text"
        expected = "a configuration file of accelerate, relative to spec.workingDirectory"
        yield Problem(COMMAND_FIELD, f"accelerate's file {written} ({why})", expected)
        return
    from ..api.v1alpha1 import load

    try:
        settings = load.read_yaml(text)
    except load.BadDocument as error:
        yield Problem(COMMAND_FIELD, f"accelerate's file {written} ({error})", "a YAML file")
        return
    sizes = {size.of for size in program.sizes}
    nodes, workers = job.spec.nodes.max, job.spec.workers_per_node
    wanted = {"num_machines": ("nodes", nodes, f"nodes.max {nodes}"),
              "num_processes": ("world", nodes * workers,
                                f"nodes.max {nodes} x workersPerNode {workers}")}  # fmt: skip
    for key, (kind, right, has) in wanted.items():
        value = settings.get(key) if isinstance(settings, dict) else None
        if isinstance(value, int) and value > 0 and kind not in sizes and value != right:
            got = f"{key}: {value} in {written} with {has}"
            option = "--nodes" if kind == "nodes" else "--workers"
            fix = f"change the spec (without one: {option}), or {key}: {right} in the file"
            yield Problem(COMMAND_FIELD, got, "the same numbers", fix)
