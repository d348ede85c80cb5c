"""`python -m tests.mutants`: which small changes of orchestrator/core do its tests notice?

Every mutant runs in a child process with a time limit: the tests beside the mutated module
first, then tests/unit/core, then seeds of the simulation, until one fails. It reports the share
that was noticed, and lists the others. `equivalent.txt` has mutants that change nothing that can be
observed, each with the reason; they do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from .mutate import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "orchestrator" / "core"
TESTS = ROOT / "tests" / "unit" / "core"
PACKAGE = "holdfast.orchestrator.core"
EQUIVALENT = Path(__file__).parent / "equivalent.txt"
SKIPPED = ("transitions.py:diagram", "transitions.py:page")
GOAL = 0.97


def _swap(mutant: Mutant) -> None:
    """Give the function of the mutant its changed code; tests that are imported already call it."""
    module = sys.modules[f"{PACKAGE}.{mutant.module.removesuffix('.py')}"]
    code = compile(mutant.source, str(module.__file__), "exec")
    target: Any = module
    for name in mutant.function.split("."):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
        target = vars(target)[name]
    target = target.fget if isinstance(target, property) else target
    target = target.__func__ if isinstance(target, classmethod) else target
    target.__code__ = code


def _passes(module: str, seeds: int) -> bool:
    """The tests beside the module, then all of them, then the simulation."""
    import pytest

    quick = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"]
    near = TESTS / f"test_{module}"
    for chosen in ([near] if near.exists() else [], [TESTS]):
        if chosen and pytest.main([*quick, *map(str, chosen)]) != 0:
            return False
    from tests.sim.run_seed import play

    for seed in range(seeds):
        play(seed)
    return True


def _noticed(mutant: Mutant, seeds: int, limit_s: float) -> bool:
    pid = os.fork()
    if pid == 0:
        _child(mutant, seeds)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def _child(mutant: Mutant, seeds: int) -> None:
    status = 1
    with contextlib.suppress(BaseException):
        _swap(mutant)
        with _silence():
            status = 0 if _passes(mutant.module, seeds) else 1
    os._exit(status)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    kept = [os.dup(1), os.dup(2)]
    quiet = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(quiet, number)
    yield
    for number, before in enumerate(kept, 1):
        os.dup2(before, number)


def _equivalent() -> dict[str, str]:
    """Name of a mutant -> reason."""
    known: dict[str, str] = {}
    for line in EQUIVALENT.read_text(encoding="utf-8").splitlines():
        name, separator, reason = line.partition(" | ")
        if separator:
            known[name] = reason
    return known


def _all(only: str) -> list[Mutant]:
    files = sorted(p for p in CORE.glob("*.py") if p.name != "__init__.py")
    found = [m for p in files for m in mutants(p.name, p.read_text(encoding="utf-8"))]
    return [m for m in found if not m.name.startswith(SKIPPED) and only in m.name]


def _work(chosen: list[Mutant], number: int, of: int, options: argparse.Namespace) -> None:
    """Write the survivors of every `of`-th mutant, one a line."""
    path = Path(f"{options.out}.{number}")
    with path.open("w", encoding="utf-8", buffering=1) as out:
        for mutant in chosen[number::of]:
            if not _noticed(mutant, options.seeds, options.limit):
                out.write(f"{mutant.line}\t{mutant.name}\n")
            else:
                out.write("\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="so many at random; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=60, help="of the simulation")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one mutant")
    parser.add_argument("--only", default="", help="part of the mutant's name, such as nodes.py")
    parser.add_argument("--out", default="/tmp/mutants", help="progress, one file per process")
    options = parser.parse_args()
    with _silence():
        passes = _passes("", options.seeds)  # this imports all that the mutants need
    if not passes:
        print("the tests fail without any mutant")
        return 2
    known, chosen = _equivalent(), _all(options.only)
    stale = [name for name in known if options.only in name] if not options.sample else []
    stale = [name for name in stale if name not in {mutant.name for mutant in chosen}]
    chosen = [mutant for mutant in chosen if mutant.name not in known]
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    children = []
    for number in range(options.processes):
        pid = os.fork()
        if pid == 0:
            _work(chosen, number, options.processes, options)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    lines = [
        line
        for number in range(options.processes)
        for line in Path(f"{options.out}.{number}").read_text(encoding="utf-8").splitlines()
    ]
    survivors = sorted(line.split("\t") for line in lines if line)
    for line, name in sorted(survivors, key=lambda one: (one[1].split(":")[0], int(one[0]))):
        print(f"line {line}: {name}")
    share = 1 - len(survivors) / max(1, len(lines))
    print(
        f"{len(lines)} mutants, {len(lines) - len(survivors)} noticed: {share:.1%}; "
        f"{len(known)} equivalent ones are listed in {EQUIVALENT.relative_to(ROOT)}"
    )
    for name in stale:
        print(f"listed as equivalent, but no such mutant: {name}")
    return 0 if share >= GOAL and not stale else 1


if __name__ == "__main__":
    sys.exit(main())
