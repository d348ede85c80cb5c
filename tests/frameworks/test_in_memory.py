"""The trainer's state is in memory: a kill costs no step, and the losses are as without it."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from .catalogue import by_name
from .step_log import StepLog
from .test_recovery import BOUND_S, Start, finish, start, trained

__all__ = ["start"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SCRIPTS = {
    "hf_memory.py": "hf",
    "hf_fsdp2_memory.py": "hf",
    "lightning_memory.py": "lightning",
    "titan_memory.py": "torchtitan",
}
"""Script -> framework."""
SHARDED = ("hf_fsdp2_memory.py", "titan_memory.py")
"""FSDP2; the others are DDP, of which a node keeps one copy."""
STEPS = 40
IN_MEMORY = {"checkpoint": {"memory": {"everySteps": 1}}, "steps": STEPS, "pace_s": 0.1}
RARELY = 1000  # steps between the checkpoints of a script that is to need none


def losses(log: StepLog) -> list[tuple[int, float | None]]:
    return [(line.step, line.loss) for line in log.lines()]


@pytest.mark.parametrize("name", ["lightning"])
def test_a_job_is_resized_in_the_middle_of_an_epoch(name: str, start: Start) -> None:
    """An epoch has 32 batches on four ranks, 64 on two: the 40th batch of two is no place in it on
    four."""
    framework = replace(by_name(name), script="lightning_memory.py")
    fields = IN_MEMORY | {"parallelism": {"shard": 1}, "steps": 80, "pace_s": 0.5}
    job, log = start(framework, save_every=RARELY, **fields)
    trained(log, job, 4)
    assert job.request("resize", nodes=1).ok
    log.until(lambda lines: lines[-1].world == 2, BOUND_S)
    trained(log, job, 26)
    assert job.request("resize", nodes=2).ok
    finish(job)
    lines = log.lines()
    assert {line.step for line in lines} == {*range(1, 81)} and lines[-1].world == 4
    assert job.wait().state == "succeeded"


@pytest.mark.parametrize(("script", "name"), SCRIPTS.items(), ids=SCRIPTS)
def test_a_killed_worker_costs_no_step_and_changes_no_loss(
    script: str, name: str, start: Start, tmp_path: Path
) -> None:
    framework = replace(by_name(name), script=script)
    fields = IN_MEMORY | {"parallelism": {"shard": "world" if script in SHARDED else 1}}
    if name == "hf":  # test_kept_trainers has those that are kept
        fields |= {"recovery": {"keepProcesses": "never"}}
    job, log = start(framework, save_every=RARELY, **fields)
    finish(job)
    undisturbed = losses(log)
    assert [step for step, _loss in undisturbed] == [*range(1, STEPS + 1)]
    log.path.unlink()
    shutil.rmtree(tmp_path / "out")
    job, log = start(replace(framework, name=f"{name}-killed"), save_every=RARELY, **fields)
    before = trained(log, job, 8)
    pids = job.worker_pids()
    os.kill(pids[1], signal.SIGKILL)
    after = log.recovery(before, before[-1].time, BOUND_S)
    same = [rank for rank, pid in job.worker_pids().items() if pid == pids[rank]]
    assert sorted(same) == ([] if name == "hf" else [0, 2, 3])
    finish(job)
    view = job.wait()
    incident = view.incidents[-1]
    assert (incident.steps_lost, incident.restored_from) == (0, "memory")
    # Rank 0 may have logged the step in which its peer was killed.
    assert after.step >= 8 and after.trained_twice <= 1
    assert (view.step, view.total_steps) == (STEPS - 1, STEPS)
    # To rounding: DDP chooses its buckets in the first step of each start, and sums in their order.
    assert dict(losses(log)) == pytest.approx(dict(undisturbed), rel=1e-6)
