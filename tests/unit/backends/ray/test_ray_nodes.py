"""Ray nodes that count as dead, and nodes for new bundles."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.orchestrator.backends.ray import ray_nodes
from holdfast.orchestrator.backends.ray.placement import RayGroups
from tests.unit.runtime.harness import make_job

BOUND_S = 30.0


@pytest.fixture
def ray_node() -> Iterator[tuple[dict[str, Any], socket.socket]]:
    """The node as the head lists it, and the socket of its raylet, which accepts none yet."""
    with socket.socket() as raylet:
        raylet.bind(("127.0.0.1", 0))
        host, port = raylet.getsockname()
        yield {"NodeManagerAddress": host, "NodeManagerPort": port}, raylet


def dead(nodes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr(ray_nodes, "alive_nodes", lambda: nodes)

    async def scenario() -> set[str]:
        async with asyncio.timeout(BOUND_S):
            return await ray_nodes.dead(nodes)

    return asyncio.run(scenario())


def test_a_raylet_whose_port_is_closed_has_ended(
    ray_node: tuple[dict[str, Any], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, raylet = ray_node
    assert dead({"a": facts}, monkeypatch) == {"a"}
    raylet.listen()
    assert dead({"a": facts}, monkeypatch) == set()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH)),
        OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)),
        TimeoutError(),
    ],
)
def test_an_error_that_may_be_local_does_not_make_a_ray_node_dead(
    error: OSError, ray_node: tuple[dict[str, Any], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_address: Any) -> None:
        raise error

    monkeypatch.setattr(asyncio, "open_connection", fail)
    assert dead({"a": ray_node[0]}, monkeypatch) == set()
    assert asyncio.run(ray_nodes.answering({"a"})) == set(), "nor is it a place for a bundle"


def test_the_number_of_connections_at_the_same_time_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once: list[int] = []
    now = 0

    async def listens(_node: dict[str, Any]) -> bool:
        nonlocal now
        now += 1
        at_once.append(now)
        await asyncio.sleep(0)
        now -= 1
        return False

    monkeypatch.setattr(ray_nodes, "raylet_listens", listens)
    nodes: dict[str, dict[str, Any]] = {
        str(number): {} for number in range(3 * ray_nodes.MAX_CONNECTIONS)
    }
    assert dead(nodes, monkeypatch) == nodes.keys()
    assert max(at_once) == ray_nodes.MAX_CONNECTIONS


async def test_ray_nodes_that_do_not_answer_take_no_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The journal is written in them."""
    nodes = {
        str(number): {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1}
        for number in range(ray_nodes.MAX_CONNECTIONS)
    }
    monkeypatch.setattr(ray_nodes, "alive_nodes", lambda: nodes)
    asked, answer = asyncio.Event(), asyncio.Event()

    async def connect(*_address: Any) -> None:
        asked.set()
        await answer.wait()
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", connect)
    async with asyncio.timeout(BOUND_S):
        answering = asyncio.create_task(RayGroups("job", {}).answering(nodes))
        await asked.wait()
        assert await asyncio.to_thread(lambda: "at once") == "at once"
        assert not answering.done()
        answer.set()
        assert await answering == set()


def test_new_bundles_go_only_where_a_raylet_listens(
    ray_node: tuple[dict[str, Any], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, raylet = ray_node
    monkeypatch.setattr(ray_nodes, "alive_nodes", lambda: {"a": facts})
    assert asyncio.run(ray_nodes.answering({"a", "gone"})) == set()
    raylet.listen()
    assert asyncio.run(ray_nodes.answering({"a", "gone"})) == {"a"}


@pytest.mark.parametrize(
    ("ray", "most", "wanted"),
    [
        ({}, 8, False),
        ({"labelSelector": {"pool": "cpu"}}, 0, False),
        ({"customResources": {"efa": 1}}, 4, False),
        ({"acceleratorType": "H100"}, 0, True),
    ],
)
def test_auto_looks_at_the_gpus_of_ray_nodes_that_the_job_may_use(
    ray: dict[str, Any], most: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {
        "a": {"Resources": {"CPU": 4.0}, "Labels": {"pool": "cpu"}},
        "b": {"Resources": {"CPU": 4.0, "GPU": 8.0}, "Labels": {"pool": "gpu"}},
        "c": {"Resources": {"CPU": 4.0, "GPU": 4.0, "efa": 1.0}, "Labels": {}},
    }
    monkeypatch.setattr(ray_nodes, "alive_nodes", lambda: nodes)
    found = ray_nodes.gpus_found(make_job(ray=ray))
    assert (found.most, found.wanted) == (most, wanted)
