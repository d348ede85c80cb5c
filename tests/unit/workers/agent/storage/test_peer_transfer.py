"""Transfers of shards between two agents, in clear on loopback and through TLS."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.workers.agent.storage import peer_transfer
from holdfast.workers.agent.storage.memfd import Memfd
from tests.unit.runtime.certificates import make

NAME = "job.jobs.holdfast.dev"
DATA = os.urandom(3 * 2**20 + 17)
SHARD = StagedShard(step=4, generation=2, shard=1, num_shards=2, num_bytes=len(DATA))
pytestmark = pytest.mark.timeout(30)


def memory_of(data: bytes) -> Memfd:
    memory = Memfd("test", len(data))
    os.write(memory.fd, data)
    return memory


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
        memory, size = Memfd("test", put.staged.num_bytes), put.staged.num_bytes

        def done(ok: bool) -> None:
            self.received = os.pread(memory.fd, size, 0)
            self.ended.append(ok)

        return peer_transfer.TransferBuffer(memory, size, put.staged.num_shards, done)


@asynccontextmanager
async def serving(
    credentials: peer_transfer.PeerCredentials, address: str = "127.0.0.1"
) -> AsyncIterator[Agent]:
    agent = Agent(credentials)
    agent.port.open(address)
    try:
        yield agent
    finally:
        agent.port.close()


async def fetch(
    agent: Agent,
    credentials: peer_transfer.PeerCredentials,
    wanted: StagedShard = SHARD,
    address: str = "127.0.0.1",
) -> bytes:
    port = agent.port.port
    fetched = await asyncio.to_thread(peer_transfer.fetch, address, port, credentials, wanted)
    return os.pread(fetched.fd, fetched.num_bytes, 0)


@pytest.fixture(params=["clear", "tls"])
def credentials(request: pytest.FixtureRequest, tmp_path: Path) -> peer_transfer.PeerCredentials:
    if request.param == "clear":
        return peer_transfer.credentials("secret", None, "")
    make(tmp_path, NAME)
    return peer_transfer.credentials("secret", tmp_path, NAME)


async def test_a_shard_is_fetched_byte_for_byte(credentials: peer_transfer.PeerCredentials) -> None:
    async with serving(credentials) as agent:
        assert await fetch(agent, credentials) == DATA


async def test_a_shard_is_pushed_byte_for_byte(credentials: peer_transfer.PeerCredentials) -> None:
    async with serving(credentials) as agent:
        where = ("127.0.0.1", agent.port.port)
        await asyncio.to_thread(peer_transfer.push, *where, credentials, SHARD, memory_of(DATA))
    assert agent.received == DATA and agent.ended == [True]


async def test_a_refusal_has_a_reason(credentials: peer_transfer.PeerCredentials) -> None:
    wanted = StagedShard(step=4, generation=2, shard=0, num_shards=2, num_bytes=0)
    async with serving(credentials) as agent:
        with pytest.raises(peer_transfer.PeerError, match="shard 0 is not here"):
            await fetch(agent, credentials, wanted)


async def test_the_key_alone_is_not_enough(credentials: peer_transfer.PeerCredentials) -> None:
    guess = peer_transfer.PeerCredentials(
        "guess", credentials.name, credentials.client, credentials.server
    )
    async with serving(credentials) as agent:
        with pytest.raises(peer_transfer.PeerError, match="wrong token"):
            await fetch(agent, guess)


async def test_the_token_alone_is_not_enough(tmp_path: Path) -> None:
    make(tmp_path / "ours", NAME)
    make(tmp_path / "other", NAME)
    ours = peer_transfer.credentials("secret", tmp_path / "ours", NAME)
    other = peer_transfer.credentials("secret", tmp_path / "other", NAME)
    async with serving(ours) as agent:
        with pytest.raises(peer_transfer.PeerError, match="certificate"):
            await fetch(agent, other)
        # A client that trusts any server still has to present the job's key.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        careless = peer_transfer.PeerCredentials("secret", NAME, context, None)
        with pytest.raises(peer_transfer.PeerError):
            await fetch(agent, careless)
        assert agent.ended == []


async def test_without_tls_the_data_port_uses_loopback_only() -> None:
    plain = peer_transfer.credentials("secret", None, "")
    for address in ("127.0.0.1", "192.0.2.1", ""):
        async with serving(plain, address) as agent:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", agent.port.port))
    with pytest.raises(peer_transfer.PeerError, match="no connection without TLS"):
        peer_transfer.fetch("192.0.2.1", 1, plain, SHARD)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
async def test_an_address_of_another_machine_means_all_interfaces(tmp_path: Path) -> None:
    make(tmp_path, NAME)
    ours = peer_transfer.credentials("secret", tmp_path, NAME)
    async with serving(ours, "192.0.2.1") as agent:
        for address in ("127.0.0.1", "::1"):
            await fetch(agent, ours, address=address)


async def test_the_port_listens_where_peers_reach_it_and_follows_a_new_address(
    tmp_path: Path,
) -> None:
    make(tmp_path, NAME)
    ours = peer_transfer.credentials("secret", tmp_path, NAME)
    async with serving(ours, "127.0.0.2") as agent:
        for address, other in (("127.0.0.2", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")):
            port = agent.port.open(address)
            assert agent.port.open(address) == port
            await fetch(agent, ours, address=address)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port))
