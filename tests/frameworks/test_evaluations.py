"""A healthy evaluation, longer than a hang may last in training, with one line in the script."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from .catalogue import by_name, environment
from .test_recovery import Start, finish, start

__all__ = ["start"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SCRIPTS = {
    "hf": "hf_evaluates.py",
    "lightning": "lightning_evaluates.py",
    "zero1": "deepspeed_report.py",
    "hf-memory": "hf_evaluates.py",
}
EVALUATION_S = 12
"""Seconds of one batch. In training a rank hangs that does nothing for 3 s and three steps, or
works for busyTimeoutSeconds."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_evaluations_during_and_after_the_training_end_no_generation(
    name: str, start: Start, tmp_path: Path
) -> None:
    framework = replace(by_name(name.removesuffix("-memory")), script=SCRIPTS[name])
    env = environment(tmp_path, 0.05) | {"EVALUATION_SECONDS": str(EVALUATION_S)}
    changes: dict[str, Any] = {"recovery": {"busyTimeoutSeconds": 4}, "env": env}
    if name.endswith("-memory"):
        env["IN_MEMORY"] = "1"
        changes |= {"checkpoint": {"memory": {"everySteps": 1}}, "parallelism": {"shard": 1}}
    job, log = start(framework, steps=20, **changes)
    finish(job)
    view = job.wait()
    assert view.state == "succeeded" and [one.step for one in log.lines()] == [*range(1, 21)]
    assert view.incidents == []
    assert (view.step, view.total_steps) == (19, 20) and view.loss is not None
