"""The log that the scripts write beside their training: one JSON line per finished step of rank 0.

It is what reports are judged by, so it knows nothing of what started the script. Without `STEP_LOG`
nothing is written.
"""

from __future__ import annotations

import json
import os
import time

PATH = os.environ.get("STEP_LOG", "")
PACE_S = float(os.environ.get("STEP_SECONDS", "0.1"))
"""Seconds that each rank waits in each step: the models are too small to be disturbed otherwise."""


def finished(step: int, loss: float | None = None) -> None:
    """Called by each rank after optimizer step `step`; the first one is 1."""
    pace()
    write(step, loss)


def pace() -> None:
    """The wait of a step. Where the step is reported before the script can write it, the script
    waits before the report: a rank that is killed in its wait has then done neither. While there
    is a file STEP_LOG.stuck-PID, that process is stuck: it waits in its own code."""
    time.sleep(PACE_S)
    while PATH and os.path.exists(f"{PATH}.stuck-{os.getpid()}"):  # noqa: PTH110 (no import more)
        time.sleep(0.1)


def write(step: int, loss: float | None = None) -> None:
    """The line of optimizer step `step`, on rank 0."""
    if PATH and os.environ.get("RANK", "0") == "0":
        line = {
            "step": step,
            "time": time.time(),
            "loss": loss,
            "pid": os.getpid(),
            "world": int(os.environ.get("WORLD_SIZE", "1")),
        }
        with open(PATH, "a", encoding="utf-8") as log:  # noqa: PTH123 (no import more in a worker)
            log.write(json.dumps(line) + "\n")
