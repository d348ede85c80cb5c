"""Where the nodes of a job are put on a real cluster, and what is demanded of it: the backend
alone, as one controller after the other has it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.backends.base import NoRoom
from orchestrator.protocol.spec import TrainingJob, job_from_mapping

from ...contract.places import Controller, run
from ...contract.ray_place import RayPlace
from . import rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
MISSING = 8
"""More than the threads that asyncio shares on a machine of two cores."""
BOUND_S = 20.0


def make_job(name: str) -> TrainingJob:
    """Each node takes a whole Ray node of the cluster; its minimum is two."""
    return job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": {
                "entrypoint": {"script": "train.py"},
                "nodes": {"min": 2, "max": rig.NODES + MISSING},
                "resources": {"cpu": rig.CPUS},
            },
        }
    )


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RayPlace]:
    cluster = rig.connected()
    while cluster.num_nodes < rig.NODES:
        cluster.add_node()
    while cluster.num_nodes > rig.NODES:
        cluster.kill_newest()
    place = RayPlace(make_job("rooms"), tmp_path)
    yield place

    async def release(controller: Controller) -> None:
        await controller.backend.close(release=True)

    try:
        run(release, place)
        assert place.leftovers() == []
    finally:
        place.close()


def scene(place: RayPlace, scenario: Callable[[Controller], Awaitable[None]]) -> None:
    run(scenario, place)


def ray_node(place: RayPlace, node: str) -> str:
    import ray

    from orchestrator.backends.ray import actors

    actor = actors.find(place.job.name, node)
    return str(ray.get(actor.facts.remote(), timeout=90)["ray_node"])


def test_a_job_that_waits_for_many_nodes_still_commits_and_notices_the_end_of_one(
    place: RayPlace,
) -> None:
    from orchestrator.backends.ray.journal import open_journal
    from orchestrator.core.events import SuspendRequested

    async def scenario(controller: Controller) -> None:
        journal = await open_journal(place.keys, place.job.name)
        nodes = await controller.backend.request_nodes(rig.NODES + MISSING, ())
        assert len(nodes) == rig.NODES
        assert len(place.leftovers()) >= 1 + MISSING, "what is missing is demanded"
        await controller.up(*nodes)
        async with asyncio.timeout(BOUND_S):
            journal.append(1, SuspendRequested(by="somebody"))
            await journal.commit()
            controller.kill(nodes[-1])
            await controller.ended(nodes[-1])

    scene(place, scenario)


def test_nodes_that_come_together_are_each_on_a_ray_node_of_their_own(place: RayPlace) -> None:
    async def scenario(controller: Controller) -> None:
        nodes = await controller.backend.request_nodes(3, ())
        await controller.up(*nodes)
        assert len({ray_node(place, node) for node in nodes}) == 3

    scene(place, scenario)


def test_a_ray_node_that_is_not_trusted_is_not_used_again_though_the_gang_holds_it(
    place: RayPlace,
) -> None:
    async def first(controller: Controller) -> None:
        bad, good = await controller.backend.request_nodes(2, ())
        await controller.up(bad, good)
        blamed = ray_node(place, bad)
        while not controller.backend._known.places.get(bad):  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        await controller.backend.release_node(bad)
        await controller.ended(bad)
        (new,) = await controller.backend.request_nodes(1, (bad,))
        await controller.up(new)
        assert ray_node(place, new) != blamed
        noted.append((bad, blamed, new))

    async def second(controller: Controller) -> None:
        """Another controller knows it too."""
        bad, blamed, old = noted[0]
        await controller.backend.release_node(old)
        await controller.ended(old)
        (new,) = await controller.backend.request_nodes(1, (bad,))
        await controller.up(new)
        assert ray_node(place, new) != blamed

    noted: list[tuple[str, str, str]] = []
    scene(place, first)
    scene(place, second)


def test_what_is_not_wanted_any_more_is_not_demanded_any_more(place: RayPlace) -> None:
    from orchestrator.backends.ray import groups

    async def scenario(controller: Controller) -> None:
        backend = controller.backend
        nodes = await backend.request_nodes(rig.NODES + 3, ())
        assert len(nodes) == rig.NODES
        waiting = len(groups.names_of(place.job.name)) - (rig.NODES - 1)  # two share the gang's
        assert waiting == 3
        await backend.trim(lambda: 1)  # type: ignore[attr-defined]
        assert len(groups.names_of(place.job.name)) == rig.NODES - 1 + 1
        await backend.trim(lambda: 0)  # type: ignore[attr-defined]
        assert len(groups.names_of(place.job.name)) == rig.NODES - 1
        with pytest.raises(NoRoom, match="the cluster has"):
            await backend.request_nodes(2, ())
        assert len(groups.names_of(place.job.name)) == rig.NODES - 1 + 2

    scene(place, scenario)
