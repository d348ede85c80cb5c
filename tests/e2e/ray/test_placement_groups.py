"""Placement groups of a job on a real cluster, by the backend alone: requests and places."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.backends.base import NoRoom
from tests.contract.ray_target import RayContractTarget
from tests.contract.targets import BOUND_S, Controller, release

from . import cluster_rig
from .jobs import Job, holdfast

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
MISSING = 8
"""More than asyncio's shared threads on a machine with two cores."""


def make_job(name: str) -> TrainingJob:
    """Each node takes a whole Ray node of the cluster; its minimum is two."""
    return job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": {
                "entrypoint": {"script": "train.py"},
                "nodes": {"min": 2, "max": cluster_rig.NODES + MISSING},
                "resources": {"cpu": cluster_rig.CPUS},
            },
        }
    )


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RayContractTarget]:
    cluster = cluster_rig.connected()
    while cluster.num_nodes < cluster_rig.NODES:
        cluster.add_node()
    while cluster.num_nodes > cluster_rig.NODES:
        cluster.kill_newest()
    place = RayContractTarget(make_job("groups"), tmp_path)
    yield place

    try:
        asyncio.run(release(place))
        assert place.leftovers() == []
    finally:
        place.close()
        while cluster.num_nodes < cluster_rig.NODES:
            cluster.add_node()


@pytest.fixture
def controller(place: RayContractTarget) -> Controller:
    return Controller(place)


async def have(controller: Controller, count: int, avoid: tuple[str, ...] = ()) -> list[str]:
    """Request nodes until that many more are up: old groups may be removed late."""
    given: list[str] = []
    async with asyncio.timeout(BOUND_S):
        while len(given) < count:
            try:
                given += await controller.backend.request_nodes(count - len(given), avoid)
            except NoRoom:
                await asyncio.sleep(0.2)  # a controller requests again, too
    await controller.up(*given)
    return given


async def lack(controller: Controller, count: int) -> None:
    with pytest.raises(NoRoom, match="the cluster has"):
        await controller.backend.request_nodes(count, ())


def ray_node(place: RayContractTarget, node: str) -> str:
    import ray

    from holdfast.orchestrator.backends.ray import actors

    actor = actors.find_agent(place.job.name, node)
    return str(ray.get(actor.facts.remote(), timeout=90)["ray_node"])


async def test_a_job_that_waits_for_many_nodes_still_commits_and_detects_a_lost_node(
    place: RayContractTarget, controller: Controller
) -> None:
    from holdfast.orchestrator.core.events import SuspendRequested
    from holdfast.orchestrator.journal.chunk_journal import ChunkJournal
    from holdfast.orchestrator.journal.gcs_store import GcsStore

    journal = await ChunkJournal.open(GcsStore(place.keys, place.job.name))
    nodes = await have(controller, cluster_rig.NODES)
    await lack(controller, MISSING)
    assert (
        len(cluster_rig.group_names(place.job.name)) == cluster_rig.NODES - 1 + MISSING
    )  # the gang has two bundles
    async with asyncio.timeout(BOUND_S):
        journal.append(1, SuspendRequested(by="a user"))
        await journal.commit()
        controller.kill(nodes[-1])
        await controller.ended(nodes[-1])


async def test_nodes_that_are_requested_together_are_on_different_ray_nodes(
    place: RayContractTarget, controller: Controller
) -> None:
    nodes = await have(controller, 3)
    assert len({ray_node(place, node) for node in nodes}) == 3


async def test_an_avoided_ray_node_is_not_used_again_though_the_gang_has_a_bundle_there(
    place: RayContractTarget,
) -> None:
    async with Controller(place) as first:
        bad, _good = await have(first, 2)
        blamed = ray_node(place, bad)
        while not first.backend._registry.ray_nodes.get(bad):  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        await first.backend.release_node(bad)
        await first.ended(bad)
        (old,) = await have(first, 1, (bad,))
        assert ray_node(place, old) != blamed
    async with Controller(place) as second:  # avoids it, too
        await second.backend.release_node(old)
        await second.ended(old)
        (new,) = await have(second, 1, (bad,))
        assert ray_node(place, new) != blamed


async def test_a_lost_node_of_the_gang_is_replaced_where_ray_moves_its_bundle(
    place: RayContractTarget, controller: Controller
) -> None:
    stays, lost = await have(controller, 2)
    before = {ray_node(place, stays), ray_node(place, lost)}
    cluster_rig.shared().kill_node(ray_node(place, lost))
    while lost in await controller.backend.list_nodes():
        await asyncio.sleep(0.01)  # the core lists nodes when an agent's connection has closed
    (new,) = await have(controller, 1)
    assert ray_node(place, new) not in before
    assert len(cluster_rig.group_names(place.job.name)) == 1, "the gang has all nodes"


async def test_nodes_that_are_no_longer_wanted_are_no_longer_requested(
    place: RayContractTarget, controller: Controller
) -> None:
    def requested() -> int:
        return len(cluster_rig.group_names(place.job.name)) - (
            cluster_rig.NODES - 1
        )  # two share the gang

    await have(controller, cluster_rig.NODES)
    await lack(controller, 3)
    assert requested() == 3
    await controller.backend.trim(lambda: 1)  # type: ignore[attr-defined]
    assert requested() == 1
    await controller.backend.trim(lambda: 0)  # type: ignore[attr-defined]
    assert requested() == 0
    await lack(controller, 2)
    assert requested() == 2


def test_a_suspended_job_requests_no_nodes_and_a_resumed_one_does(tmp_path: Path) -> None:
    job = Job(tmp_path, "requesting", 10, resources={"cpu": 64}, nodes={"min": 2, "max": 4})
    try:
        job.until(lambda view: len(cluster_rig.group_names(job.name)) == 3)  # the gang and two more
        assert holdfast("suspend", job.name, "--ray", job.cluster.address).returncode == 0
        job.until(lambda view: len(cluster_rig.group_names(job.name)) == 0)
        assert holdfast("resume", job.name, "--ray", job.cluster.address).returncode == 0
        job.until(lambda view: len(cluster_rig.group_names(job.name)) == 3)
    finally:
        job.end()
    assert cluster_rig.group_names(job.name) == []
