"""Ray's autoscaler adds requested nodes, replaces a lost one, and removes all at the job's end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .autoscaled_cluster import GrowingCluster
from .jobs import Job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
EVERY = {"storage": {"everySteps": 20}, "memory": {"everySteps": 1}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[GrowingCluster]:
    cluster = GrowingCluster(most=2)
    yield cluster
    cluster.close()


def test_nodes_are_added_for_a_job_replaced_and_removed_after_its_end(
    cluster: GrowingCluster, tmp_path: Path
) -> None:
    assert cluster.nodes() == set(), "no job has requested any"
    job = Job(
        tmp_path, "growing", 1_000_000, cluster=cluster, nodes={"min": 1, "max": 2},
        checkpoint={"path": str(tmp_path / "growing"), **EVERY},
    )  # fmt: skip
    try:
        assert job.running(nodes=2).world_size == 4
        before = job.view().num_incidents
        places = {node: job.facts(node)["ray_node"] for node in job.members()}
        assert set(places.values()) == cluster.nodes()
        node, place = places.popitem()
        cluster.kill_node(place)
        incident = job.incident_after(before)
        assert node in incident.title and incident.steps_lost == 0
        assert job.running(nodes=2).world_size == 4, "the added node is used"
        assert place not in {job.facts(one)["ray_node"] for one in job.members()}
    finally:
        job.end()
    cluster.until(lambda nodes: not nodes)  # idle: nothing is requested


def test_a_job_that_can_only_run_whole_gets_all_its_nodes_at_once(
    cluster: GrowingCluster, tmp_path: Path
) -> None:
    """The job's nodes are requested as one placement group, which has no room at first."""
    job = Job(
        tmp_path, "whole", 1_000_000, cluster=cluster, nodes={"min": 2, "max": 2},
        checkpoint={"path": str(tmp_path / "whole"), **EVERY},
    )  # fmt: skip
    try:
        assert job.running(nodes=2).generation == 1, "it never started with fewer"
        assert {job.facts(node)["ray_node"] for node in job.members()} == cluster.nodes()
    finally:
        job.end()
    cluster.until(lambda nodes: not nodes)
