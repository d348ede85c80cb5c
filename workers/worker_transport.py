"""Sends and receives worker_protocol messages with file descriptors over a Unix socket.

The socket is SOCK_SEQPACKET and the worker inherits it; one packet is one msgpack message. Memory
travels as a file descriptor (memfd) beside a message. Nothing here imports torch.
"""

from __future__ import annotations

import array
import socket
from dataclasses import dataclass

import msgspec

from holdfast.orchestrator.api.v1alpha1 import TrainingJob

from .worker_protocol import Assign, FromWorker, ToWorker

AGENT_FD = "HOLDFAST_AGENT_FD"
"""Environment variable with the number of the worker's descriptor, so that it survives an exec."""
MAX_PACKET_BYTES = 128 * 1024


@dataclass(frozen=True)
class Attached:
    """This process as a worker: Assign has come and the environment is set. The socket belongs to
    the session from here on; a script without a session never reads it."""

    link: socket.socket
    assign: Assign
    job: TrainingJob
    inspection: socket.socket | None = None
    """A byte asks for StackReport and CollectivesReport; the pulse thread reads it."""


attached: Attached | None = None
"""Set by agent/pool/worker_main.py before the entrypoint runs. None outside Holdfast, where a
session works without an agent."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(FromWorker | ToWorker)


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair: the agent's end and the worker's end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, message: FromWorker | ToWorker, fd: int | None = None) -> None:
    """Send one message and at most one file descriptor. Raises OSError when the peer has ended."""
    data = _ENCODER.encode(message)
    assert len(data) <= MAX_PACKET_BYTES, f"{type(message).__name__}: {len(data)} bytes"
    if fd is None:
        link.sendall(data)
    else:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        link.sendmsg([data], [rights])


def receive(link: socket.socket) -> tuple[FromWorker | ToWorker | None, int | None]:
    """The next message and its file descriptor; (None, None) when the peer has closed."""
    data, rights, _flags, _address = link.recvmsg(MAX_PACKET_BYTES, socket.CMSG_SPACE(4))
    if not data:
        return None, None
    fds = array.array("i")
    for level, kind, payload in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return _DECODER.decode(data), fds[0] if fds else None
