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
    """What a reader needs to judge the figures."""
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


def wait_until_quiet(cores: float = 0.2, bound_s: float = 10) -> float:
    """Busy cores over the last second; waits until they are few, at most `bound_s` seconds."""
    deadline = time.monotonic() + bound_s
    while True:
        busy = psutil.cpu_percent(interval=1.0) / 100 * (os.cpu_count() or 1)
        if busy < cores or time.monotonic() > deadline:
            return busy
