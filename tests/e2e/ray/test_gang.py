"""Jobs that need more room than the cluster has: none starts partially, each reports what is free
and what is missing, and jobs that wait for the same room get it one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import cluster_rig
from .jobs import BOUND_S, Job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SCRIPT = """
import os, pathlib, time
here, job = pathlib.Path(__file__).parent, os.environ["JOB"]
(here / f"{job}-{os.environ['RANK']}").touch()
while not (here / f"{job}-end").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(SCRIPT)
    cluster = cluster_rig.connected()
    while cluster.num_nodes < cluster_rig.NODES:
        cluster.add_node()
    while cluster.num_nodes > cluster_rig.NODES:
        cluster.kill_newest()
    yield tmp_path
    for name in ("holder", "first", "second"):
        (tmp_path / f"{name}-end").touch()


def start(place: Path, name: str, nodes: int) -> Job:
    return Job(
        place, name, 1, entrypoint={"script": "train.py"}, parallelism={}, env={"JOB": name},
        nodes={"min": nodes, "max": nodes},
    )  # fmt: skip


def ranks(place: Path, job: Job) -> int:
    """Number of the job's workers that have started."""
    return len(list(place.glob(f"{job.name}-[0-9]*")))


def test_gangs_without_room_hold_nothing_and_start_one_after_the_other(place: Path) -> None:
    import ray

    holder = start(place, "holder", 2)
    jobs = [holder]
    try:
        until(lambda: ranks(place, holder) == 4, holder)
        waiting = [start(place, name, 3) for name in ("first", "second")]
        jobs += waiting
        for job in waiting:
            events = job.events_until("free are 4 of 8 CPU")
            assert "3 more nodes of 2 CPU each on a Ray node of its own: the cluster has" in events
            view = job.view()
            assert view.state == "pending" and view.generation == 0
        names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
        assert not [name for name in names if name.startswith(("first-node", "second-node"))]
        (place / "holder-end").touch()
        until(lambda: any(ranks(place, job) == 6 for job in waiting), *waiting)
        waiting.sort(key=lambda job: -ranks(place, job))
        one, other = waiting
        assert (ranks(place, one), ranks(place, other)) == (6, 0)
        assert other.view().generation == 0
        (place / f"{one.name}-end").touch()
        until(lambda: ranks(place, other) == 6, other)
        (place / f"{other.name}-end").touch()
        for job in jobs:
            assert job.command.wait(BOUND_S) == 0, job.output.read_text()
            assert cluster_rig.group_names(job.name) == []
    finally:
        for job in jobs:
            job.end()


def until(true: Callable[[], bool], *jobs: Job) -> None:
    give_up = time.monotonic() + BOUND_S
    while not true():
        over = time.monotonic() > give_up
        assert not over, "\n".join(job.output.read_text()[-2000:] for job in jobs)
        time.sleep(0.05)
