"""Scripts that do not say from where to go on: `trainer.train()`, `trainer.fit(model)`. After a
kill they go on from their trainer's own checkpoint; a new job begins at step 0."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.local.local_rig import holdfast

from .catalogue import LOG, by_name
from .test_recovery import BOUND_S, SAVE_EVERY, Start, finish, start, trained

__all__ = ["start"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PLAIN = {
    "hf": replace(by_name("trl"), name="hf", example="hf_trainer.py", preload=()),
    "lightning": replace(by_name("accelerate"), name="lightning", example="lightning_fit.py"),
}
"""The examples."""


@pytest.mark.parametrize("name", PLAIN)
def test_a_killed_worker_costs_the_steps_since_the_trainers_checkpoint(
    name: str, start: Start, tmp_path: Path
) -> None:
    job, log = start(PLAIN[name])
    before = trained(log, job, SAVE_EVERY + 2)
    os.kill(job.worker_pids()[1], signal.SIGKILL)
    after = log.recovery(before, before[-1].time, BOUND_S)
    assert (after.step - 1) % SAVE_EVERY == 0 and after.step > 1
    assert after.trained_twice <= SAVE_EVERY
    finish(job)
    assert log.lines()[-1].step == 40
    events = " ".join(holdfast(job, "debug", "events", job.name).stdout.split())  # wrapped
    assert events.count("continues from") == 1 and f"continues from {tmp_path}/out/" in events
    assert "its newest complete checkpoint" in events


def test_a_new_job_and_one_that_turns_it_off_begin_at_step_0(start: Start, tmp_path: Path) -> None:
    """The folder of the job before has checkpoints."""
    job, log = start(PLAIN["hf"], steps=12)
    finish(job)
    assert log.lines()[-1].step == 12
    shutil.rmtree(tmp_path / "home")
    (tmp_path / LOG).unlink()
    off = {"guard": {"never": {}}, "memory": {"everySteps": 0}}
    job, log = start(PLAIN["hf"], steps=30, checkpoint=off)
    before = trained(log, job, SAVE_EVERY + 2)
    assert before[0].step == 1
    os.kill(job.worker_pids()[1], signal.SIGKILL)
    assert log.recovery(before, before[-1].time, BOUND_S).step == 1
