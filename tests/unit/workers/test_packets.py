"""Messages of any size pass between agent, forkserver and workers, with their descriptors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from socket import socket

import pytest

from holdfast.workers import packets, worker_transport
from holdfast.workers.agent.pool import fork_protocol
from tests.unit.workers.members import assigned

SIZES = [1, packets.MAX_PACKET_BYTES, packets.MAX_PACKET_BYTES + 1, 3 * 2**20]


@pytest.fixture
def ends() -> Iterator[tuple[socket, socket]]:
    ours, theirs = worker_transport.pair()
    with ours, theirs:
        yield ours, theirs


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def file_with(data: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.pwrite(fd, data, 0)
    return fd


@pytest.mark.parametrize("size", SIZES)
def test_a_packet_of_any_size_arrives_with_its_descriptors(
    ends: tuple[socket, socket], size: int
) -> None:
    data = b"\x80" + os.urandom(size - 1)  # no message begins with IN_FILE
    fd, before = file_with(b"beside"), open_files()
    packets.send(ends[0], data, (fd,))
    got, fds = packets.receive(ends[1], 1)
    assert got == data
    assert [os.pread(one, 10, 0) for one in fds] == [b"beside"]
    for one in fds:
        os.close(one)
    assert open_files() == before, "the file of a large message is closed on both sides"
    os.close(fd)


def test_small_and_large_packets_keep_their_order(ends: tuple[socket, socket]) -> None:
    sent = [bytes([number]) * size for number, size in enumerate([5, 200_000, 7, 300_000])]
    for data in sent:
        packets.send(ends[0], data)
    assert [packets.receive(ends[1], 1)[0] for _ in sent] == sent
    ends[0].close()
    assert packets.receive(ends[1], 1) == (b"", [])


def test_an_assignment_and_a_spec_with_200_kib_of_variables_arrive(
    ends: tuple[socket, socket],
) -> None:
    env = {f"TEXT_{number}": "x" * 100_000 for number in range(2)}
    assign = assigned(environment=env)
    output = file_with(b"log")
    worker_transport.send(ends[0], assign, output)
    got, fd = worker_transport.receive(ends[1])
    assert got == assign and fd is not None and os.pread(fd, 3, 0) == b"log"
    configure = fork_protocol.ConfigureForkserver(spec={"env": env}, directory=".")
    fork_protocol.send(ends[0], configure)
    assert fork_protocol.receive(ends[1]) == (configure, [])
    os.close(fd)
    os.close(output)
