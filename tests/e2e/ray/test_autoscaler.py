"""Ray's autoscaler gives a job the nodes that it waits for, replaces one that is lost, and takes
all back when the job has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .autoscaled_cluster import GrowingCluster
from .jobs import Job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[GrowingCluster]:
    cluster = GrowingCluster(most=2)
    yield cluster
    cluster.close()


def test_nodes_are_added_for_a_job_used_replaced_and_given_back(
    cluster: GrowingCluster, tmp_path: Path
) -> None:
    assert cluster.nodes() == set(), "nobody has asked for any"
    job = Job(
        tmp_path, "growing", 1_000_000, cluster=cluster, nodes={"min": 1, "max": 2},
        checkpoint={"path": str(tmp_path / "growing"), "storage": {"everySteps": 20}},
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
        assert job.running(nodes=2).world_size == 4, "the node that was added is used"
        assert place not in {job.facts(one)["ray_node"] for one in job.members()}
    finally:
        job.end()
    cluster.until(lambda nodes: not nodes)  # idle: nothing is asked for any more


def test_a_job_that_can_only_run_whole_gets_all_its_nodes_at_once(
    cluster: GrowingCluster, tmp_path: Path
) -> None:
    """Its nodes are asked for as one placement group, which fits nothing that is there."""
    job = Job(
        tmp_path, "whole", 1_000_000, cluster=cluster, nodes={"min": 2, "max": 2},
        checkpoint={"path": str(tmp_path / "whole"), "storage": {"everySteps": 20}},
    )  # fmt: skip
    try:
        assert job.running(nodes=2).generation == 1, "never began with fewer"
        assert {job.facts(node)["ray_node"] for node in job.members()} == cluster.nodes()
    finally:
        job.end()
    cluster.until(lambda nodes: not nodes)
