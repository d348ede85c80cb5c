"""All memory is lost, and the checkpoints are damaged, gone, or in a store that is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.orchestrator.protocol.manifest import MANIFEST_NAME, parse_directory_name

from .local_rig import Job, holdfast, spec

pytestmark = pytest.mark.e2e

STEPS = 160


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    storage = {"storage": {"everySteps": 10}, "retention": {"keepLast": 3}}
    job = Job(tmp_path, spec("damaged", STEPS, checkpoint=storage))
    job.run()
    yield job
    job.end()


def checkpoints(job: Job) -> Path:
    """The directory of a job that has at least two checkpoints, after the loss of all memory."""
    view = job.until(lambda view: len(view.checkpoints) >= 2)
    for node in ("node-0", "node-1"):
        job.kill(job.agent_pid(node))
    return Path(view.checkpoint_path)


def newest_first(path: Path) -> list[Path]:
    return sorted((one for one in path.iterdir() if parse_directory_name(one.name)), reverse=True)


def flip_bit(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at, 2)
        byte = stream.read(1)[0]
        stream.seek(at, 2)
        stream.write(bytes([byte ^ 1]))


def test_without_the_newest_manifest_the_checkpoint_before_is_restored(job: Job) -> None:
    path = checkpoints(job)
    (newest_first(path)[0] / MANIFEST_NAME).unlink(missing_ok=True)
    view = job.until(lambda view: view.state == "running" and bool(view.incidents))
    assert view.restarts["infrastructure"] <= 3
    assert job.wait().state == "succeeded", job.output()


def test_a_store_that_is_away_costs_no_restart(job: Job) -> None:
    path = checkpoints(job)
    away = path.with_name("away")
    path.rename(away)
    view = job.until(lambda view: "the store cannot be read" in view.reason)
    charged = dict(view.restarts)
    assert "is it mounted" in view.reason
    job.until(lambda view: "tried again in 4 s" in view.reason)
    away.rename(path)
    view = job.until(lambda view: view.state == "running" and view.generation > 3)
    assert view.restarts == charged and view.step >= 9
    assert job.wait().state == "succeeded", job.output()


def test_a_job_whose_checkpoints_are_all_damaged_holds_until_it_is_repaired(job: Job) -> None:
    path = checkpoints(job)
    found = newest_first(path)
    for index, directory in enumerate(found):
        for file in directory.glob("*.safetensors"):
            flip_bit(file, -8 - 4000 * index)  # another tensor in each checkpoint
    view = job.until(lambda view: view.state == "suspended")
    assert "is damaged" in view.hold and "checkpoint repair" in view.reason
    assert len(view.refused_checkpoints) >= 2
    assert all(one.problem for one in view.refused_checkpoints)
    refused = job.request("resume")
    assert not refused.ok and "no committed checkpoint can be used" in refused.detail
    done = holdfast(job, "checkpoint", "repair", job.name, "--yes")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "is restored" in done.stdout
    view = job.until(lambda view: view.state == "running")
    assert view.step >= 9
    assert job.wait().state == "succeeded", job.output()
