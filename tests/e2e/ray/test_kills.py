"""An agent and its workers end with their actor, however it ends, and none trains on unknown."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from . import cluster_rig
from .jobs import BOUND_S, Job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("ray"), "kills", 1_000_000)
    yield job
    job.end()
    while job.cluster.num_nodes < cluster_rig.NODES:
        job.cluster.add_node()


def tree(job: Job, node: str) -> list[psutil.Process]:
    """Agent, fork server, workers."""
    agent = psutil.Process(job.facts(node)["pid"])
    found = [agent, *agent.children(recursive=True)]
    names = [Path(f"/proc/{one.pid}/comm").read_text() for one in found]
    assert sum(name.startswith("hf-rank-") for name in names) == 2, names
    return found


def victim(job: Job) -> str:
    job.running()
    return job.members()[-1]


def test_a_killed_agent_actor_leaves_no_agent_and_no_worker(job: Job) -> None:
    node = victim(job)
    processes = tree(job, node)
    os.kill(job.facts(node)["actor_pid"], signal.SIGKILL)
    _gone, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    assert alive == []


def test_a_killed_raylet_leaves_no_agent_and_no_worker(job: Job) -> None:
    node = victim(job)
    processes = tree(job, node)
    job.cluster.kill_raylet(job.facts(node)["ray_node"])
    _gone, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    assert alive == []
    assert node not in {one.name for one in job.running().nodes}
