"""`holdfast checkpoint save` on a training job."""

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
    """A job that stores checkpoints only on request, and stages every seventh step."""
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


def test_save_with_wait_returns_when_the_checkpoint_is_committed(job: Job) -> None:
    job.run()
    job.running(incidents=0)
    printed, _ = (saving := save(job, "--wait", "--json")).communicate(timeout=BOUND_S)
    assert saving.returncode == 0
    newest = json.loads(printed)["step"]
    assert newest in [one.step for one in job.until(lambda view: True).checkpoints]
    assert f"the state after {newest + 1} steps is committed" in printed


def test_save_with_wait_fails_when_the_job_ends_without_the_checkpoint(
    job: Job, tmp_path: Path
) -> None:
    job.run()
    job.running(incidents=0)
    # No checkpoint can be committed: a file is in place of their directory.
    tier = next(job.directory.path.glob("checkpoints"))
    tier.rename(tmp_path / "away")
    tier.write_text("")
    saving = save(job, "--wait")
    assert saving.stderr is not None
    assert "not committed yet: " in saving.stderr.readline()
    assert job.request("cancel").ok
    _, printed = saving.communicate(timeout=BOUND_S)
    assert saving.returncode == 1
    assert "cancelled, so the state after " in printed and "there is none" in printed


def test_save_with_wait_asks_the_next_generation_when_one_ends(job: Job) -> None:
    job.run()
    job.running(incidents=0)
    saving = save(job, "--wait", "--json")
    job.kill(job.worker_pids()[3])
    printed, errors = saving.communicate(timeout=BOUND_S)
    assert saving.returncode == 0, errors
    assert json.loads(printed)["step"] in [one.step for one in job.until(bool).checkpoints]
