"""The disk below the job's directory is full: training, recovery and the controller go on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .local_rig import Job, spec

pytestmark = pytest.mark.e2e


@pytest.fixture
def steps() -> int:
    return 1_000_000


@pytest.fixture
def job(tmp_path: Path, steps: int) -> Iterator[Job]:
    """A job whose directory is on a disk of 32 MiB; its checkpoints are elsewhere."""
    home = tmp_path / "home"
    home.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(home)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root to mount a small file system")
    storage = {"path": str(tmp_path / "checkpoints"), "storage": {"everySteps": 50}}
    job = Job(tmp_path, spec("full", steps, checkpoint=storage))
    try:
        yield job
    finally:
        job.end()
        subprocess.run(["umount", "--lazy", str(home)], check=True)


def fill(job: Job) -> Path:
    ballast = job.home / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1 << 12))
    return ballast


def test_a_full_disk_ends_nothing_and_the_journal_is_complete_afterwards(job: Job) -> None:
    job.run()
    job.running(incidents=0)
    ballast = fill(job)
    job.kill(job.worker_pids()[1])
    view = job.running(incidents=1)
    assert "No space left on device" in view.journal_problem
    assert view.incidents[-1].steps_lost is not None and view.incidents[-1].steps_lost <= 1
    assert "memory only" in job.output()
    ballast.unlink()
    job.until(lambda view: not view.journal_problem)
    job.kill(job.worker_pids()[0])
    job.running(incidents=2)
    # The next controller finds everything, also what happened while the disk was full.
    job.command.kill()
    job.command.wait()
    job.attach()
    assert job.running(incidents=2).generation == 3


@pytest.mark.parametrize("steps", [200])
def test_a_controller_that_ends_on_a_full_disk_says_what_the_journal_lacks(job: Job) -> None:
    job.run()
    job.running(incidents=0)
    fill(job)
    assert job.command.wait(timeout=120) == 0, job.output()
    assert "records are lost: `holdfast status` and `debug events` show" in job.output()
