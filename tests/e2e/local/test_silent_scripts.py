"""Real scripts that never report a step: what their collectives show of training and of a hang."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from .local_rig import Job, spec

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from holdfast import session


def fetch(seconds):
    time.sleep(seconds)


dist.init_process_group("gloo")
rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    LATE
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
print(f"trained {step + 1} steps", flush=True)
dist.destroy_process_group()
"""


def job_of(place: Path, late: str, steps: int, **recovery: Any) -> Job:
    source = dedent(SCRIPT).replace("LATE", late).replace("STEPS", str(steps))
    (place / "train.py").write_text(source)
    document = spec("silent", steps, recovery=recovery)
    document["spec"]["entrypoint"] = {"script": "train.py"}
    document["spec"] |= {"nodes": {"min": 1, "max": 1}, "workersPerNode": 2}
    del document["spec"]["parallelism"]
    return Job(place, document)


def test_a_rank_that_sleeps_in_its_own_code_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    """The process is not stopped: only the collectives and the stacks show the hang."""
    late = "if restarts == 0 and rank == 1 and step == 200: fetch(1000)"
    job = job_of(tmp_path, late, 260, busyTimeoutSeconds=10)
    job.run()
    try:
        view = job.until(lambda view: "rank 1 is in no collective at File" in view.reason)
        assert view.state == "running" and not view.incidents, "it is named before it is restarted"
        view = job.wait()
        (incident,) = view.incidents
        assert (view.state, incident.failure_class) == ("succeeded", "hang")
        assert incident.culprit_rank == 1
        assert "rank 1 has begun no collective for" in incident.evidence
        assert "no step was reported" in incident.evidence
        assert "in fetch" in incident.stacks["1"]
        assert incident.inferred and incident.steps_lost is None
        assert "trained 260 steps" in job.output()
    finally:
        job.end()


def test_a_script_that_uses_a_phase_and_reports_no_step_is_not_taken_for_hung(
    tmp_path: Path,
) -> None:
    """The script trains for three times as long as a start-up may take."""
    late = """
    if rank == 0 and step % 50 == 0:
        with session.phase("save"):
            fetch(0.1)
"""
    job = job_of(tmp_path, late.strip(), 500, startupTimeoutSeconds=5)
    job.run()
    try:
        view = job.wait()
        assert (view.state, view.incidents) == ("succeeded", [])
        assert "trained 500 steps" in job.output()
    finally:
        job.end()
