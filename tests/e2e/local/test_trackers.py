"""W&B itself, offline, in a job whose rank 0 is killed: all starts have the job's run id."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from .local_rig import Job, spec

wandb = pytest.importorskip("wandb", reason="wandb is not installed")
pytestmark = pytest.mark.e2e

SCRIPT = """
import os, time
import wandb
from holdfast import session

rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
run = wandb.init(project="training") if rank == 0 else None
if run:
    with open({ids!r}, "a") as out:
        print(run.id, os.environ["HOLDFAST_JOB_ID"], file=out)
for step in range(5 if restarts else 1_000_000):
    session.report(step, loss=1 / (step + 1))
    if run:
        run.log({{"loss": 1 / (step + 1)}}, step=step)
    time.sleep(0.1)
if run:
    run.finish()
"""


def test_each_start_of_a_job_continues_its_run_of_wandb(tmp_path: Path) -> None:
    place, ids, script = tmp_path / "runs", tmp_path / "ids", tmp_path / "train.py"
    place.mkdir()
    script.write_text(textwrap.dedent(SCRIPT).format(ids=str(ids)))
    document = spec(
        "tracked", 0, entrypoint={"script": str(script)}, nodes={"min": 1, "max": 1},
        parallelism={},
        env={"WANDB_MODE": "offline", "WANDB_DIR": str(place), "WANDB_SILENT": "true"},
    )  # fmt: skip
    job = Job(tmp_path, document)
    job.run()
    try:
        job.until(lambda view: view.step >= 3 and ids.exists())  # rank 1 may be first
        job.kill(job.worker_pids()[0])
        assert job.wait().state == "succeeded", job.output()[-3000:]
    finally:
        job.end()
    starts = [line.split() for line in ids.read_text().splitlines()]
    (job_id,) = {job_id for _, job_id in starts}
    assert [run for run, _ in starts] == [job_id] * 2
    found = [path.name.rpartition("-")[2] for path in place.glob("wandb/offline-run-*")]
    assert found == [job_id] * 2, "offline, each start has a directory of the same run"
