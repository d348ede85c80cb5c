"""Reads `entrypoint.command`: what a worker starts when a user gives the line of a shell.

No shell runs the line. A launcher (launchers.py) is not started: what it would start is. The result
follows from the text alone; whether files exist is checked elsewhere.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from . import launcher_words, launchers
from .launcher_words import ACCELERATE, PYTHON, RUNNERS, program_name
from .launchers import CommandRefused, Size


@dataclass(frozen=True)
class Program:
    """What each worker starts: a script, a module, or the words of another program."""

    script: str | None = None
    module: str | None = None
    words: tuple[str, ...] = ()
    """Of a program that is not run by Holdfast's Python."""
    args: tuple[str, ...] = ()
    """Of the script or module."""
    python: str = ""
    """Interpreter, or directory of an environment; "": the one of the workers."""
    runner: tuple[str, ...] = ()
    """Words that run a command in an environment, such as `uv run`; python follows them."""
    env: dict[str, str] = field(default_factory=dict)
    launcher: str = ""
    launcher_args: tuple[str, ...] = ()
    """For accelerate's own code, which turns them into variables."""
    local_rank_option: str = ""
    """The option with which the launcher gives the script its local rank; "": none."""
    sizes: tuple[Size, ...] = ()
    replaced: tuple[str, ...] = ()
    """Options of the launcher that Holdfast replaces."""
    counts: str = ""
    """What in the line would count the devices of a machine; "": the line has the number."""

    @property
    def is_foreign(self) -> bool:
        """Whether another program than the forked worker runs: no warm start."""
        return bool(self.words or self.python or self.runner)

    def with_arguments(self, words: Iterable[str]) -> Program:
        """The same with further arguments at the end."""
        if self.words:
            return replace(self, words=(*self.words, *words))
        return replace(self, args=(*self.args, *words))

    def __str__(self) -> str:
        return self.script or self.module or shlex.join(self.words)


IN_A_SCRIPT = "put the line into a shell script and write `command: bash run.sh`"

_OPERATORS = {
    "|": ("a pipeline", "its exit code hides that the first program failed; remove it: `holdfast "
          "logs` has each rank's output"),
    ">": ("a redirection", "all ranks would write one file; remove it: `holdfast logs` has each "
          "rank's output"),
    "<": ("a redirection", IN_A_SCRIPT),
    "&": ("a command in the background", IN_A_SCRIPT),
    "&&": ("several commands", "for `cd DIRECTORY` write spec.workingDirectory, for `export` "
           f"spec.env; otherwise {IN_A_SCRIPT}"),
    "||": ("several commands", IN_A_SCRIPT),
    ";": ("several commands", "for `cd DIRECTORY` write spec.workingDirectory, for `export` "
          f"spec.env; otherwise {IN_A_SCRIPT}"),
    "(": ("a subshell", IN_A_SCRIPT),
    ")": ("a subshell", IN_A_SCRIPT),
}  # fmt: skip

_STARTS_RANKS = "Holdfast starts the ranks; write the line that it would start on one of them"
_EACH_RANK = "each rank would start ranks; write the line that runs on one rank"
_NOT_STARTED = {
    **dict.fromkeys(("srun", "sbatch", "salloc", "mpirun", "mpiexec", "orterun", "horovodrun",
                     "jsrun", "aprun", "pdsh", "ssh", "torchx", "sky"), _STARTS_RANKS),
    **dict.fromkeys(("docker", "podman", "kubectl"),
                    "its processes would not end with the worker; write the line that runs inside, "
                    "and spec.image on Kubernetes"),
    **dict.fromkeys(("ray",), "use `holdfast submit --ray`; write the line of the training script"),
    **dict.fromkeys(("sudo", "su"), "the worker could not be ended; remove it"),
    **dict.fromkeys(("cd", "export", "source", ".", "exec", "eval", "set", "ulimit", "module",
                     "if", "for", "while", "time"),
                    f"a shell would do this; for `cd` write spec.workingDirectory, for `export` "
                    f"spec.env; otherwise {IN_A_SCRIPT}"),
    **dict.fromkeys(("jupyter", "ipython", "papermill"),
                    "write a Python file (`jupyter nbconvert --to script`)"),
    "trl": "it starts accelerate launch itself; for `trl sft ARGS` write `accelerate launch -m "
           "trl.scripts.sft ARGS`",
    **dict.fromkeys(("llamafactory-cli", "swift", "axolotl", "tune", "colossalai", "composer",
                     "fabric", "lightning"),
                    "it may start workers itself; write the script or module that it starts"),
}  # fmt: skip
"""First word -> why it is not started, and what to write."""

