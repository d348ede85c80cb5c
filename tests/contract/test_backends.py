"""What every backend promises (backends/base.py), with real processes and real kills.

The tests of one backend share a place: each is a controller of its own that finds what the last one
left, which is itself a part of the contract.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.orchestrator.backends.base import NoRoom
from holdfast.orchestrator.backends.local import LocalBackend
from holdfast.orchestrator.errors import HoldfastError

from .targets import PLACES, ContractTarget, Controller, LocalContractTarget, pid_exists, run

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=PLACES)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ContractTarget]:
    place = PLACES[request.param](tmp_path_factory.mktemp(request.param))
    yield place

    async def release(controller: Controller) -> None:
        await controller.backend.close(release=True)

    try:
        run(release, place)
        assert place.leftovers() == []
    finally:
        place.close()


def test_requested_nodes_come_up_and_are_listed(place: ContractTarget) -> None:
    async def scenario(controller: Controller) -> None:
        before = await controller.backend.list_nodes()
        nodes = await controller.request(2)
        assert len(set(nodes)) == 2 and not set(nodes) & set(before)
        assert await controller.backend.list_nodes() == tuple(sorted({*before, *nodes}))
        await controller.up(*nodes)
        assert await controller.backend.list_nodes() == tuple(sorted({*before, *nodes}))

    run(scenario, place)


def test_a_new_controller_finds_the_nodes_of_the_last_one(place: ContractTarget) -> None:
    nodes: list[str] = []

    async def first(controller: Controller) -> None:
        nodes.extend(await controller.request(1))
        await controller.up(*nodes)

    async def second(controller: Controller) -> None:
        assert set(nodes) <= set(await controller.backend.list_nodes())
        assert controller.gone == {}
        controller.kill(nodes[0])
        await controller.ended(nodes[0])

    run(first, place)
    run(second, place)


def test_nodes_that_a_controller_asked_for_and_did_not_live_to_see_come_up(
    place: ContractTarget,
) -> None:
    nodes: list[str] = []

    async def first(controller: Controller) -> None:
        nodes.extend(await controller.request(1))

    async def second(controller: Controller) -> None:
        await controller.up(*nodes)

    run(first, place)
    run(second, place)


def test_a_killed_node_is_told_once_and_listed_no_more(place: ContractTarget) -> None:
    async def scenario(controller: Controller) -> None:
        (node,) = await controller.request(1)
        await controller.up(node)
        controller.kill(node)
        await controller.ended(node)
        assert "SIGKILL" in controller.gone[node].detail
        assert node not in await controller.backend.list_nodes()

    run(scenario, place)


def test_a_released_node_ends_and_releasing_it_again_does_no_harm(place: ContractTarget) -> None:
    async def scenario(controller: Controller) -> None:
        (node,) = await controller.request(1)
        await controller.up(node)
        pid = place.agent_pid(node)
        assert pid is not None
        await controller.backend.release_node(node)
        await controller.ended(node)
        assert not pid_exists(pid)
        await controller.backend.release_node(node)
        await controller.backend.release_node("node-of-nobody")
        assert node not in await controller.backend.list_nodes()

    run(scenario, place)


def test_names_are_never_used_again(place: ContractTarget) -> None:
    names: list[str] = []

    async def scenario(controller: Controller) -> None:
        (node,) = await controller.request(1)
        names.append(node)
        await controller.up(node)
        await controller.backend.release_node(node)
        await controller.ended(node)

    for _ in range(3):
        run(scenario, place)
    assert len(set(names)) == 3


def test_without_room_no_node_is_started(place: ContractTarget) -> None:
    """On this machine lack of room can only be rehearsed."""

    async def scenario(controller: Controller) -> None:
        before = await controller.backend.list_nodes()
        controller.backend.withhold(60.0)  # type: ignore[attr-defined]
        with pytest.raises(NoRoom, match="rehearsal"):
            await controller.backend.request_nodes(1, ())
        assert await controller.backend.list_nodes() == before

    run(scenario, place)


def test_nodes_come_up_again_after_the_machine_host_was_killed(place: ContractTarget) -> None:
    """What the host's death takes with it is told, and what it leaves is still watched."""
    if not isinstance(place, LocalContractTarget):
        pytest.skip("only the local backend has a machine host")

    async def scenario(controller: Controller) -> None:
        (old,) = await controller.request(1)
        await controller.up(old)
        pids = {node: place.agent_pid(node) for node in await controller.backend.list_nodes()}
        agents = set(pids.values())
        for pid in place.host_pids():
            if pid not in agents:
                os.kill(pid, signal.SIGKILL)
        (new,) = await controller.request(1)
        await controller.up(new)
        for node, pid in pids.items():
            assert pid is not None
            if pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
            await controller.ended(node)
        assert await controller.backend.list_nodes() == (new,)

    run(scenario, place)


def test_a_machine_host_that_cannot_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    place = LocalContractTarget(tmp_path)
    place.make = lambda: LocalBackend(  # type: ignore[method-assign]
        place.job, place.paths, host_module="holdfast.workers.agent.no_such_module"
    )

    async def scenario(controller: Controller) -> None:
        nodes = await controller.request(2)
        await controller.ended(*nodes)
        assert "ended with code 1" in controller.gone[nodes[0]].detail
        assert "no_such_module" in controller.gone[nodes[0]].detail
        assert await controller.backend.list_nodes() == ()
        await controller.backend.close(release=True)

    run(scenario, place)
    assert place.leftovers() == []


def test_a_node_whose_name_cannot_be_written_down_is_not_started(tmp_path: Path) -> None:
    place = LocalContractTarget(tmp_path)

    async def scenario(controller: Controller) -> None:
        place.paths.nodes_file.mkdir()  # what no file can replace
        with pytest.raises(HoldfastError, match=r"nodes\.json: cannot be written"):
            await controller.backend.request_nodes(1, ())
        assert await controller.backend.list_nodes() == ()
        place.paths.nodes_file.rmdir()
        (node,) = await controller.request(1)
        await controller.up(node)
        assert await controller.backend.list_nodes() == (node,)
        await controller.backend.close(release=True)

    run(scenario, place)
    assert place.leftovers() == []
