"""The step files of a run, in one format for all contestants, and the evaluation of them.

Each rank appends one line per finished step to `<directory>/<incarnation>.<rank>`:
`<unix time> <step>`, the first with what it spent before by part, in JSON. An incarnation is one
launched membership; its name has the world size.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path


class Recorder:
    """Used by a rank: one write per finished step."""

    def __init__(self, directory: str) -> None:
        world, port = os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]
        # Not TORCHELASTIC_RESTART_COUNT: torchrun's agents disagree about it (pytorch #135712).
        name = f"{world}-{port}.{os.environ['RANK']}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fd = os.open(Path(directory) / name, flags, 0o644)
        self._parts: dict[str, float] = {}
        self._marked = time.perf_counter()

    def mark(self, part: str) -> None:
        """The time since the last mark was this part of the start."""
        now = time.perf_counter()
        self._parts[part], self._marked = now - self._marked, now

    def finished(self, step: int) -> None:
        when, parts = time.time(), ""
        if self._parts:
            self.mark("first step")
            parts, self._parts = json.dumps(self._parts), {}
        os.write(self._fd, f"{when:.6f} {step} {parts}\n".encode())


@dataclass
class Incarnation:
    """The ranks of one membership: for each rank its pid and when it finished which step."""

    name: str
    pids: dict[int, int] = field(default_factory=dict)
    steps: dict[int, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    parts: dict[str, float] = field(default_factory=dict)
    """Part of the start -> seconds, the largest of the ranks."""

    @property
    def world_size(self) -> int:
        return int(self.name.split("-")[0])

    @property
    def complete(self) -> bool:
        """Every rank has finished a step."""
        return len([s for s in self.steps.values() if s]) == self.world_size

    @property
    def first_step(self) -> int:
        return min(step for steps in self.steps.values() for _, step in steps)

    def finished_by_all(self, step: int) -> float | None:
        """Time at which the last rank finished `step`; None while one has not."""
        times = [next((t for t, s in steps if s == step), None) for steps in self.steps.values()]
        known = [t for t in times if t is not None]
        return max(known) if len(known) == self.world_size else None

    @property
    def last_step(self) -> int:
        """The newest step that every rank has finished; -1: none."""
        if not self.complete:
            return -1
        return min(steps[-1][1] for steps in self.steps.values())


def read(directory: Path) -> list[Incarnation]:
    """All incarnations, in the order of their first finished steps."""
    found: dict[str, Incarnation] = {}
    for path in directory.iterdir():
        name, rank, pid = path.name.split(".")
        one = found.setdefault(name, Incarnation(name))
        one.pids[int(rank)] = int(pid)
        for line in path.read_text().splitlines():
            when, step, *parts = line.split(maxsplit=2)
            one.steps[int(rank)].append((float(when), int(step)))
            for part, seconds in json.loads(parts[0]).items() if parts else ():
                one.parts[part] = max(seconds, one.parts.get(part, 0.0))
    begun = [one for one in found.values() if any(one.steps.values())]
    return sorted(begun, key=lambda one: min(s[0][0] for s in one.steps.values() if s))


def wait_for_step(directory: Path, step: int, bound_s: float) -> Incarnation:
    """The incarnation that first has `step` finished by all its ranks.

    Raises TimeoutError after `bound_s` seconds.
    """
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        for one in read(directory):
            if one.complete and one.last_step >= step:
                return one
        time.sleep(0.05)
    raise TimeoutError(f"step {step} was not finished by all ranks within {bound_s:g} s")


def wait_for_next(directory: Path, after: str, bound_s: float) -> Incarnation:
    """The first complete incarnation other than `after`. Raises TimeoutError."""
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        for one in read(directory):
            if one.name != after and one.complete:
                return one
        time.sleep(0.02)
    raise TimeoutError(f"no step was finished by all ranks within {bound_s:g} s")


def step_seconds(one: Incarnation, first: int, last: int) -> list[float]:
    """Durations of the steps first+1..last, each as the slowest rank finished it."""
    ends = [one.finished_by_all(step) for step in range(first, last + 1)]
    known = [end for end in ends if end is not None]
    return [b - a for a, b in itertools.pairwise(known)]