_UV_TEMPORARY = ("-w", "--with", "--with-editable", "--with-requirements", "--isolated", "-s",
                 "--script", "--gui-script")  # fmt: skip
"""With these uv makes an environment for one command, so uv itself is started."""
_SHELL_TEXT = re.compile(
    r'(?:(?<=\s)|^)(?:\S*/)?(?:ba|da|z|k)?sh(?:\s+(?:-\S+|pipefail))*?\s+-\w*c\s+"(?:\\.|[^"\\])*"'
)
"""A shell and the text that it reads, such as `sh -c "train $P"`: it replaces variables."""
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_HARMLESS = ("-u",)
"""Options of Python without effect here: a worker's output is written line by line."""


def is_known(word: str) -> bool:
    """Whether a line that begins with this word is a command that is recognised, or refused by its
    name."""
    name = program_name(word)
    return bool(
        launcher_words.launcher(word)
        or name in RUNNERS
        or name in _NOT_STARTED
        or name == "accelerate"
        or PYTHON.fullmatch(name)
    )


@functools.lru_cache(maxsize=64)
def read(line: str) -> Program:
    """What each worker starts for a command. Raises CommandRefused."""
    words = _split(line)
    env: dict[str, str] = {}
    words = _without_variables(words, env)
    if not words:
        raise CommandRefused(
            "no program", "the program and its arguments", "variables go into spec.env"
        )
    found = _read(words)
    if found.launcher == "swift":
        sizes, replaced, counts = launchers.swift_variables(env)
        found = replace(found, sizes=sizes, replaced=replaced, counts=counts)
    return replace(found, env=env)


