"""Names of launchers: programs, files and modules that start ranks. This module alone decides what
a launcher is.

workers/agent/pool/shims/sitecustomize.py loads this file in each Python that a rank starts, from
3.8 on, so it imports next to nothing.
"""

from __future__ import annotations

import posixpath

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
SWIFT_VERBS = ("sft", "pt", "rlhf")
"""ms-swift's program and module: with these words they start torchrun, if NPROC_PER_NODE is set."""
OTHER_MODULES = ("horovod.runner", "horovod.runner.launch", "horovod.run", "trl.cli",
                 "trl.cli.main", "deepspeed.launcher.launch", "torch.distributed.launcher.api",
                 "lightning.fabric.cli", "lightning_fabric.cli")  # fmt: skip
"""Launchers whose lines are not read."""
REPLACED = (*READ.values(), *READ_MODULES.values())
"""Launchers that do not start ranks inside a rank: a shim runs their script there."""


def launched(words: list[str]) -> tuple[str, list[str]]:
    """The launcher that a program, a file or a module with its arguments is, and the words that are
    the launcher's; ("", words) for anything else."""
    if not words:
        return "", words
    word, rest = words[0], words[1:]
    name, verb = program_name(word), rest[0] if rest else ""
    launcher = READ.get(name) or READ_MODULES.get(word) or READ_MODULES.get(_module(word))
    if launcher:
        return launcher, rest
    if verb == "launch" and (name in ACCELERATE or word in ACCELERATE):
        return "accelerate launch", rest[1:]
    if verb.replace("_", "-") in SWIFT_VERBS and (name in SWIFT or word in SWIFT):
        return "swift", rest
    return (word, rest) if word in OTHER_MODULES else ("", words)


def program_name(word: str) -> str:
    """Program's name without directory and implementation: mpirun.openmpi."""
    name = posixpath.basename(word)
    first = name.partition(".")[0]
    return first if first in ("mpirun", "mpiexec", "orterun") else name


def _module(path: str) -> str:
    """Module of a launcher's file, such as torch/distributed/run.py wherever it is; "": none."""
    dotted = "." + path[: -len(".py")].replace("/", ".") if path.endswith(".py") else ""
    return next((m for m in READ_MODULES if "." in m and dotted.endswith("." + m)), "")


def python_program(words: list[str]) -> tuple[list[str], bool, list[str]]:
    """Words behind a Python: (its options, whether it runs a module, script or module with its
    arguments). `-c TEXT` counts as an option."""
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word.startswith("--"):
            options += [
                word,
                *([rest.pop(0)] if word == "--check-hash-based-pycs" and rest else []),
            ]
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter not in "mcXW":
                options.append("-" + letter)
                continue
            value = [word[place:]] if word[place:] else [rest.pop(0)] if rest else []
            if letter == "m":
                return options, True, value + rest
            options += ["-" + letter, *value]
            if letter == "c":
                return options, False, []
            break
    return options, False, rest
