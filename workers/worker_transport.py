"""Sends and receives worker_protocol messages with file descriptors over a Unix socket.

The socket is SOCK_SEQPACKET and the worker inherits it; one packet is one msgpack message, of any
size. Memory travels as a file descriptor (memfd) beside a message. Nothing here imports torch.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import msgspec

from holdfast.orchestrator.api.v1alpha1 import TrainingJob

from . import packets
from .worker_protocol import Assign, FromWorker, ToWorker

AGENT_FD = "HOLDFAST_AGENT_FD"
"""Environment variable with the number of the worker's descriptor, so that it survives an exec."""


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
    packets.send(link, _ENCODER.encode(message), () if fd is None else (fd,))


def receive(link: socket.socket) -> tuple[FromWorker | ToWorker | None, int | None]:
    """The next message and its file descriptor; (None, None) when the peer has closed."""
    data, fds = packets.receive(link, 1)
    if not data:
        return None, None
    return _DECODER.decode(data), fds[0] if fds else None
