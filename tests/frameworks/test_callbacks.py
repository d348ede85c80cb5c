"""The report agrees with the step log if the script has Holdfast's callback."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from .catalogue import by_name
from .test_recovery import BOUND_S, SAVE_EVERY, Start, finish, start, trained

__all__ = ["start"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SCRIPTS = {
    "hf": "hf_callback.py",
    "lightning": "lightning_callback.py",
    "torchtitan": "titan_report.py",
    "zero1": "deepspeed_report.py",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_report_says_exactly_which_steps_were_lost(name: str, start: Start) -> None:
    framework = replace(by_name(name), script=SCRIPTS[name])
    job, log = start(framework, steps=60, pace_s=0.1)
    before = trained(log, job, SAVE_EVERY + 3)
    os.kill(job.worker_pids()[1], signal.SIGKILL)
    after = log.recovery(before, before[-1].time, BOUND_S)
    finish(job)
    view = job.wait()
    (incident,) = view.incidents
    assert (view.step, view.total_steps) == (59, 60) and view.loss is not None
    assert incident.resumed_after_step == after.step - 2, "the log counts from 1"
    # Rank 0 may have logged a step that the killed rank had not reported.
    assert incident.steps_lost is not None and not incident.steps_lost_at_least
    assert 0 <= after.trained_twice - incident.steps_lost <= 1
