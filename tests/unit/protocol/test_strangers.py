"""Strangers at a port are limited in number and time, and a shortage ends nothing."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.strangers import (
    ConnectionLimit,
    listen,
    max_strangers,
    raise_descriptor_limit,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Door:
    """A limit with connections to look at; the other ends are `peers`."""

    def __init__(self, stack: ExitStack, most: int) -> None:
        self.clock = Clock()
        self.limit = ConnectionLimit(10.0, most, self.clock)
        self._stack = stack
        self.peers: dict[str, socket.socket] = {}
        self.ours: dict[str, socket.socket] = {}

    def enter(self, name: str, address: str) -> None:
        ours, peer = (self._stack.enter_context(end) for end in socket.socketpair())
        self.ours[name], self.peers[name] = ours, peer
        self.limit.enter(ours, address)

    def open_ones(self) -> list[str]:
        return [name for name, peer in self.peers.items() if not _ended(peer)]


def _ended(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_new_connection_ends_the_oldest_of_the_address_with_the_most(stack: ExitStack) -> None:
    door = Door(stack, most=3)
    door.enter("peer", "10.0.0.1")
    for number in range(5):
        door.enter(f"stranger {number}", "10.0.0.9")
    assert door.open_ones() == ["peer", "stranger 3", "stranger 4"]
    assert len(door.limit) == 3


def test_a_full_port_waits_until_its_next_stranger_had_time_to_greet(stack: ExitStack) -> None:
    door = Door(stack, most=2)
    waits = []
    for second in (0.0, 0.1, 0.4, 0.6):
        door.clock.now = second
        waits.append(door.limit.must_wait())
        if not waits[-1]:
            door.enter(f"at {second}", "10.0.0.9")
    assert waits == [False, False, True, False]
    assert door.open_ones() == ["at 0.1", "at 0.6"]
    assert door.limit.leave(door.ours["at 0.1"]) and not door.limit.must_wait()


def test_a_peer_that_has_authenticated_is_not_ended(stack: ExitStack) -> None:
    door = Door(stack, most=1)
    door.enter("peer", "10.0.0.1")
    assert door.limit.leave(door.ours["peer"])
    door.enter("first", "10.0.0.1")
    door.enter("second", "10.0.0.1")
    door.clock.now = 1e6
    door.limit.end_overdue()
    assert door.open_ones() == ["peer"]
    assert not door.limit.leave(door.ours["second"]), "its time was up"
    assert len(door.limit) == 0


def test_the_time_of_a_greeting_ends_however_slowly_it_comes(stack: ExitStack) -> None:
    door = Door(stack, most=5)
    door.enter("slow", "10.0.0.1")
    door.clock.now = 6.0
    door.enter("later", "10.0.0.1")
    door.peers["slow"].send(b"x")
    door.clock.now = 10.0
    door.limit.end_overdue()
    door.ours["slow"].recv(1)
    assert door.open_ones() == ["later"]


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        free = probe.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.timeout(60)
async def test_a_port_goes_on_after_it_had_no_descriptor(stack: ExitStack) -> None:
    """The port ends its oldest stranger to make room."""
    loop = asyncio.get_running_loop()
    greeted: asyncio.Queue[bytes] = asyncio.Queue()

    async def begin(sock: socket.socket) -> None:
        stack.enter_context(sock)
        await greeted.put(await loop.sock_recv(sock, 10))

    listener = listen("127.0.0.1")
    limit = ConnectionLimit()
    serving = loop.create_task(limit.serve(listener, begin))
    stranger, peer = (stack.enter_context(socket.socket()) for _ in range(2))
    for client in (stranger, peer):
        client.setblocking(False)
    await loop.sock_connect(stranger, listener.getsockname())
    while not len(limit):
        await asyncio.sleep(0)
    with no_descriptor_left():
        await loop.sock_connect(peer, listener.getsockname())
        assert await loop.sock_recv(stranger, 10) == b""
    peer.send(b"hello")
    assert [await greeted.get() for _ in range(2)] == [b"", b"hello"]
    serving.cancel()


@pytest.mark.timeout(60)
async def test_a_crowd_is_accepted_in_fewer_turns_than_it_has_connections(stack: ExitStack) -> None:
    listener, begun = listen("127.0.0.1"), list[socket.socket]()
    for _ in range(64):
        stack.enter_context(socket.create_connection(listener.getsockname()))

    async def begin(sock: socket.socket) -> None:
        begun.append(stack.enter_context(sock))

    serving = asyncio.create_task(ConnectionLimit(10.0, 128).serve(listener, begin))
    turns = 0
    while len(begun) < 64:
        await asyncio.sleep(0)
        turns += 1
    serving.cancel()
    await asyncio.wait([serving])
    assert turns < 32


def test_a_process_gets_the_descriptors_that_the_system_allows() -> None:
    """The limits end with the child that has them."""
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 3000))
        few = max_strangers()
        raise_descriptor_limit()
        ok = (few, max_strangers(), resource.getrlimit(resource.RLIMIT_NOFILE)) == (
            25,
            750,
            (3000, 3000),
        )
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert max_strangers() <= limits.MAX_STRANGERS
