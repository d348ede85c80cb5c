"""Reads `entrypoint.command`: what a worker starts when a user gives the line of a shell.

No shell runs the line. A launcher (launchers.py) is not started: what it would start is. The result
follows from the text alone; whether files exist is checked elsewhere.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import PurePosixPath

from .. import launchers
from ..launcher_names import launched, program_name, python_program
from ..launchers import STARTS_RANKS, CommandRefused, Program

IN_A_SCRIPT = "put the line into a shell script and write `command: bash run.sh`"

_BY_A_SHELL = (
    "quote it if it is meant so; for `cd DIRECTORY` write spec.workingDirectory, for `export` "
    f"spec.env; otherwise {IN_A_SCRIPT}"
)
_NOT_STARTED = {
    **dict.fromkeys(("srun", "sbatch", "salloc", "mpirun", "mpiexec", "orterun", "prterun",
                     "horovodrun", "jsrun", "aprun", "pdsh", "ssh", "torchx", "sky"),
                    STARTS_RANKS),
    **dict.fromkeys(("docker", "podman", "kubectl"),
                    "its processes would not end with the worker; write the line that runs inside, "
                    "and spec.image on Kubernetes"),
    **dict.fromkeys(("ray",), "use `holdfast submit --ray`; write the line of the training script"),
    **dict.fromkeys(("sudo", "su"), "the worker could not be ended; remove it"),
    **dict.fromkeys(("cd", "export", "source", ".", "exec", "eval", "set", "ulimit", "module",
                     "if", "for", "while", "time"),
                    _BY_A_SHELL),
    **dict.fromkeys(("jupyter", "ipython", "papermill"),
                    "write a Python file (`jupyter nbconvert --to script`)"),
    "trl": "it starts accelerate launch itself; for `trl sft ARGS` write `accelerate launch -m "
           "trl.scripts.sft ARGS`",
    **dict.fromkeys(("llamafactory-cli", "swift", "axolotl", "tune", "colossalai", "composer",
                     "fabric", "lightning"),
                    "it may start workers itself; write the script or module that it starts"),
}  # fmt: skip
"""First word -> why it is not started, and what to write."""

_UV_VALUES = {
    "--extra", "--no-extra", "--group", "--no-group", "--only-group", "--no-editable-package",
    "--env-file", "--package", "--python-platform", "--index", "--default-index", "-i",
    "--index-url", "--extra-index-url", "-f", "--find-links", "--index-strategy",
    "--keyring-provider", "-P", "--upgrade-package", "--upgrade-group", "--resolution",
    "--prerelease", "--prerelease-package", "--fork-strategy", "--exclude-newer",
    "--exclude-newer-package", "--no-sources-package", "--reinstall-package", "--link-mode", "-C",
    "--config-setting", "--config-settings-package", "--no-build-isolation-package",
    "--no-build-package", "--no-binary-package", "--cache-dir", "--refresh-package", "-p",
    "--python", "--color", "--allow-insecure-host", "--directory", "--project", "--config-file",
}  # fmt: skip
"""Options of `uv run` with a value, of uv 0.13."""
_CONDA_VALUES = {"-n", "--name", "-p", "--prefix", "--cwd", "-a", "--attach", "-r", "--root-prefix"}
_RUNNERS: dict[str, set[str]] = {
    "uv": _UV_VALUES,
    **dict.fromkeys(("conda", "mamba", "micromamba"), _CONDA_VALUES),
    "poetry": set(),
    "pipenv": set(),
    "pdm": set(),
    "pixi": {"-e", "--environment", "--manifest-path"},
}
"""First word, before `run` -> options with a value."""
_PYTHON = re.compile(r"python(\d(\.\d+)?t?)?")
_UV_TEMPORARY = ("-w", "--with", "--with-editable", "--with-requirements", "--isolated", "-s",
                 "--script", "--gui-script")  # fmt: skip
"""Options with which uv makes an environment for one command, so uv itself is started."""
_SHELL_TEXT = re.compile(
    r'(?:(?<=\s)|^)(?:\S*/)?(?:ba|da|z|k)?sh(?:\s+(?:-\S+|pipefail))*?\s+-\w*c\s+"(?:\\.|[^"\\])*"'
)
"""A shell and the text that it reads, such as `sh -c "train $P"`: it replaces variables."""
_REPLACED = re.compile(r"\$\(|`|\$[\w{]+\}?")
_OPERATOR = re.compile(r"&&|\|\||[|&;<>()*?]|((?<=[\s=])|^)~")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_HARMLESS = {"-u"}
"""Options of Python without effect here: a worker's output is written line by line."""


def is_known(word: str) -> bool:
    """True if a line that begins with this word is a command that is recognised, or rejected by its
    name."""
    name = program_name(word)
    return bool(
        launched([word])[0]
        or name in _RUNNERS
        or name in _NOT_STARTED
        or name == "accelerate"
        or _PYTHON.fullmatch(name)
    )


