"""The log that the scripts write beside their training: one JSON line per finished step of rank 0.

It is what reports are judged by, so it knows nothing of what started the script. Without `STEP_LOG`
nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

PATH = os.environ.get("STEP_LOG", "")
PACE_S = float(os.environ.get("STEP_SECONDS", "0.1"))
"""Seconds that each rank waits in each step: the models are too small to be disturbed otherwise."""
LAUNCH = time.time_ns()
"""Number of this launch, which may run in the process of another one."""


def finished(step: int, loss: float | None = None) -> None:
    """Called by each rank after optimizer step `step`; the first one is 1."""
    pace()
    write(step, loss)


def pace() -> None:
    """The wait of a step. Where the step is reported before the script can write it, the script
    waits before the report: a rank that is killed in its wait has then done neither. While there
    is a file STEP_LOG.stuck-PID, that process is stuck: it waits in its own code."""
    time.sleep(PACE_S)
    while PATH and Path(f"{PATH}.stuck-{os.getpid()}").exists():
        time.sleep(0.1)


def write(step: int, loss: float | None = None) -> None:
    """The line of optimizer step `step`, on rank 0."""
    if PATH and os.environ.get("RANK", "0") == "0":
        line = {
            "step": step,
            "time": time.time(),
            "loss": loss,
            "launch": LAUNCH,
            "world": int(os.environ.get("WORLD_SIZE", "1")),
        }
        with Path(PATH).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


def parser(about: str | None) -> argparse.ArgumentParser:
    """The arguments of most scripts."""
    arguments = argparse.ArgumentParser(description=about)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--steps", type=int, required=True)
    arguments.add_argument("--save-every", type=int, required=True)
    return arguments
