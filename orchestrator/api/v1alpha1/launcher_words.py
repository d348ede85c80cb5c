"""Which words start ranks: the names, files and modules of launchers, also behind other programs.

A worker that ran one of them would start ranks inside its rank. This module alone decides what a
launcher is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from .shell_text import commands

READ = {"torchrun": "torchrun", "accelerate-launch": "accelerate launch",
        "deepspeed": "deepspeed", "deepspeed.pt": "deepspeed", "ds": "deepspeed"}  # fmt: skip
"""Programs whose lines launchers.py reads."""
READ_MODULES = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
ACCELERATE = ("accelerate", "accelerate.commands.accelerate_cli")
"""A program and a module: launchers with the word `launch` behind them."""
SWIFT = ("swift", "swift.cli.main")
SWIFT_VERBS = {"sft", "pt", "rlhf"}
"""ms-swift's program and module: with these words they start torchrun, if NPROC_PER_NODE is set."""
_OTHERS = {"srun", "sbatch", "mpirun", "mpiexec", "orterun", "prterun", "horovodrun", "jsrun",
           "aprun", "trl"}  # fmt: skip
_OTHER_MODULES = {"horovod.runner", "horovod.runner.launch", "horovod.run", "trl.cli",
                  "trl.cli.main", "deepspeed.launcher.launch", "torch.distributed.launcher.api",
                  "lightning.fabric.cli", "lightning_fabric.cli"}  # fmt: skip
_CLEAR = {"torchrun", "srun", "mpirun", "mpiexec", "orterun", "horovodrun", "accelerate-launch",
          "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner",
          "accelerate.commands.launch"}  # fmt: skip
"""They mean a launcher wherever they stand; `--strategy deepspeed` does not."""

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
RUNNERS: dict[str, set[str]] = {
    "uv": _UV_VALUES,
    **dict.fromkeys(("conda", "mamba", "micromamba"), _CONDA_VALUES),
    "poetry": set(),
    "pipenv": set(),
    "pdm": set(),
    "pixi": {"-e", "--environment", "--manifest-path"},
}
"""First word, before `run` -> options with a value."""
_TEMPORARY_VALUES = {"-w", "--with", "--with-editable", "--with-requirements", "--from"}
_SHELLS = {"bash", "sh", "dash", "zsh", "ksh"}
_WRAPPERS = {
    "nohup", "timeout", "time", "nice", "ionice", "taskset", "numactl", "chrt", "setsid", "stdbuf",
    "env", "exec", "command", "builtin", "sudo", "strace", "ltrace", "perf", "gdb", "valgrind",
    "nsys", "ncu", "nvprof", "rocprof", "rocprofv3", "py-spy", "memray", "scalene", "viztracer",
    "coverage", "kernprof", "debugpy", "cProfile", "pdb", "ipdb", "xvfb-run", "unbuffer", "tini",
    "dumb-init", "catatonit", "flock", "unshare", "prlimit", "systemd-run", "direnv", "dotenv",
    "doppler", "apptainer", "singularity", "enroot", "xargs", "parallel",
}  # fmt: skip
"""Programs and modules that run the words behind their options."""
_INSTALLERS = {*RUNNERS, "uvx", "pipx", "hatch", "rye"}
"""They run a program in an environment, and install packages, also those of launchers."""

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)
PYTHON = re.compile(r"python(\d(\.\d+)?t?)?")
_PYTHON_VALUES = ("-X", "-W", "--check-hash-based-pycs")
_SCRIPTS = (".py", ".sh", ".pyz")


def launcher(word: str, following: str = "") -> str:
    """The launcher that a word names, as a program, a file or a module; "" for anything else.
    `following`: the word after it."""
    name = program_name(word)
    if found := READ.get(name) or READ_MODULES.get(word) or READ_MODULES.get(_module(word)):
        return found
    if following == "launch" and (name in ACCELERATE or word in ACCELERATE):
        return "accelerate launch"
    if (name in SWIFT or word in SWIFT) and following.replace("_", "-") in SWIFT_VERBS:
        return "swift"
    if name in _OTHERS:
        return name
    return word if word in _OTHER_MODULES else ""


def program_name(word: str) -> str:
    """Without its directory, and without the name of an implementation: mpirun.openmpi."""
    name = PurePosixPath(word).name
    return name.partition(".")[0] if re.fullmatch(r"(mpirun|mpiexec|orterun)\..+", name) else name


def _module(path: str) -> str:
    """Of torch/distributed/run.py wherever it is; "": not one of a launcher."""
    if not path.endswith(".py") or "/" not in path:
        return ""
    dotted = "." + path.removesuffix(".py").replace("/", ".")
    return next((m for m in READ_MODULES if "." in m and dotted.endswith("." + m)), "")


