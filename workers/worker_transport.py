"""Sends and receives worker_protocol messages with file descriptors over a Unix socket.

The socket is SOCK_SEQPACKET and the worker inherits it; one packet is one msgpack message, of any
size. Memory travels as a file descriptor (memfd) beside a message. Nothing here imports torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping, job_to_mapping
from holdfast.orchestrator.errors import HoldfastError

from . import packets
from .worker_protocol import Assign, FromWorker, ToWorker

AGENT_FD = "HOLDFAST_AGENT_FD"
"""Environment variable with the number of the worker's descriptor, so that it survives an exec."""

INHERITED = "HOLDFAST_INHERITED"
"""Environment variable with the descriptors of a worker whose place another program took."""


@dataclass(frozen=True)
class Attached:
    """This process as a worker: Assign has come and the environment is set. The socket belongs to
    the session from here on; a script without a session never reads it."""

    link: socket.socket
    assign: Assign
    job: TrainingJob
    inspection: socket.socket | None = None
    """A byte asks for StackReport and CollectivesReport, or halts the worker; the pulse thread
    reads it."""
    take_seat: Callable[[Assign, int | None], None] | None = None
    """Gives a kept process the environment and the output of its seat in another generation; None:
    this process cannot be kept."""


attached: Attached | None
"""Set by agent/pool/worker_main.py before the entrypoint runs, or inherited by a program that took
the place of a worker, see hand_over. None outside Holdfast, where a session works without an
agent."""


class _Inherited(msgspec.Struct):
    """State with which a program in the place of a worker is attached."""

    assign: Assign
    job: dict[str, Any]


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


def hand_over(inspection_fd: int) -> None:
    """Hand the worker to a program that is executed in this process: its first process that uses
    the session attaches itself."""
    assert attached is not None
    state = os.memfd_create("holdfast-worker", 0)  # inherited
    os.write(
        state, msgspec.msgpack.encode(_Inherited(attached.assign, job_to_mapping(attached.job)))
    )
    link_fd = attached.link.fileno()
    for fd in (link_fd, inspection_fd):
        os.set_inheritable(fd, True)
    os.environ[INHERITED] = f"{link_fd} {inspection_fd} {state}"


def __getattr__(name: str) -> Any:
    """`attached` at its first use where worker_main has not set it: lazily, as the environment is
    that of a worker's child only then. Raises HoldfastError when a program between the worker and
    this process has closed the descriptors."""
    if name != "attached":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    global attached
    attached = None
    # Once: child processes of this one, such as data loaders, are not the worker.
    if inherited := os.environ.pop(INHERITED, ""):
        attached = _attach(*map(int, inherited.split()))
    return attached


def _attach(link_fd: int, inspection_fd: int, state_fd: int) -> Attached:
    try:
        data = os.pread(state_fd, os.fstat(state_fd).st_size, 0)
        os.close(state_fd)
        inherited = msgspec.msgpack.decode(data, type=_Inherited)
        link, inspection = socket.socket(fileno=link_fd), socket.socket(fileno=inspection_fd)
    except (OSError, msgspec.MsgspecError) as error:
        raise HoldfastError(
            f"holdfast.session: the connection to the agent was not inherited ({error}); the "
            f"program that entrypoint.command names has closed it, or another version of Holdfast "
            f"is installed in this Python"
        ) from None
    for fd in (link_fd, inspection_fd):
        os.set_inheritable(fd, False)
    return Attached(link, inherited.assign, job_from_mapping(inherited.job), inspection)
