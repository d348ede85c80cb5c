"""`python -m tests.mutants`: which small changes of orchestrator/core do its tests notice?

Every mutant runs in a child process: the tests of tests/unit/core that execute the changed lines,
then such seeds of the simulation, until one fails. A check that takes several times its usual CPU
time has noticed the mutant too. The report has the share that was noticed, and lists the others.
`equivalent.txt` has mutants that change nothing that can be observed, each with the reason; they do
not count.

The folder of `--out` keeps what each check executes, and which check noticed which mutant: that one
is run first the next time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .checks import CORE, ROOT, SIMULATION, TESTS, Check, chosen_for, digest, measured
from .mutate import Mutant, mutants

PACKAGE = "holdfast.orchestrator.core"
EQUIVALENT = Path(__file__).parent / "equivalent.txt"
GOAL = 0.97
SURVIVED, NOTICED, BROKEN = 0, 1, 3
"""Exit codes of a mutant's process; BROKEN: the code could not be swapped."""
PATIENCE, LEAST_S = 4.0, 2.0
"""A check may take so many times its usual CPU time, and at least so many seconds."""


class Suite:
    """A pytest plugin: instead of running the collected tests once, it judges the mutants."""

    def __init__(self, options: argparse.Namespace, chosen: list[Mutant]) -> None:
        self._options, self._chosen = options, chosen
        self._out = Path(options.out)
        self.failure = ""
        """The failure of a check without any mutant."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        checks = self._checks(session)
        try:
            measured(checks, self._out / "checks.pickle")
        except (AssertionError, Exception) as problem:
            self.failure = f"a check fails without any mutant: {problem!r}"
            return True
        before = verdicts(self._out)
        gc.freeze()
        pids = []
        for number in range(self._options.processes):
            pid = os.fork()
            if pid == 0:
                self._work(self._chosen[number :: self._options.processes], checks, before)
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            self._failed = f"{item.nodeid}: {call.excinfo.exconly()}"

    def _checks(self, session: pytest.Session) -> list[Check]:
        from tests.sim.run_seed import play

        def test(item: pytest.Item) -> None:
            self._failed = ""
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            assert not self._failed, self._failed

        def of_test(item: pytest.Item) -> Check:
            files = [*core, item.path, TESTS / "harness.py"]
            return Check(item.nodeid, lambda: test(item), digest(files), {})

        def of_seed(seed: int) -> Check:
            return Check(f"seed {seed}", lambda: void(play(seed)), simulation, {})

        def void(_world: object) -> None:
            return None

        core = list(CORE.rglob("*.py"))
        simulation = digest([*core, *SIMULATION.glob("*.py")])
        return [of_test(item) for item in session.items] + [
            of_seed(seed) for seed in range(self._options.seeds)
        ]

    def _work(self, chosen: list[Mutant], checks: list[Check], before: dict[str, str]) -> None:
        with (self._out / "verdicts").open("a", encoding="utf-8", buffering=1) as out:
            for mutant in chosen:
                first = before.get(mutant.name, "")
                by = judged(mutant, chosen_for(mutant, checks, first))
                out.write(json.dumps([mutant.name, by]) + "\n")


def judged(mutant: Mutant, checks: list[Check]) -> str:
    """The name of the check that notices the mutant; empty: none does."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(mutant, checks, writer)
    os.close(writer)
    _pid, status = os.waitpid(pid, 0)
    begun = os.read(reader, 1 << 16)
    os.close(reader)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == BROKEN:
        raise RuntimeError(f"cannot make {mutant.name}")
    return "" if status == SURVIVED else checks[len(begun) - 1].name


def _child(mutant: Mutant, checks: list[Check], writer: int) -> None:
    """Write one byte as each check begins."""
    status = BROKEN
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        _swap(mutant)
        status = NOTICED
        for check in checks:
            os.write(writer, b".")
            limit_s = LEAST_S + PATIENCE * check.took_s
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            signal.alarm(round(100 * limit_s))  # it may sleep
            check.run()
        status = SURVIVED
    finally:
        os._exit(status)


def _swap(mutant: Mutant) -> None:
    """Give the function of the mutant its changed code; tests that are imported already call it."""
    path = mutant.module.removesuffix(".py").replace("/", ".")
    module = sys.modules[f"{PACKAGE}.{path}"]
    target: Any = module
    for name in mutant.function.split("."):
        target = vars(target)[name]
    target = target.fget if isinstance(target, property) else target
    target = target.__func__ if isinstance(target, classmethod | staticmethod) else target
    assert type(target) is type(_swap), f"{mutant.function} is a {type(target)}"
    target.__code__ = mutant.code(str(module.__file__))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    kept = [os.dup(1), os.dup(2)]
    quiet = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(quiet, number)
    yield
    for number, before in enumerate(kept, 1):
        os.dup2(before, number)


def equivalent() -> dict[str, str]:
    """Name of a mutant -> reason."""
    known: dict[str, str] = {}
    for line in EQUIVALENT.read_text(encoding="utf-8").splitlines():
        name, separator, reason = line.partition(" | ")
        if separator:
            known[name] = reason
    return known


def verdicts(out: Path) -> dict[str, str]:
    """Name of a mutant -> which check noticed it the last time; empty: none did."""
    path = out / "verdicts"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)


def every_mutant(only: str) -> list[Mutant]:
    files = sorted(p for p in CORE.rglob("*.py") if p.name != "__init__.py")
    names = {path: path.relative_to(CORE).as_posix() for path in files}
    found = [m for p in files for m in mutants(names[p], p.read_text(encoding="utf-8"))]
    return [m for m in found if only in m.name]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="so many at random; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=20, help="of the simulation, for one mutant")
    parser.add_argument("--only", default="", help="part of the mutant's name, such as nodes.py")
    parser.add_argument("--again", action="store_true", help="only those not noticed the last time")
    parser.add_argument("--out", default=str(ROOT / "build" / "mutants"), help="a folder")
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    known, chosen, before = equivalent(), every_mutant(options.only), verdicts(out)
    names = {mutant.name for mutant in chosen}
    stale = [name for name in known if options.only in name and name not in names]
    chosen = [mutant for mutant in chosen if mutant.name not in known]
    if options.again:
        chosen = [mutant for mutant in chosen if not before.get(mutant.name)]
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout"]
    suite = Suite(options, chosen)
    with _silence():
        pytest.main([*quiet, str(TESTS)], plugins=[suite])
    return _report(chosen, suite, verdicts(out), stale)


def _report(chosen: list[Mutant], suite: Suite, after: dict[str, str], stale: list[str]) -> int:
    unjudged = [mutant.name for mutant in chosen if mutant.name not in after]
    if suite.failure or unjudged:
        print(suite.failure or f"no verdict on {len(unjudged)} mutants, such as {unjudged[0]}")
        return 2
    survivors = [mutant for mutant in chosen if not after[mutant.name]]
    for mutant in survivors:
        print(f"line {mutant.line}: {mutant.name}")
    share = 1 - len(survivors) / max(1, len(chosen))
    print(
        f"{len(chosen)} mutants, {len(chosen) - len(survivors)} noticed: {share:.1%}; "
        f"{len(equivalent())} equivalent ones are listed in {EQUIVALENT.relative_to(ROOT)}"
    )
    for name in stale:
        print(f"listed as equivalent, but no such mutant: {name}")
    return 0 if share >= GOAL and not stale else 1


if __name__ == "__main__":
    sys.exit(main())
