"""What is said of a cluster that does not answer, and which Ray nodes are taken for dead."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.orchestrator.backends.ray import cluster, ray_nodes
from holdfast.orchestrator.backends.ray.placement_groups import RayGroups
from holdfast.orchestrator.errors import UserError

BOUND_S = 30.0


@pytest.fixture
def ray_node() -> Iterator[tuple[dict[str, Any], socket.socket]]:
    """One as the head tells of it, and the socket of its raylet, which takes no connections yet."""
    with socket.socket() as raylet:
        raylet.bind(("127.0.0.1", 0))
        host, port = raylet.getsockname()
        yield {"NodeManagerAddress": host, "NodeManagerPort": port}, raylet


def ended(nodes: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr(cluster, "alive_nodes", lambda: nodes)

    async def scenario() -> set[str]:
        async with asyncio.timeout(BOUND_S):
            return await ray_nodes.ended(nodes)

    return asyncio.run(scenario())


def test_a_cluster_that_is_gone_without_a_word_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(**_options: Any) -> None:
        raise ConnectionError  # Ray 2.51

    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "_init", gone)
    with pytest.raises(UserError, match=f"got auto \\(nobody .* a head of Ray {ray.__version__}, "):
        cluster.connect("auto")


def test_a_raylet_whose_port_is_closed_has_ended(
    ray_node: tuple[dict[str, Any], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, raylet = ray_node
    assert ended({"a": facts}, monkeypatch) == {"a"}
    raylet.listen()
    assert ended({"a": facts}, monkeypatch) == set()


@pytest.mark.parametrize(
    "trouble",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH)),
        OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)),
        TimeoutError(),
    ],
)
def test_what_may_be_our_own_trouble_is_no_end_of_a_ray_node(
    trouble: OSError,
    ray_node: tuple[dict[str, Any], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_place: Any) -> None:
        raise trouble

    monkeypatch.setattr(asyncio, "open_connection", fail)
    assert ended({"a": ray_node[0]}, monkeypatch) == set()
    assert asyncio.run(ray_nodes.answering({"a"})) == set(), "nor a place for something new"


def test_many_ray_nodes_are_asked_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    now = 0

    async def listens(_node: dict[str, Any]) -> bool:
        nonlocal now
        now += 1
        at_once.append(now)
        await asyncio.sleep(0)
        now -= 1
        return False

    monkeypatch.setattr(cluster, "listens", listens)
    nodes: dict[str, dict[str, Any]] = {str(number): {} for number in range(3 * ray_nodes.AT_ONCE)}
    assert ended(nodes, monkeypatch) == nodes.keys()
    assert max(at_once) == ray_nodes.AT_ONCE


def test_ray_nodes_that_say_nothing_leave_the_threads_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The journal is written in them."""
    nodes = {
        str(number): {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1}
        for number in range(ray_nodes.AT_ONCE)
    }
    monkeypatch.setattr(cluster, "alive_nodes", lambda: nodes)

    async def scenario() -> None:
        asked, silence = asyncio.Event(), asyncio.Event()

        async def say_nothing(*_place: Any) -> None:
            asked.set()
            await silence.wait()
            raise ConnectionRefusedError

        monkeypatch.setattr(asyncio, "open_connection", say_nothing)
        async with asyncio.timeout(BOUND_S):
            answering = asyncio.create_task(RayGroups("job", {}).answering(nodes))
            await asked.wait()
            assert await asyncio.to_thread(lambda: "at once") == "at once"
            assert not answering.done()
            silence.set()
            assert await answering == set()

    asyncio.run(scenario())


def test_something_new_is_put_only_where_somebody_listens(
    ray_node: tuple[dict[str, Any], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, raylet = ray_node
    monkeypatch.setattr(cluster, "alive_nodes", lambda: {"a": facts})
    assert asyncio.run(ray_nodes.answering({"a", "gone"})) == set()
    raylet.listen()
    assert asyncio.run(ray_nodes.answering({"a", "gone"})) == {"a"}


def test_what_a_thread_of_grpc_raises_when_its_connection_is_closed_is_not_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(
        threading, "excepthook", lambda raised: printed.append(str(raised.exc_value))
    )

    def fail(text: str) -> None:
        raise ValueError(text)

    cluster._keep_tracebacks_of_grpc()
    for text in ("Cannot monitor channel state: Channel closed!", "of our own"):
        thread = threading.Thread(target=fail, args=(text,))
        thread.start()
        thread.join()
    assert printed == ["of our own"]
