"""Uploads to a store that does not answer delay no buddy copy, no restore and no staging."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import ShardLocation, StagedShard
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.pool import fork_protocol
from holdfast.workers.agent.process.node import MIN_THREADS, AgentProcess, NodeOptions, ThreadPools
from holdfast.workers.agent.storage.memfd import Memfd
from tests.unit.workers.agent.machine.harness import FACTS
from tests.unit.workers.agent.pool.test_worker_pool import ASSIGN
from tests.unit.workers.agent.storage.test_peer_transfer import DATA, SHARD, Agent

SLOTS = 8
BOUND_S = 30.0


class StuckStore(MemoryFileSystem):
    """Uploads block in it until `may_go_on` is set."""

    protocol = "stuck"
    may_go_on = threading.Event()
    waiting = threading.Semaphore(0)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.waiting.release()
        assert self.may_go_on.wait(BOUND_S)
        return super().open(path, mode, **options)


@pytest.fixture(autouse=True)
def store() -> Iterator[None]:
    fsspec.register_implementation("stuck", StuckStore, clobber=True)
    yield
    StuckStore.may_go_on.set()


class ReceivedInputs:
    """The inputs of a node's machine."""

    def __init__(self, node: AgentProcess) -> None:
        self._queue: asyncio.Queue[inputs.Input] = asyncio.Queue()
        node._give = self._queue.put_nowait  # type: ignore[method-assign]

    async def wait(self) -> inputs.Input:
        return await asyncio.wait_for(self._queue.get(), BOUND_S)


def make_node(directory: Path, server: socket.socket) -> AgentProcess:
    (directory / "token").write_text("secret")
    options = NodeOptions(
        job="j", node="node-0", slots=SLOTS, token_file=directory / "token",
        bind_address="127.0.0.1",
    )  # fmt: skip
    node = AgentProcess(options, server)
    welcome = m.Welcome(
        spec={}, spec_directory="", checkpoint_path="stuck://place", log_directory="",
        heartbeat_interval_s=0.5,
    )  # fmt: skip
    node._machine.step(0, inputs.LinkUp(FACTS, 1))
    node._machine.step(0, inputs.Received(welcome))
    return node


async def test_uploads_that_wait_for_storage_delay_no_push_and_no_fetch(tmp_path: Path) -> None:
    ours, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node = make_node(tmp_path, ours)
    received = ReceivedInputs(node)
    peer = Agent(node._credentials)
    peer.port.open("127.0.0.1")
    for number in range(SLOTS + 1):
        memory = node._memory[number] = Memfd(f"{number}", len(DATA))
        os.write(memory.fd, DATA)
    for number in range(SLOTS):
        staged = StagedShard(4, 2, number, SLOTS, len(DATA))
        node._carry_out(commands.WriteStorage(number, staged, "step-4.gen-2", f"shard-{number}"))
    for _ in range(SLOTS):
        assert await asyncio.to_thread(StuckStore.waiting.acquire, timeout=BOUND_S)

    node._carry_out(commands.PushToBuddy(SLOTS, SHARD, "node-1", "127.0.0.1", peer.port.port))
    pushed = await received.wait()
    assert isinstance(pushed, inputs.PushDone) and pushed.seconds > 0
    assert (pushed.buffer, pushed.detail) == (SLOTS, "")
    assert peer.received == DATA

    node._workers.assign(ASSIGN, None)
    _, fds = fork_protocol.receive(server)
    source = ShardLocation(SHARD.shard, "node-1", "127.0.0.1", peer.port.port)
    node._carry_out(commands.FetchFromPeer(1, 0, SHARD, (source,)))
    with socket.socket(fileno=fds[0]) as link:
        link.settimeout(BOUND_S)
        assert isinstance(
            (await asyncio.to_thread(worker_transport.receive, link))[0], worker_protocol.Assign
        )
        message, fd = await asyncio.to_thread(worker_transport.receive, link)
    assert (
        message == worker_protocol.Shard(shard=SHARD.shard, num_bytes=len(DATA)) and fd is not None
    )
    assert os.pread(fd, len(DATA), 0) == DATA
    os.close(fd)

    StuckStore.may_go_on.set()
    for _ in range(SLOTS):
        done = await received.wait()
        assert isinstance(done, inputs.WriteDone) and done.checksum and not done.detail
    peer.port.close()
    server.close()


@pytest.mark.parametrize("stuck", ["upload", "push", "fetch", "touch"])
async def test_no_kind_of_work_waits_for_another(stuck: Any) -> None:
    pools, free = ThreadPools(asyncio.get_running_loop(), slots=1), threading.Event()
    held = [asyncio.create_task(pools.run(stuck, free.wait, BOUND_S)) for _ in range(MIN_THREADS)]
    for kind in ("upload", "push", "fetch", "touch"):
        if kind != stuck:
            assert await asyncio.wait_for(pools.run(kind, lambda: "done"), BOUND_S) == "done"
    free.set()
    assert all(await asyncio.gather(*held))


async def test_all_workers_of_a_large_node_are_served_at_once() -> None:
    pools, met = ThreadPools(asyncio.get_running_loop(), slots=16), threading.Barrier(16)
    await asyncio.gather(*(pools.run("fetch", met.wait, BOUND_S) for _ in range(16)))


async def test_the_log_of_an_agent_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, checked = tmp_path / "agent-node-0.log", asyncio.Event()
    loop = asyncio.get_running_loop()

    def rotate(path: Path) -> None:
        assert path == log
        loop.call_soon_threadsafe(checked.set)

    monkeypatch.setattr("holdfast.workers.agent.process.node.HOUSEKEEPING_INTERVAL_S", 0.0)
    monkeypatch.setattr("holdfast.workers.agent.linux.output.rotate", rotate)
    ours, _server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node = make_node(tmp_path, ours)
    node._options = dataclasses.replace(node._options, log_file=log)
    house = asyncio.create_task(node._keep_house())
    await asyncio.wait_for(checked.wait(), BOUND_S)
    house.cancel()
