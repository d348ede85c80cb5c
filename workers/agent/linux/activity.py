"""Activity of worker processes (CPU, waits for it, I/O) and the node's shortage of CPU time: from
/proc, between two measurements.

A process that does nothing of this, while its peers wait for it, is hung; the others may be slow.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_INTERVAL_S = 0.3
"""Seconds between two measurements."""
ACTIVE_SHARE = 0.05
"""Share of a core from which a process is active: pulse and transport threads use a tenth of it."""
WINDOW_S = 1.0
"""The share counts over this time too. The kernel counts CPU time in ticks of 10 ms: three ticks
of those threads that come together are the share of a shorter time."""
ACTIVE_BYTES = 4096
"""Read and written in one interval: wake-ups of event loops read 8 bytes each."""
MIN_WANTED_SHARE = 0.05
"""Share of a core: with less, nothing that waits is worth a measurement."""


@dataclass(frozen=True)
class Counters:
    """Counters of one worker's main process and its children. Times in seconds, since its start."""

    cpu_s: float = 0.0
    ran_s: float = 0.0
    """Seconds of the main thread."""
    waited_s: float = 0.0
    """The main thread was runnable and waited for a CPU."""
    num_bytes: int = 0
    blocked: bool = False
    """The main thread waits for a disk (state D)."""


@dataclass
class _Process:
    measured: deque[tuple[float, Counters]]
    """Measurements with their times, the oldest first: one that is WINDOW_S old, and all since."""
    active_s: float
    """Time at which it was last active."""

    def add(self, now_s: float, counters: Counters) -> None:
        self.measured.append((now_s, counters))
        while len(self.measured) > 1 and self.measured[1][0] <= now_s - WINDOW_S:
            self.measured.popleft()


class ActivityMeter:
    """Measures the workers of a node. `proc` is a parameter for tests."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        self._known: dict[int, _Process] = {}
        """Processes by pid."""
        self._at_s: float | None = None
        self._stalled_s: float | None = None

    def measure(
        self, now_s: float, pids: Mapping[int, int], quiet: Collection[int]
    ) -> tuple[dict[int, float], float] | None:
        """(rank -> seconds without activity, CPU pressure), for rank -> pid; None: too soon. I/O
        and children are measured of `quiet` ranks only, the others count as active."""
        elapsed_s = 0.0 if self._at_s is None else now_s - self._at_s
        if self._at_s is not None and elapsed_s < MIN_INTERVAL_S:
            return None
        self._at_s = now_s
        idle: dict[int, float] = {}
        ran_s = waited_s = 0.0
        before, self._known = self._known, {}
        for rank, pid in pids.items():
            now = self._counters(pid, whole=rank in quiet)
            process = before.get(pid) or _Process(deque(), now_s)
            active = rank not in quiet or not process.measured
            if process.measured:
                last = process.measured[-1][1]
                ran_s += max(0.0, now.ran_s - last.ran_s)
                waited_s += max(0.0, now.waited_s - last.waited_s)
                active = active or _active(process.measured, now_s, now)
            process.add(now_s, now)
            if active:
                process.active_s = now_s
            self._known[pid] = process
            idle[rank] = now_s - process.active_s
        return idle, self._pressure(elapsed_s, ran_s, waited_s)

    def _pressure(self, elapsed_s: float, ran_s: float, waited_s: float) -> float:
        """Share of the time that runnable threads waited. The kernel's own figure (PSI) bounds it:
        it does not tell how long each thread waits, but is zero on a machine with free cores."""
        stalled_s, before_s = self._stall_s(), self._stalled_s
        self._stalled_s = stalled_s
        wanted_s = ran_s + waited_s
        if elapsed_s <= 0 or wanted_s < MIN_WANTED_SHARE * elapsed_s:
            return 0.0
        share = waited_s / wanted_s
        if stalled_s is None or before_s is None:
            return share
        return min(share, (stalled_s - before_s) / elapsed_s)

    def _stall_s(self) -> float | None:
        """Seconds in which some thread waited for a CPU, since the machine's start."""
        try:
            first = (self._proc / "pressure" / "cpu").read_text().splitlines()[0]
            return int(first.rpartition("total=")[2]) / 1e6
        except (OSError, ValueError, IndexError):
            return None

    def _counters(self, pid: int, *, whole: bool) -> Counters:
        state, cpu_s = self._stat(pid)
        ran_s, waited_s = self._schedule(pid)
        num_bytes = 0
        if whole:
            num_bytes = self._bytes(pid)
            for child in self._children(pid):
                cpu_s += self._stat(child)[1]
                num_bytes += self._bytes(child)
        return Counters(cpu_s, ran_s, waited_s, num_bytes, state == "D")

    def _stat(self, pid: int) -> tuple[str, float]:
        """State of the main thread, and CPU seconds of all threads."""
        try:
            stat = (self._proc / str(pid) / "stat").read_bytes()
        except OSError:
            return "", 0.0
        fields = stat[stat.rindex(b")") + 2 :].split()
        return chr(fields[0][0]), (int(fields[11]) + int(fields[12])) * self._tick_s

    def _schedule(self, pid: int) -> tuple[float, float]:
        try:
            ran, waited, _slices = (self._proc / str(pid) / "schedstat").read_text().split()
        except (OSError, ValueError):
            return 0.0, 0.0  # not every kernel has it
        return int(ran) / 1e9, int(waited) / 1e9

    def _bytes(self, pid: int) -> int:
        try:
            lines = (self._proc / str(pid) / "io").read_text().splitlines()
        except OSError:
            return 0
        counts = dict(line.split(": ") for line in lines)
        return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))

    def _children(self, pid: int) -> list[int]:
        """Children, such as the workers of a data loader."""
        try:
            text = (self._proc / str(pid) / "task" / str(pid) / "children").read_text()
        except OSError:
            return []
        return [int(child) for child in text.split()]


def _active(measured: Sequence[tuple[float, Counters]], now_s: float, now: Counters) -> bool:
    """`measured`: as _Process.measured."""
    (first_s, first), (last_s, last) = measured[0], measured[-1]
    if now.blocked or now.num_bytes - last.num_bytes >= ACTIVE_BYTES:
        return True
    # Over the window, and since the last measurement: a process that stops is idle at once.
    window_s, interval_s = max(WINDOW_S, now_s - first_s), now_s - last_s
    return any(
        used - in_window >= ACTIVE_SHARE * window_s and used - at_last >= ACTIVE_SHARE * interval_s
        for used, in_window, at_last in (
            (now.cpu_s, first.cpu_s, last.cpu_s),
            (now.waited_s, first.waited_s, last.waited_s),
        )
    )
