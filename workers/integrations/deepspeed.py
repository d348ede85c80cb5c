"""Progress of a DeepSpeed engine: each step that updates the parameters, and saves."""

from __future__ import annotations

from functools import wraps
from typing import Any

from holdfast.workers.session import reporting


def report_deepspeed(engine: Any) -> Any:
    """Has `engine`, of deepspeed.initialize, report its steps and saves. Returns the engine.

    While it saves, a rank may make no progress for 600 s. Outside Holdfast nothing changes.
    """
    step, save = engine.step, engine.save_checkpoint

    @wraps(step)
    def step_and_report(*args: Any, **more: Any) -> Any:
        before = engine.global_steps
        found = step(*args, **more)
        if engine.global_steps > before:  # or it accumulates
            reporting.report(engine.global_steps - 1)
        return found

    @wraps(save)
    def save_in_phase(*args: Any, **more: Any) -> Any:
        with reporting.phase("save"):
            return save(*args, **more)

    engine.step, engine.save_checkpoint = step_and_report, save_in_phase
    return engine
