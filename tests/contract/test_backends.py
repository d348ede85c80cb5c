"""The contract of all backends (backends/base.py), with real processes and real kills.

The tests of one backend share a target: each has a new controller, which finds the nodes of the
last one. That is a part of the contract.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.orchestrator.backends.base import NoRoom
from holdfast.orchestrator.backends.local import LocalBackend
from holdfast.orchestrator.errors import HoldfastError

from .targets import TARGETS, ContractTarget, Controller, LocalContractTarget, pid_exists, release

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=TARGETS)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ContractTarget]:
    target = TARGETS[request.param](tmp_path_factory.mktemp(request.param))
    yield target

    try:
        asyncio.run(release(target))
        assert target.leftovers() == []
    finally:
        target.close()


@pytest.fixture
def controller(target: ContractTarget) -> Controller:
    return Controller(target)


async def test_requested_nodes_come_up_and_are_listed(controller: Controller) -> None:
    before = await controller.backend.list_nodes()
    nodes = await controller.request(2)
    assert len(set(nodes)) == 2 and not set(nodes) & set(before)
    assert await controller.backend.list_nodes() == tuple(sorted({*before, *nodes}))
    await controller.up(*nodes)
    assert await controller.backend.list_nodes() == tuple(sorted({*before, *nodes}))


async def test_a_new_controller_finds_the_nodes_of_the_last_one(target: ContractTarget) -> None:
    async with Controller(target) as first:
        (node,) = await first.request(1)
        await first.up(node)
    async with Controller(target) as second:
        assert node in await second.backend.list_nodes()
        assert second.gone == {}
        second.kill(node)
        await second.ended(node)


async def test_nodes_requested_by_a_killed_controller_come_up(target: ContractTarget) -> None:
    async with Controller(target) as first:
        (node,) = await first.request(1)
    async with Controller(target) as second:
        await second.up(node)


async def test_a_killed_node_is_reported_once_and_not_listed(controller: Controller) -> None:
    (node,) = await controller.request(1)
    await controller.up(node)
    controller.kill(node)
    await controller.ended(node)
    assert "SIGKILL" in controller.gone[node].detail
    assert node not in await controller.backend.list_nodes()


async def test_a_released_node_ends_and_can_be_released_again(
    target: ContractTarget, controller: Controller
) -> None:
    (node,) = await controller.request(1)
    await controller.up(node)
    pid = target.agent_pid(node)
    assert pid is not None
    await controller.backend.release_node(node)
    await controller.ended(node)
    assert not pid_exists(pid)
    await controller.backend.release_node(node)
    await controller.backend.release_node("unknown-node")
    assert node not in await controller.backend.list_nodes()


async def test_names_are_not_reused(target: ContractTarget) -> None:
    names = set()
    for _ in range(3):
        async with Controller(target) as controller:
            (node,) = await controller.request(1)
            names.add(node)
            await controller.up(node)
            await controller.backend.release_node(node)
            await controller.ended(node)
    assert len(names) == 3


async def test_without_capacity_no_node_is_started(controller: Controller) -> None:
    """Lack of capacity is injected."""
    before = await controller.backend.list_nodes()
    controller.backend.withhold(60.0)  # type: ignore[attr-defined]
    with pytest.raises(NoRoom, match="fault injection"):
        await controller.backend.request_nodes(1, ())
    assert await controller.backend.list_nodes() == before


async def test_nodes_come_up_after_the_node_launcher_was_killed(
    target: ContractTarget, controller: Controller
) -> None:
    """The launcher's nodes live on, and are still watched and released."""
    if not isinstance(target, LocalContractTarget):
        pytest.skip("only the local backend has a node launcher")
    (old,) = await controller.request(1)
    await controller.up(old)
    pids = {node: target.agent_pid(node) for node in await controller.backend.list_nodes()}
    agents = set(pids.values())
    for pid in target.host_pids():
        if pid not in agents:
            os.kill(pid, signal.SIGKILL)
    (new,) = await controller.request(1)
    await controller.up(new)
    assert set(await controller.backend.list_nodes()) == {*pids, new}
    for node, pid in pids.items():
        assert pid is not None and pid_exists(pid)
        os.kill(pid, signal.SIGKILL)
        await controller.ended(node)
    assert await controller.backend.list_nodes() == (new,)


async def test_a_node_launcher_that_cannot_start_is_reported_with_its_output(
    tmp_path: Path,
) -> None:
    target = LocalContractTarget(tmp_path)
    target.make = lambda: LocalBackend(  # type: ignore[method-assign]
        target.job, target.paths, launcher_module="holdfast.workers.agent.no_such_module"
    )
    async with Controller(target) as controller:
        nodes = await controller.request(2)
        await controller.ended(*nodes)
        assert "ended with code 1" in controller.gone[nodes[0]].detail
        assert "no_such_module" in controller.gone[nodes[0]].detail
        assert await controller.backend.list_nodes() == ()
        await controller.backend.close(release=True)
    assert target.leftovers() == []


async def test_a_node_whose_name_cannot_be_stored_is_not_started(tmp_path: Path) -> None:
    target = LocalContractTarget(tmp_path)
    async with Controller(target) as controller:
        target.paths.nodes_file.mkdir()  # a directory, which no file can replace
        with pytest.raises(HoldfastError, match=r"nodes\.json: cannot be written"):
            await controller.backend.request_nodes(1, ())
        assert await controller.backend.list_nodes() == ()
        target.paths.nodes_file.rmdir()
        (node,) = await controller.request(1)
        await controller.up(node)
        assert await controller.backend.list_nodes() == (node,)
        await controller.backend.close(release=True)
    assert target.leftovers() == []