def started(words: Sequence[str]) -> str:
    """The word with which a command starts ranks, also behind other programs; "": none."""
    rest = list(words)
    while rest and _ASSIGNMENT.fullmatch(rest[0]):
        rest = rest[1:]
    if not rest:
        return ""
    name = program_name(rest[0])
    if launcher(rest[0], *rest[1:2]):
        return name
    if name in _INSTALLERS:
        return _in_environment(name, rest[1:])
    if PYTHON.fullmatch(name):
        return _by_python(rest[1:])
    if name in _SHELLS:
        return _by_shell(rest[1:])
    if name == "eval":
        return _in_text(" ".join(rest[1:]))
    if rest[0].startswith(("$", "-")):  # in a script: a variable, or behind $(which python)
        return anywhere(rest)
    is_question = name == "command" and rest[1:2] in (["-v"], ["-V"])
    return _behind(rest) if name in _WRAPPERS and not is_question else ""


def in_shell(text: str) -> tuple[str, str] | None:
    """The first command of a shell script that starts ranks: (its launcher, its words)."""
    for words in commands(text):
        if found := started(words) or _in_a_variable(words):
            return found, " ".join(words)
    return None


def _in_a_variable(words: list[str]) -> str:
    """Of `CMD="torchrun --nnodes 2"`, which another line runs."""
    given = words[1:] if words[0] in ("export", "local", "readonly", "declare") else words
    lines = [word.partition("=")[2] for word in given if _ASSIGNMENT.fullmatch(word)]
    if len(lines) < len(given):
        return ""
    return next((found for line in lines if " " in line and (found := _in_text(line))), "")


def anywhere(words: Sequence[str]) -> str:
    """A word that means a launcher wherever it stands, for programs that are not known."""
    inner = [part for word in words for part in word.split()]
    for at, word in enumerate(inner):
        name = program_name(word)
        if name in _CLEAR or (name == "accelerate" and inner[at + 1 : at + 2] == ["launch"]):
            return name
    return ""


def _by_python(words: list[str]) -> str:
    """What follows an interpreter."""
    while words and words[0].startswith("-") and not words[0].startswith("-m"):
        words = words[2:] if words[0] in _PYTHON_VALUES else words[1:]
    words = python_words(words)
    if words[:1] == ["-m"]:
        words = words[1:]
        is_wrapper = bool(words) and words[0] in _WRAPPERS | _INSTALLERS
        return started(words) if is_wrapper else _named(words)
    return _named(words)


def _named(words: list[str]) -> str:
    return program_name(words[0]) if words and launcher(words[0], *words[1:2]) else ""


def python_words(words: list[str]) -> list[str]:
    """The same with `-m MODULE` for `-mMODULE`."""
    if words and words[0].startswith("-m") and len(words[0]) > 2:
        return ["-m", words[0][2:], *words[1:]]
    return words


def _in_text(text: str) -> str:
    found = in_shell(text)
    return found[0] if found else ""


def _by_shell(words: list[str]) -> str:
    for at, word in enumerate(words):
        is_value = at > 0 and re.fullmatch(r"[-+]\w*[oO]", words[at - 1])  # set -o NAME
        if not word.startswith(("-", "+")) and not is_value:
            return ""  # a script, which is looked at where the files are
        if re.fullmatch(r"-[a-z]*c", word):
            return _in_text(" ".join(words[at + 1 : at + 2]))
    return ""


def _in_environment(name: str, words: list[str]) -> str:
    """`uv run PROGRAM`."""
    if name != "uvx":
        words = words[words.index("run") + 1 :] if "run" in words else []
    values = RUNNERS.get(name, _UV_VALUES) | _TEMPORARY_VALUES
    while words and words[0].startswith("-") and words[0] != "--":
        if name == "uv" and words[0] in ("-m", "--module"):
            return _named(words[1:])
        words = words[2:] if words[0] in values else words[1:]
    return started(words[1:] if words[:1] == ["--"] else words)


def _behind(words: list[str]) -> str:
    """Behind a program whose options are not known: each word to the first script is tried."""
    for at in range(1, len(words)):
        word, rest = words[at], words[at:]
        name = program_name(word)
        if word.startswith("-m") and (found := _by_python(rest)):
            return found
        if name in _INSTALLERS or name in _SHELLS or PYTHON.fullmatch(name):
            return started(rest)
        if launcher(word, *rest[1:2]):
            return name
        if word.endswith(_SCRIPTS):
            return ""
    return ""
