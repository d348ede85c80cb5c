"""Agent <-> worker messages on one node, over a SOCK_SEQPACKET Unix socket that a worker inherits.

Owns: the messages, and sending and receiving them with file descriptors. Must not: import torch.
One packet is one msgpack message; memory travels as a file descriptor (memfd) beside it. The
descriptor's number is in the environment variable AGENT_FD, so it survives an exec.

Order of a worker's life: the agent sends Assign (at fork, or later to a standby). The worker sends
Phase and Progress as it goes and Pulse from a thread of its own. To stage, it asks for buffers
(BufferRequest -> Buffer + fd, as often as it wants buffers), writes one, says Staged, and may write
a buffer again once the agent has said BufferFree for it. While an upload or a push keeps all of
them, one more Buffer comes unasked. The spec says which steps are staged, StageAt asks for others.
To restore, it asks FetchShard -> Shard + fd (read-only use) or NoShard. It ends with Failed or
Finished, then exits.
"""

from __future__ import annotations

import array
import socket
from dataclasses import dataclass

import msgspec

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.protocol.facts import Membership, StepReport, WorkerPhase, WorkerSeat

AGENT_FD = "HOLDFAST_AGENT_FD"
MAX_PACKET_BYTES = 128 * 1024


class WorkerMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True
):
    """Base of all messages."""


# -- worker -> agent --------------------------------------------------------------------------
class PhaseChanged(WorkerMessage, frozen=True, kw_only=True, tag="phase"):
    """The worker entered a phase; also a sign of progress."""

    phase: WorkerPhase


class Tick(WorkerMessage, frozen=True, kw_only=True, tag="tick"):
    """Progress within a step or phase, such as a micro-batch."""


class Progress(
    StepReport, frozen=True, kw_only=True, tag_field="type", tag="progress", omit_defaults=True
):
    """A step is finished on this rank."""

    step: int


class Pulse(WorkerMessage, frozen=True, kw_only=True, tag="pulse"):
    """The interpreter runs."""


class BufferRequest(WorkerMessage, frozen=True, kw_only=True, tag="buffer-request"):
    num_bytes: int


class Staged(WorkerMessage, frozen=True, kw_only=True, tag="staged"):
    """Buffer `buffer` now holds the complete state of `step`: a whole safetensors file of
    `num_bytes` (the memfd may be longer)."""

    buffer: int
    step: int
    num_bytes: int


class FetchShard(WorkerMessage, frozen=True, kw_only=True, tag="fetch-shard"):
    """Ask for a shard of the membership's Restore."""

    shard: int


class Failed(WorkerMessage, frozen=True, kw_only=True, tag="failed"):
    error_type: str
    message: str
    traceback: str
    secondary: bool = False


class Finished(WorkerMessage, frozen=True, kw_only=True, tag="finished"):
    """The loop is through; the agent persists the last staged step."""

    step: int


# -- agent -> worker --------------------------------------------------------------------------
class Assign(WorkerMessage, frozen=True, kw_only=True, tag="assign"):
    """Who this worker is. `environment` is complete: the torchrun contract and the fabric's."""

    membership: Membership
    seat: WorkerSeat
    node_rank: int
    environment: dict[str, str]
    checkpoint_path: str = ""
    node: str = ""
    spec_directory: str = ""
    log_file: str = ""
    """Where stdout and stderr go; the bootstrap opens it before the entrypoint runs. Empty: to the
    file descriptor that comes with this message."""


class StageAt(WorkerMessage, frozen=True, kw_only=True, tag="stage-at"):
    """Stage this very step, whatever the cadence. A worker that is past it goes on."""

    step: int
    hold: bool = False
    """Then wait up to limits.HOLD_S: an end follows."""


class Buffer(WorkerMessage, frozen=True, kw_only=True, tag="buffer"):
    """Comes with one file descriptor."""

    buffer: int
    num_bytes: int


class BufferFree(WorkerMessage, frozen=True, kw_only=True, tag="buffer-free"):
    """This buffer may be written (again)."""

    buffer: int


class Shard(WorkerMessage, frozen=True, kw_only=True, tag="shard"):
    """Comes with one file descriptor."""

    shard: int
    num_bytes: int


class NoShard(WorkerMessage, frozen=True, kw_only=True, tag="no-shard"):
    shard: int
    detail: str


FromWorker = (
    PhaseChanged | Tick | Progress | Pulse | BufferRequest | Staged | FetchShard | Failed | Finished
)
ToWorker = Assign | StageAt | Buffer | BufferFree | Shard | NoShard


@dataclass(frozen=True)
class Attached:
    """This process as a worker. The bootstrap has received Assign and set the environment; from
    here on the link belongs to the session alone. A script that uses no session never reads it."""

    link: socket.socket
    assign: Assign
    job: TrainingJob


attached: Attached | None = None
"""Set by agent/pool/worker_main.py before the entrypoint runs; None outside Holdfast (and there a
session works without an agent)."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(FromWorker | ToWorker)


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair: the agent's end and the worker's end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, message: FromWorker | ToWorker, fd: int | None = None) -> None:
    """Send one message, with at most one file descriptor. Raises OSError when the peer is gone."""
    data = _ENCODER.encode(message)
    assert len(data) <= MAX_PACKET_BYTES, f"{type(message).__name__}: {len(data)} bytes"
    if fd is None:
        link.sendall(data)
    else:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        link.sendmsg([data], [rights])


def receive(link: socket.socket) -> tuple[FromWorker | ToWorker | None, int | None]:
    """The next message and its file descriptor, (None, None) when the peer has closed."""
    data, rights, _flags, _address = link.recvmsg(MAX_PACKET_BYTES, socket.CMSG_SPACE(4))
    if not data:
        return None, None
    fds = array.array("i")
    for level, kind, payload in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return _DECODER.decode(data), fds[0] if fds else None
