"""Transfers of shards between two agents, in clear on loopback and through TLS."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.workers.agent.storage import peer_transfer
from tests.unit.runtime.certificates import make

BOUND_S = 30.0
NAME = "job.jobs.holdfast.dev"
DATA = os.urandom(3 * 2**20 + 17)
SHARD = StagedShard(step=4, generation=2, shard=1, num_shards=2, num_bytes=len(DATA))


def memory_of(data: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd


class Agent:
    """The serving side: it has one shard and accepts any."""

    def __init__(self, credentials: peer_transfer.PeerCredentials) -> None:
        self.received = b""
        self.ended: list[bool] = []
        self.port = peer_transfer.DataPort(credentials, self._get, self._put)

    def _get(self, get: peer_transfer.Get) -> peer_transfer.Answer:
        if get.shard != SHARD.shard:
            return f"shard {get.shard} is not here"
        return peer_transfer.TransferBuffer(
            memory_of(DATA), len(DATA), SHARD.num_shards, self.ended.append
        )

    def _put(self, put: peer_transfer.Put) -> peer_transfer.Answer:
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(fd, put.staged.num_bytes)
        keep = os.dup(fd)

        def done(ok: bool) -> None:
            self.received = os.pread(keep, put.staged.num_bytes, 0)
            os.close(keep)
            self.ended.append(ok)

        return peer_transfer.TransferBuffer(fd, put.staged.num_bytes, put.staged.num_shards, done)


def with_agent(
    agent_credentials: peer_transfer.PeerCredentials,
    scene: Callable[[Agent], Awaitable[Any]],
    address: str = "127.0.0.1",
) -> Any:
    async def run() -> Any:
        agent = Agent(agent_credentials)
        agent.port.open(address)
        try:
            return await asyncio.wait_for(scene(agent), BOUND_S)
        finally:
            agent.port.close()

    return asyncio.run(run())


@pytest.fixture(params=["clear", "tls"])
def credentials(request: pytest.FixtureRequest, tmp_path: Path) -> peer_transfer.PeerCredentials:
    if request.param == "clear":
        return peer_transfer.credentials("secret", None, "")
    make(tmp_path, NAME)
    return peer_transfer.credentials("secret", tmp_path, NAME)


def test_a_shard_is_fetched_byte_for_byte(credentials: peer_transfer.PeerCredentials) -> None:
    async def scene(agent: Agent) -> bytes:
        where = ("127.0.0.1", agent.port.port)
        fd, num_bytes = await asyncio.to_thread(peer_transfer.fetch, *where, credentials, SHARD)
        data = os.pread(fd, num_bytes, 0)
        os.close(fd)
        return data

    assert with_agent(credentials, scene) == DATA


def test_a_shard_is_pushed_byte_for_byte(credentials: peer_transfer.PeerCredentials) -> None:
    async def scene(agent: Agent) -> Agent:
        where = ("127.0.0.1", agent.port.port)
        await asyncio.to_thread(peer_transfer.push, *where, credentials, SHARD, memory_of(DATA))
        return agent

    agent = with_agent(credentials, scene)
    assert agent.received == DATA and agent.ended == [True]


def test_a_refusal_has_a_reason(credentials: peer_transfer.PeerCredentials) -> None:
    wanted = StagedShard(step=4, generation=2, shard=0, num_shards=2, num_bytes=0)

    async def scene(agent: Agent) -> None:
        with pytest.raises(peer_transfer.PeerError, match="shard 0 is not here"):
            where = ("127.0.0.1", agent.port.port)
            await asyncio.to_thread(peer_transfer.fetch, *where, credentials, wanted)

    with_agent(credentials, scene)


def test_the_key_alone_is_not_enough(credentials: peer_transfer.PeerCredentials) -> None:
    guess = peer_transfer.PeerCredentials(
        "guess", credentials.name, credentials.client, credentials.server
    )

    async def scene(agent: Agent) -> None:
        with pytest.raises(peer_transfer.PeerError, match="wrong token"):
            where = ("127.0.0.1", agent.port.port)
            await asyncio.to_thread(peer_transfer.fetch, *where, guess, SHARD)

    with_agent(credentials, scene)


def test_the_token_alone_is_not_enough(tmp_path: Path) -> None:
    make(tmp_path / "ours", NAME)
    make(tmp_path / "other", NAME)
    ours = peer_transfer.credentials("secret", tmp_path / "ours", NAME)
    other = peer_transfer.credentials("secret", tmp_path / "other", NAME)

    async def scene(agent: Agent) -> None:
        where = ("127.0.0.1", agent.port.port)
        with pytest.raises(peer_transfer.PeerError, match="certificate"):
            await asyncio.to_thread(peer_transfer.fetch, *where, other, SHARD)
        # A client that trusts any server still has to present the job's key.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        careless = peer_transfer.PeerCredentials("secret", NAME, context, None)
        with pytest.raises(peer_transfer.PeerError):
            await asyncio.to_thread(peer_transfer.fetch, *where, careless, SHARD)
        assert agent.ended == []

    with_agent(ours, scene)


def test_without_tls_the_data_port_uses_loopback_only() -> None:
    plain = peer_transfer.credentials("secret", None, "")

    async def scene(agent: Agent) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", agent.port.port))

    for address in ("127.0.0.1", "192.0.2.1", ""):
        with_agent(plain, scene, address)
    with pytest.raises(peer_transfer.PeerError, match="no connection without TLS"):
        peer_transfer.fetch("192.0.2.1", 1, plain, SHARD)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
def test_an_address_of_another_machine_means_all_interfaces(tmp_path: Path) -> None:
    make(tmp_path, NAME)
    ours = peer_transfer.credentials("secret", tmp_path, NAME)

    async def scene(agent: Agent) -> None:
        for address in ("127.0.0.1", "::1"):
            fd, _ = await asyncio.to_thread(
                peer_transfer.fetch, address, agent.port.port, ours, SHARD
            )
            os.close(fd)

    with_agent(ours, scene, "192.0.2.1")


def test_the_port_listens_where_peers_reach_it_and_follows_a_new_address(tmp_path: Path) -> None:
    make(tmp_path, NAME)
    ours = peer_transfer.credentials("secret", tmp_path, NAME)

    async def scene(agent: Agent) -> None:
        for address, other in (("127.0.0.2", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")):
            port = agent.port.open(address)
            assert agent.port.open(address) == port
            fetched = await asyncio.to_thread(peer_transfer.fetch, address, port, ours, SHARD)
            os.close(fetched[0])
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port))

    with_agent(ours, scene, "127.0.0.2")
