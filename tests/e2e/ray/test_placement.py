"""Workers see the GPUs that Ray assigned to their node, and ranks follow the labels of Ray nodes.
Ray accepts any number of GPUs that a raylet reports, so none is needed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import cluster_rig
from .jobs import BOUND_S, Job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
GPUS = 4
KEY = "example.com/rack"
RACKS = "bdac"
"""Labels of the Ray nodes, by their start. By chance, ranks follow them one time in 24."""
SCRIPT = """
import json, os, pathlib, time
here, job, rank = pathlib.Path(__file__).parent, os.environ["JOB"], os.environ["RANK"]
file = here / f"{job}-{rank}.json"
file.with_suffix(".new").write_text(json.dumps(dict(os.environ)))
file.with_suffix(".new").rename(file)
while not (here / "end").exists():
    time.sleep(0.05)
"""


@pytest.fixture(scope="module", autouse=True)
def ray_nodes() -> Iterator[None]:
    """One has room for two jobs, the others for one worker."""
    cluster = cluster_rig.connected()
    for rack, room in zip(RACKS, (GPUS, 1, 1, 1), strict=True):
        cluster.add_node(num_cpus=room, num_gpus=room, labels={KEY: rack})
    yield
    for _ in RACKS:
        cluster.kill_newest()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(SCRIPT)
    yield tmp_path
    (tmp_path / "end").touch()


def start(place: Path, name: str, **changes: Any) -> Job:
    own = {"entrypoint": {"script": "train.py"}, "parallelism": {}, "env": {"JOB": name}}
    return Job(place, name, 1, **own, **changes)


def environments(place: Path, job: Job, world_size: int) -> list[dict[str, str]]:
    """Environments of all workers, by rank, once they run."""
    give_up = time.monotonic() + BOUND_S
    files = [place / f"{job.name}-{rank}.json" for rank in range(world_size)]
    while not all(file.exists() for file in files):
        over = job.command.poll() is not None or time.monotonic() > give_up
        assert not over, job.output.read_text()[-2000:]
        time.sleep(0.05)
    return [json.loads(file.read_text()) for file in files]


def test_two_jobs_on_one_ray_node_see_the_gpus_that_ray_gave_to_each(place: Path) -> None:
    half = {"nodes": {"min": 1, "max": 1}, "workersPerNode": 2, "resources": {"cpu": 1, "gpu": 1}}
    jobs = [start(place, name, **half) for name in ("gpus-left", "gpus-right")]
    try:
        seen = []
        for job in jobs:
            both = [one["CUDA_VISIBLE_DEVICES"] for one in environments(place, job, 2)]
            assert both[0] == both[1], "LOCAL_RANK selects one of the node's GPUs"
            seen.append(set(both[0].split(",")))
        assert [len(gpus) for gpus in seen] == [2, 2]
        assert seen[0] | seen[1] == {str(gpu) for gpu in range(GPUS)}
    finally:
        for job in jobs:
            job.end()


def test_ranks_are_laid_out_by_the_labels_of_ray_nodes(place: Path) -> None:
    job = start(
        place, "racks", nodes={"min": 4, "max": 4}, workersPerNode=1, ray={"topologyKeys": [KEY]},
        resources={"cpu": 1, "gpu": 1},
    )  # fmt: skip
    try:
        environments(place, job, len(RACKS))
        assert [label_of(job, rank) for rank in range(len(RACKS))] == sorted(RACKS)
    finally:
        job.end()


def label_of(job: Job, rank: int) -> str:
    from holdfast.orchestrator.backends.ray import ray_nodes

    node = next(
        node.name
        for node in job.view().nodes
        if any(worker.rank == rank for worker in node.workers)
    )
    ray_node = job.facts(node)["ray_node"]
    return str(ray_nodes.alive_nodes()[ray_node]["Labels"][KEY])
