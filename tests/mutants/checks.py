"""Checks that can notice a mutant: the tests of the core and seeds of the simulation.

`measured` runs each once and records which lines of the core it executes and for how long: a mutant
is given only to the checks that execute its lines, quick ones first.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from .mutate import Mutant

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "orchestrator" / "core"
TESTS = ROOT / "tests" / "unit" / "core"
SIMULATION = ROOT / "tests" / "sim"

Lines = dict[str, set[int]]
"""Module of the core -> executed lines."""


@dataclass
class Check:
    name: str
    run: Callable[[], None]
    """Raises when it fails."""
    digest: str
    """Changes when the check or the core does."""
    lines: Lines
    took_s: float = 0.0
    """CPU time, measured while its lines were recorded."""

    def executes(self, module: str, lines: range) -> bool:
        return not self.lines.get(module, set()).isdisjoint(lines)


def digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.read_bytes())
    return total.hexdigest()


def measured(checks: list[Check], cache: Path) -> None:
    """Fill in the lines and the time of each check. Raises if one fails."""
    known = pickle.loads(cache.read_bytes()) if cache.exists() else {}
    for check in checks:
        key = (check.name, check.digest)
        if key not in known:
            known[key] = _trace(check.run)
        check.lines, check.took_s = known[key]
    kept = {(check.name, check.digest): (check.lines, check.took_s) for check in checks}
    cache.write_bytes(pickle.dumps(kept))


def _trace(run: Callable[[], None]) -> tuple[Lines, float]:
    found: Lines = {}
    in_core: dict[str, set[int] | None] = {}

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        path = frame.f_code.co_filename
        if path not in in_core:
            in_core[path] = None
            if (resolved := Path(path).resolve()).is_relative_to(CORE):
                name = resolved.relative_to(CORE).as_posix()
                in_core[path] = found.setdefault(name, set())
        lines = in_core[path]
        if lines is None:
            return None

        def line(inner: FrameType, event: str, _argument: Any) -> Any:
            if event == "line":
                lines.add(inner.f_lineno)
            return line

        return line

    began = time.process_time()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(None)
    return found, time.process_time() - began


def chosen_for(mutant: Mutant, checks: list[Check], first: str) -> list[Check]:
    """Checks that execute the changed lines: the one named `first`, tests, seeds."""
    lines = mutant.lines
    if not any(check.executes(mutant.module, lines) for check in checks):
        lines = mutant.function_lines
    found = [check for check in checks if check.executes(mutant.module, lines)]
    return sorted(found, key=lambda check: (check.name != first, is_seed(check), check.took_s))


def is_seed(check: Check) -> bool:
    return check.name.startswith("seed ")
