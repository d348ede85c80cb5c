"""The conditions of a measurement: machine, versions, and what else was running."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import psutil


def describe() -> dict[str, str]:
    """Conditions by which a reader judges the figures."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    cores, usable = os.cpu_count(), len(os.sched_getaffinity(0))
    # A bench writes its page while it runs; that is no change of what is measured.
    changed = _git("status", "--porcelain", "--", ":(top)", ":(top,exclude)bench/results")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": f"{cores} x {model}" + (f", {usable} of them used" if usable != cores else ""),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": _git("describe", "--always") + ("-dirty" if changed else ""),
    }


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], capture_output=True, text=True, check=False
    ).stdout.strip()


class OtherWork:
    """CPU time of the processes that the bench did not start, since this object was made.

    `marks`: the bench started a process if its command line has one of these texts, or if it
    descends from such a process or from this one. Time that the host took from this machine counts
    as well.
    """

    def __init__(self, marks: list[str]) -> None:
        self._marks = marks
        self._at_s, self._busy_s, self._own = time.monotonic(), _busy_s(), self._cpu_s()

    def cores(self) -> float:
        """Mean number of busy cores since the beginning."""
        elapsed_s = max(time.monotonic() - self._at_s, 1e-9)
        own_s = sum(
            max(0.0, cpu_s - self._own.get(pid, 0.0)) for pid, cpu_s in self._cpu_s().items()
        )
        return max(0.0, _busy_s() - self._busy_s - own_s) / elapsed_s

    def _cpu_s(self) -> dict[int, float]:
        found = {}
        parents: dict[int, int] = {}
        own = {os.getpid()}
        for process in psutil.process_iter(["ppid", "cmdline", "cpu_times"]):
            facts = process.info
            parents[process.pid] = facts["ppid"]
            words = " ".join(facts["cmdline"] or [])
            if any(mark in words for mark in self._marks):
                own.add(process.pid)
            if facts["cpu_times"] is not None:
                found[process.pid] = facts["cpu_times"].user + facts["cpu_times"].system
        return {pid: cpu_s for pid, cpu_s in found.items() if _descends(pid, parents, own)}


def _descends(pid: int, parents: dict[int, int], own: set[int]) -> bool:
    while pid > 1 and pid not in own:
        pid = parents.get(pid, 0)
    return pid in own


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times[:7]) - times.idle - times.iowait + getattr(times, "steal", 0.0))


def wait_until_quiet(cores: float = 0.2, bound_s: float = 10) -> float:
    """Busy cores over the last second; waits until they are few, at most `bound_s` seconds."""
    deadline = time.monotonic() + bound_s
    while True:
        busy = psutil.cpu_percent(interval=1.0) / 100 * (os.cpu_count() or 1)
        if busy < cores or time.monotonic() > deadline:
            return busy