def _split(line: str) -> list[str]:
    text = re.sub(r"\\\r?\n", " ", line).strip()
    if "\n" in text:
        raise CommandRefused(
            "several lines", "one command", f"end a line with \\ to go on; {IN_A_SCRIPT}"
        )
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise CommandRefused(f"a line with {str(error).lower()}", "quotes in pairs") from None
    bare = _SHELL_TEXT.sub('""', re.sub(r"'[^']*'", "''", text))
    if found := re.search(r"\$\(|`|\$[\w{]+\}?", bare):
        raise CommandRefused(
            f"{found[0]}, which a shell would replace",
            "the value itself: no shell reads the line",
            f"ranks and sizes are in the environment, see WORLD_SIZE; otherwise {IN_A_SCRIPT}",
        )
    outside = re.sub(r'"(\\.|[^"\\])*"', '""', bare)
    outside = re.sub(r"\\.", "", outside)
    for operator in re.findall(r"&&|\|\||[|&;<>()]", outside):
        what, fix = _OPERATORS[operator]
        raise CommandRefused(f"{what} ({operator})", "one command", fix)
    if found := re.search(r"(^|\s|=)~|[*?]", outside):
        raise CommandRefused(
            f"{found[0].strip()}, which a shell would replace",
            "names in full: no shell reads the line",
            f"quote it if it is meant so; otherwise {IN_A_SCRIPT}",
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
    is_read = launcher_words.launcher(*words[:2]) in launchers.NAMES  # `swift sft`, not `swift`
    if not is_read and (fix := _NOT_STARTED.get(name)):
        raise CommandRefused(words[0], "a program that is one rank", fix)
    if name in RUNNERS and rest[:1] == ["run"]:
        return _in_environment(words)
    if PYTHON.fullmatch(name):
        return _python(words)
    has_place = "/" in words[0] and not words[0].endswith(".py")
    beside = str(PurePosixPath(words[0]).with_name("python")) if has_place else ""
    if (found := _launcher(words)) is not None:
        return replace(found, python=beside)
    if name == "accelerate":
        raise CommandRefused(" ".join(words[:2]), "accelerate launch", "write the script itself")
    if words[0].endswith(".py"):
        return Program(script=words[0], args=tuple(rest))
    return _plain(words)


def _launcher(words: list[str]) -> Program | None:
    """Of a program, a file or a module with its arguments; None: it is no launcher."""
    found = launcher_words.launcher(words[0], *words[1:2])
    if not found:
        return None
    if found not in launchers.NAMES:
        expected = "a program that is one rank"
        raise CommandRefused(words[0], expected, _NOT_STARTED.get(found, _STARTS_RANKS))
    has_verb = words[0] in ACCELERATE or program_name(words[0]) in ACCELERATE
    return _launched(found, words[2:] if has_verb else words[1:])


def _plain(words: list[str]) -> Program:
    if name := launcher_words.started(words) or launcher_words.anywhere(words):
        fix = _NOT_STARTED.get(name, _EACH_RANK)
        raise CommandRefused(f"{name} behind {words[0]}", "the launcher first, or none", fix)
    return Program(words=tuple(words))


def _python(words: list[str]) -> Program:
    name, rest = words[0], words[1:]
    python = "" if name in ("python", "python3") else name
    while rest and rest[0] in _HARMLESS:
        rest = rest[1:]
    rest = launcher_words.python_words(rest)
    if not rest or rest == ["-"]:
        raise CommandRefused(f"{name} without a script", "a script, or -m and a module")
    if rest[0].startswith("-") and (rest[0] != "-m" or len(rest) == 1):
        return _plain(words)  # an option that only a new interpreter can follow
    is_module = rest[0] == "-m"
    rest = rest[1:] if is_module else rest
    if (found := _launcher(rest)) is not None:
        return replace(found, python=python)
    if launcher_words.started(words):
        return _plain(words)  # refused
    if is_module:
        return Program(module=rest[0], args=tuple(rest[1:]), python=python)
    return Program(script=rest[0], args=tuple(rest[1:]), python=python)


def _module_or_file(words: tuple[str, ...]) -> str:
    return words[0] if launcher_words.launcher(*words[:2]) else ""


def _launched(launcher: str, words: list[str]) -> Program:
    found = launchers.read(launcher, words)
    inner = (found.word, *found.args)
    name = launcher_words.started(inner) if found.is_program else _module_or_file(inner)
    if name:
        raise CommandRefused(f"{name} behind {launcher}", "one of both", _EACH_RANK)
    common = Program(
        launcher=launcher,
        launcher_args=found.kept,
        sizes=found.sizes,
        replaced=found.replaced,
        counts=found.counts,
    )
    if found.is_program:
        return replace(common, words=(found.word, *found.args))
    local_rank = launchers.LOCAL_RANK[launcher] if found.passes_local_rank else ""
    if found.is_module:
        return replace(common, module=found.word, args=found.args, local_rank_option=local_rank)
    return replace(common, script=found.word, args=found.args, local_rank_option=local_rank)


def _in_environment(words: list[str]) -> Program:
    """`uv run`, `conda run -n NAME` and others."""
    values, name = RUNNERS[program_name(words[0])], " ".join(words[:2])
    at, module = 2, False
    while at < len(words) and words[at].startswith("-"):
        option = words[at]
        if option in _UV_TEMPORARY or option.startswith("--with"):
            return _plain(words)
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
    found = _python(["python", "-m", *inner]) if module else _read(inner)
    if found.words and not found.launcher:
        return _plain(words)
    if found.python or found.runner:
        raise CommandRefused(
            f"{name} before {inner[0]}",
            "one of both",
            f"an interpreter with a path or version is not the one of {name}",
        )
    return replace(found, runner=runner)
