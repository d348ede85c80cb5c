"""A storage path that becomes unwritable: training continues and the problem is reported.

A file replaces the directory, because the tests may run as root, which ignores permissions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..local.local_rig import Job, spec

pytestmark = pytest.mark.e2e

Make = Callable[..., Job]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    jobs: list[Job] = []

    def make(name: str, steps: int, **storage: Any) -> Job:
        tiers = {"path": "disk/checkpoints", "storage": {"everySteps": 10, **storage}}
        jobs.append(Job(tmp_path, spec(name, steps, checkpoint=tiers)))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def take_away(tmp_path: Path) -> None:
    (tmp_path / "disk").rename(tmp_path / "gone")
    (tmp_path / "disk").touch()


def bring_back(tmp_path: Path) -> None:
    (tmp_path / "disk").unlink()
    (tmp_path / "gone").rename(tmp_path / "disk")


def test_training_and_recovery_go_on_without_storage_and_use_it_when_it_is_back(
    make: Make, tmp_path: Path
) -> None:
    job = make("unwritable", 1_000_000)
    job.run()
    before = job.until(lambda v: v.commits >= 1)
    take_away(tmp_path)
    bad = job.until(lambda v: bool(v.storage_problem))
    assert "could not be written: " in bad.storage_problem
    assert f"Not a directory: '{tmp_path}/disk/checkpoints" in bad.storage_problem
    job.until(lambda v: v.step >= bad.step + 5 and v.generation == before.generation)
    job.kill(job.worker_pids()[1])
    after = job.running(incidents=1)
    assert after.incidents[-1].restored_from == "memory"
    bring_back(tmp_path)
    healed = job.until(lambda v: not v.storage_problem)
    assert healed.checkpoints[-1].generation == after.generation
    assert healed.storage_failures > 0
    assert job.request("cancel").ok
    assert job.wait().state == "cancelled"


def test_a_job_that_cannot_write_its_last_checkpoint_fails_with_the_reason(
    make: Make, tmp_path: Path
) -> None:
    job = make("unwritten", 200, finalTimeoutSeconds=2)
    job.run()
    job.until(lambda v: v.commits >= 1)
    take_away(tmp_path)
    view = job.wait()
    assert (view.state, view.step, job.command.returncode) == ("failed", 199, 1)
    assert "the state after 200 steps was not written to storage in 2 s (node-" in view.reason
    assert "Not a directory" in view.reason
    assert "storage holds the state after" in view.reason
    shown = job.output()
    assert "Not a directory" in shown and "Traceback" not in shown
    assert f"{tmp_path}/disk/checkpoints: shard " in " ".join(shown.split())
    assert job.processes() == []
