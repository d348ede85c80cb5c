"""`holdfast checkpoint save`, as a person types it while a job trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .local_rig import BOUND_S, Job, spec

pytestmark = pytest.mark.e2e


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Writes nothing to storage by itself, and stages every seventh step."""
    job = Job(
        tmp_path,
        spec(
            "saved",
            1_000_000,
            checkpoint={
                "storage": {"everySteps": 10_000_000, "finalTimeoutSeconds": 1},
                "memory": {"everySteps": 7},
            },
        ),
    )
    yield job
    job.end()


def save(job: Job, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "holdfast.orchestrator.cli.main", "checkpoint", "save", job.name]
    return subprocess.Popen(
        [*words, *options, "--home", str(job.home)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_who_waits_for_a_checkpoint_comes_back_when_it_is_committed(job: Job) -> None:
    job.run()
    job.running(incidents=0)
    said, _ = (saving := save(job, "--wait", "--json")).communicate(timeout=BOUND_S)
    assert saving.returncode == 0
    newest = json.loads(said)["step"]
    assert newest in [one.step for one in job.until(lambda view: True).checkpoints]
    assert f"step {newest} is committed" in said


def test_who_waits_is_told_that_the_job_has_ended_without_it(job: Job, tmp_path: Path) -> None:
    job.run()
    job.running(incidents=0)
    # Nothing can be committed: a file is where the checkpoints should be.
    tier = next(job.directory.path.glob("checkpoints"))
    tier.rename(tmp_path / "away")
    tier.write_text("")
    saving = save(job, "--wait")
    assert saving.stderr is not None
    assert "not committed yet: " in saving.stderr.readline()
    assert job.ask("cancel").ok
    _, said = saving.communicate(timeout=BOUND_S)
    assert saving.returncode == 1
    assert "cancelled, so the checkpoint of step " in said and "there is none" in said


def test_the_next_generation_is_asked_when_one_ends_with_the_wish(job: Job) -> None:
    job.run()
    job.running(incidents=0)
    saving = save(job, "--wait", "--json")
    job.kill(job.worker_pids()[3])
    said, errors = saving.communicate(timeout=BOUND_S)
    assert saving.returncode == 0, errors
    assert json.loads(said)["step"] in [one.step for one in job.until(bool).checkpoints]