def read(line: str) -> Program:
    """Program that each worker starts for a command. Raises CommandRefused."""
    words = _split(line)
    env: dict[str, str] = {}
    words = _without_variables(words, env)
    if not words:
        raise CommandRefused(
            "no program", "the program and its arguments", "variables go into spec.env"
        )
    program = _read(words)
    if program.launcher == "swift":
        sizes, replaced, counts = launchers.swift_variables(env)
        program = replace(program, sizes=sizes, replaced=replaced, counts=counts)
    return replace(program, env=env)


def _split(line: str) -> list[str]:
    text = re.sub(r"\\\r?\n", " ", line).strip()
    if "\n" in text:
        raise CommandRefused(
            "several lines", "one command", f"end a line with \\ to continue it; {IN_A_SCRIPT}"
        )
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise CommandRefused(f"a line with {str(error).lower()}", "quotes in pairs") from None
    bare = _SHELL_TEXT.sub('""', re.sub(r"'[^']*'", "''", text))
    outside = re.sub(r"\\.", "", re.sub(r'"(\\.|[^"\\])*"', '""', bare))
    if sign := _REPLACED.search(bare) or _OPERATOR.search(outside):
        raise CommandRefused(
            f"{sign[0]}, which is for a shell", "one command: no shell reads the line", _BY_A_SHELL
        )
    return words


def _without_variables(words: list[str], env: dict[str, str]) -> list[str]:
    """The words after `A=B` and `env A=B`; the variables go into `env`."""
    if words and words[0] == "env":
        words = words[1:]
        if words and words[0].startswith("-"):
            got, fix = f"env with {words[0]}", "write variables in spec.env"
            raise CommandRefused(got, "env with variables only", fix)
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        env[match[1]] = match[2]
        words = words[1:]
    return _without_variables(words, env) if words[:1] == ["env"] else words


def _read(words: list[str]) -> Program:
    """A command without variables before it."""
    name, rest = program_name(words[0]), words[1:]
    if launched(words)[0] in launchers.NAMES:
        has_place = "/" in words[0] and not words[0].endswith(".py")
        beside = str(PurePosixPath(words[0]).with_name("python")) if has_place else ""
        return replace(started(words, is_module=False), python=beside)
    if fix := _NOT_STARTED.get(name):  # `swift deploy` too
        raise CommandRefused(words[0], "a program that is one rank", fix)
    if name in _RUNNERS and rest[:1] == ["run"]:
        return _in_environment(words)
    if _PYTHON.fullmatch(name):
        return _python(words)
    if name == "accelerate":
        raise CommandRefused(" ".join(words[:2]), "accelerate launch", "write the script itself")
    if words[0].endswith(".py"):
        return Program(script=words[0], args=tuple(rest))
    return Program(words=tuple(words))


def _python(words: list[str]) -> Program:
    name = words[0]
    options, is_module, rest = python_program(words[1:])
    if not set(options) <= _HARMLESS:  # an option that only a new interpreter can follow
        return Program(words=tuple(words))
    if not rest or rest == ["-"]:
        raise CommandRefused(f"{name} without a script", "a script, or -m and a module")
    python = "" if name in ("python", "python3") else name
    return replace(started(rest, is_module=is_module), python=python)


def started(words: list[str], *, is_module: bool) -> Program:
    """A script or module with its arguments, or a launcher, which is not started: what it would
    start is."""
    launcher, own = launched(words)
    if not launcher:
        script, module = (None, words[0]) if is_module else (words[0], None)
        return Program(script, module, args=tuple(words[1:]))
    if launcher not in launchers.NAMES:
        raise CommandRefused(words[0], "a program that is one rank", STARTS_RANKS)
    return launchers.read(launcher, own)


def _in_environment(words: list[str]) -> Program:
    """`uv run`, `conda run -n NAME` and others."""
    values, name = _RUNNERS[program_name(words[0])], " ".join(words[:2])
    at, module = 2, False
    while at < len(words) and words[at].startswith("-"):
        option = words[at]
        if option in _UV_TEMPORARY or option.startswith("--with"):
            return Program(words=tuple(words))
        if option in ("-m", "--module") and words[0].endswith("uv"):
            module = True
        at += 1
        if option == "--":
            break
        if option in values:
            at += 1
    inner = words[at:]
    if not inner or inner == ["-"]:
        raise CommandRefused(f"{name} without a program", "the script that it runs")
    runner = tuple(word for word in words[:at] if word not in ("-m", "--module", "--"))
    program = _python(["python", "-m", *inner]) if module else _read(inner)
    if program.words and not program.launcher:
        return Program(words=tuple(words))
    if program.python or program.runner:
        raise CommandRefused(
            f"{name} before {inner[0]}",
            "one of both",
            f"an interpreter with a path or version is not the one of {name}",
        )
    return replace(program, runner=runner)
