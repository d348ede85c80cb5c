"""Reads the step log of a script: what it did, independent of what started it.

A step is trained twice when a later launch of the script trains a step that an earlier one had
finished.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

LATE_S = 1.0
"""Time until a fault stops rank 0: the others wait for a killed rank in their next collective."""


class Line(msgspec.Struct, frozen=True):
    """One finished step of rank 0."""

    step: int
    time: float
    """Seconds, Unix epoch."""
    launch: int
    """The same in all lines of one launch."""
    world: int
    loss: float | None = None


@dataclass(frozen=True)
class Recovery:
    """Recovery from a fault to the first step of the next launch."""

    seconds: float
    """Seconds from the fault."""
    gap_s: float
    """Seconds from the last step before."""
    step: int
    """The first step afterwards."""
    trained_twice: int
    world: int
    late_steps: int
    """Steps of the launch before that ended more than a step after the fault: it ran on."""


class StepLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[Line]:
        """Complete lines only: the last one may be written at this moment."""
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_bytes().rpartition(b"\n")
        return [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]

    def until(self, condition: Callable[[list[Line]], bool], bound_s: float) -> list[Line]:
        """The lines when `condition` is true. Raises TimeoutError."""
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline:
            lines = self.lines()
            if lines and condition(lines):
                return lines
            time.sleep(0.02)
        raise TimeoutError(f"the step log did not get there within {bound_s:g} s")

    def recovery(self, before: list[Line], fault: float, bound_s: float) -> Recovery:
        """The first step of a launch that is not in `before`. Raises TimeoutError."""
        known = {line.launch for line in before}
        lines = self.until(lambda now: now[-1].launch not in known, bound_s)
        first = next(line for line in lines if line.launch not in known)
        old = [line for line in lines if line.launch in known]
        last = max(old, key=lambda line: line.time)
        return Recovery(
            seconds=first.time - fault,
            gap_s=first.time - last.time,
            step=first.step,
            trained_twice=max(0, last.step + 1 - first.step),
            world=first.world,
            late_steps=sum(line.time > fault + LATE_S + 2 * step_seconds(lines) for line in old),
        )


def trained_twice(lines: list[Line]) -> int:
    """Finished steps that have to be trained again, over all launches."""
    pairs = [(a, b) for a, b in itertools.pairwise(lines) if a.launch != b.launch]
    return sum(max(0, a.step + 1 - b.step) for a, b in pairs)


def step_seconds(lines: list[Line]) -> float:
    """Median time of a step; 0 for fewer than two."""
    pairs = [(a, b) for a, b in itertools.pairwise(lines) if a.launch == b.launch]
    return median(b.time - a.time for a, b in pairs) if pairs else 0.0


def productive_seconds(lines: list[Line], until: float) -> float:
    """Time in which new steps were trained, up to `until`. The first step of a launch, whose
    beginning is not in the log, counts as a median one."""
    usual, newest, total = step_seconds(lines), 0, 0.0
    for index, line in enumerate(lines):
        if line.time > until:
            break
        same = index > 0 and lines[index - 1].launch == line.launch
        if line.step > newest:
            total += line.time - lines[index - 1].time if same else usual
            newest = line.step
    return total
