"""Workers of a node with the same state stage it once. Kills change no loss and no weight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator import limits

from .local_rig import Job, last_state, losses_of, spec

pytestmark = pytest.mark.e2e

STEPS = 60


def document(nodes: int, workers: int, shard: int) -> dict[str, Any]:
    sizes = {"nodes": {"min": nodes, "max": nodes}, "workersPerNode": workers}
    job = spec("twins", STEPS, parallelism={"shard": shard}, **sizes)
    model = {"dim": 192, "numLayers": 4, "numHeads": 4}  # 20 MB; smaller state is not divided
    job["spec"]["entrypoint"]["recipe"]["config"]["model"] = model
    return job


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    """Filled by the tests."""
    started: list[Job] = []
    yield started
    for job in started:
        job.end()


def start(jobs: list[Job], place: Path, *shape: int) -> Job:
    place.mkdir()
    job = Job(place, document(*shape))
    jobs.append(job)
    job.run()
    return job


def buffers(agent: int) -> list[int]:
    """Sizes of the staging buffers that an agent holds."""
    found = {}
    for link in Path(f"/proc/{agent}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name = str(link.readlink())
            if name.startswith("/memfd:holdfast-"):
                found[name] = link.stat().st_size
    return [size for size in found.values() if size]


@pytest.mark.parametrize(
    ("workers", "shard"), [(2, 1), (4, 2)], ids=["DDP", "two replicas of two shards"]
)
def test_a_node_holds_each_shard_once_and_a_killed_worker_changes_no_weight(
    jobs: list[Job], tmp_path: Path, workers: int, shard: int
) -> None:
    """DDP of two ranks: its sums of more ranks have another order after a restart."""
    undisturbed = start(jobs, tmp_path / "undisturbed", 1, workers, shard)
    assert undisturbed.wait().state == "succeeded", undisturbed.output()
    job = start(jobs, tmp_path / "killed", 1, workers, shard)
    job.until(lambda view: view.step >= 10)
    sizes = buffers(job.agent_pid("node-0"))
    assert len(sizes) == limits.STAGING_BUFFERS * shard, "not for each worker"
    job.kill(job.worker_pids()[1])
    job.running(incidents=1, steps=10)
    (incident,) = job.wait().incidents
    assert incident.restored_from == "memory"
    assert incident.steps_lost is not None and incident.steps_lost <= 1
    assert losses_of(job) == losses_of(undisturbed)
    assert last_state(job, STEPS - 1) == last_state(undisturbed, STEPS - 1)


def test_the_node_that_is_left_has_the_whole_state(jobs: list[Job], tmp_path: Path) -> None:
    job = start(jobs, tmp_path / "lost", 2, 2, 1)
    job.until(lambda view: view.step >= 10)
    job.kill(job.agent_pid("node-0"))
    job.running(incidents=1, steps=10)
    (incident,) = job.wait().incidents
    assert incident.restored_from == "memory"
    assert incident.steps_lost is not None and incident.steps_lost <= 1
    assert sorted(losses_of(job)) == list(range(STEPS)), "and repeated steps have the same loss"
