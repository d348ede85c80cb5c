"""Waiting for a checkpoint that somebody has asked for.

Owns: when there is nothing to wait for any more. Must not: ask for it.
"""

from __future__ import annotations

import time

from ..protocol.errors import HoldfastError
from .output import stderr
from .places.base import Answer, Job
from .render import FINISHED

INTERVAL_S = 0.5


def wait_until_committed(job: Job, step: int) -> Answer:
    """Until a checkpoint of that step, or of a later one, is committed: what a rank misses of one
    step it writes with the next. Raises HoldfastError once the job does not train any more."""
    problem = ""
    while True:
        view = job.view()
        newest = max((one.step for one in view.checkpoints), default=-1)
        if newest >= step:
            return Answer(f"step {newest} is committed", {"step": newest})
        if view.state == "suspended" or view.state in FINISHED:
            has = f"the newest is of step {newest}" if newest >= 0 else "there is none"
            raise HoldfastError(
                f"job {job.name}: {view.state} before a checkpoint of step {step} was committed; "
                f"{has}"
            )
        if view.storage_problem and view.storage_problem != problem:
            problem = view.storage_problem
            stderr().print(f"not committed yet: {problem}", soft_wrap=True)
        time.sleep(INTERVAL_S)
