"""Ray will take a Ray node away (`ray drain-node`, spot): the job moves before, without a loss."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from . import cluster_rig
from .jobs import BOUND_S, Job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
MESSAGE = "spot instance is reclaimed"
DEADLINE_S = 120
NEVER = 1_000_000


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two nodes and a spare on a cluster with one more node. Steps are staged on request."""
    nodes = {"min": 1, "max": 2, "spares": 1}
    place = tmp_path_factory.mktemp("ray")
    never = {"everySteps": NEVER}
    tiers = {"path": str(place / "tier"), "memory": never, "storage": never}
    job = Job(place, "drained", NEVER, nodes=nodes, checkpoint=tiers)
    while job.cluster.num_nodes < cluster_rig.NODES:
        job.cluster.add_node()
    yield job
    job.end()
    while job.cluster.num_nodes < cluster_rig.NODES:
        job.cluster.add_node()


def drain(job: Job, ray_node: str) -> None:
    """Drain as a user or a cloud's handler does."""
    subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "drain-node",
         "--address", job.cluster.address, "--node-id", ray_node,
         "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", MESSAGE,
         "--deadline-remaining-seconds", str(DEADLINE_S)],
        check=True, capture_output=True, timeout=BOUND_S,
    )  # fmt: skip


def victim(job: Job) -> tuple[str, str]:
    """(node, its Ray node) of a member."""
    node = job.members()[-1]
    return node, job.facts(node)["ray_node"]


def gone(job: Job) -> None:
    """Wait until no Ray node drains: it ends by itself as soon as no job uses it."""
    from holdfast.orchestrator.backends.ray import drains, ray_nodes

    give_up = time.monotonic() + BOUND_S
    while drains.draining().keys() & ray_nodes.alive_nodes().keys():
        assert time.monotonic() < give_up, drains.draining()
        time.sleep(0.1)  # Ray sends no event


def test_a_spare_takes_over_before_a_drained_ray_node_goes_and_no_step_is_lost(job: Job) -> None:
    view = job.until(lambda view: view.state == "running" and len(view.nodes) == 3)
    before = view.num_incidents
    node, place = victim(job)
    drain(job, place)
    incident = job.incident_after(before)
    assert incident.steps_lost == 0 and incident.world_size_after == 4
    assert node in incident.title
    assert "Ray drains its Ray node" in incident.evidence and MESSAGE in incident.evidence
    assert "preemption" in incident.evidence
    after = job.running()
    assert node not in {one.name for one in after.nodes}
    assert place not in {job.facts(one.name)["ray_node"] for one in after.nodes}


def test_the_drained_ray_node_ends_by_itself_when_the_job_has_left_it(job: Job) -> None:
    gone(job)


def test_without_a_spare_the_job_shrinks_before_the_ray_node_goes_and_loses_no_step(
    job: Job,
) -> None:
    for nodes_left in (2, 1):  # the new spare takes over first; then there is no other node
        job.until(
            lambda view, spares=nodes_left - 1: (
                sum(one.state == "spare" for one in view.nodes) == spares
            )
        )
        before = job.running(nodes=2).num_incidents
        node, place = victim(job)
        drain(job, place)
        incident = job.incident_after(before)
        assert incident.steps_lost == 0 and node in incident.title
        assert incident.world_size_after == 2 * nodes_left
        assert MESSAGE in incident.evidence
        gone(job)


def test_a_ray_node_that_is_added_is_used(job: Job) -> None:
    job.cluster.add_node()
    assert job.running(nodes=2).world_size == 4
