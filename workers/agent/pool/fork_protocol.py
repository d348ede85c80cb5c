"""Messages between agent and forkserver, and between forkserver and import template: msgpack
packets with file descriptors on a SOCK_SEQPACKET socket pair."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from holdfast.workers import packets

_MAX_FDS = 4


class ForkMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages."""


class ConfigureForkserver(ForkMessage, frozen=True, kw_only=True, tag="configure"):
    """The job. The forkserver parses it once, and every worker inherits it."""

    spec: dict[str, Any]
    directory: str
    """Base of the relative paths in the spec."""


class ForkWorker(ForkMessage, frozen=True, kw_only=True, tag="fork"):
    """Fork a worker that waits for Assign. Descriptors: the worker's socket, its stack file and its
    inspection socket."""

    worker: int
    local_rank: int = -1
    """Local rank that the standby is expected to take; -1 for a running worker."""
    modules: tuple[str, ...] = ()
    """Modules of spec.preload, and those that workers of this script imported: the template has
    them, or a standby imports them while it waits."""
    left_out: tuple[str, ...] = ()
    """Modules after whose import a template must not fork, as far as is known."""


class SignalWorker(ForkMessage, frozen=True, kw_only=True, tag="signal"):
    """Signal a worker; with SIGTERM its process group."""

    worker: int
    signal: int


class Forked(ForkMessage, frozen=True, kw_only=True, tag="forked"):
    worker: int
    pid: int


class NotForked(ForkMessage, frozen=True, kw_only=True, tag="not-forked"):
    worker: int
    detail: str


class ProcessEnded(ForkMessage, frozen=True, kw_only=True, tag="ended"):
    worker: int
    code: int | None
    signal: int | None
    killed: tuple[str, ...] = ()
    """Command lines of programs that it had left running."""


class ImportsReady(ForkMessage, frozen=True, kw_only=True, tag="ready"):
    """An import template has imported its modules, and forks from now on."""


class ImportLeftOut(ForkMessage, frozen=True, kw_only=True, tag="left-out"):
    """An import template must not fork any more, and ends. The agent remembers the modules."""

    modules: tuple[str, ...]
    """Modules that the next template does not import. The first one is what was imported, the
    others are what it imported."""
    problem: str


ToForkserver = ConfigureForkserver | ForkWorker | SignalWorker
FromForkserver = Forked | NotForked | ProcessEnded | ImportLeftOut
FromTemplate = ImportsReady | ImportLeftOut | Forked | NotForked

Packet = ToForkserver | FromForkserver | FromTemplate

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Packet)


def send(link: socket.socket, message: ForkMessage, fds: tuple[int, ...] = ()) -> None:
    """Raises OSError when the peer has ended."""
    packets.send(link, _ENCODER.encode(message), fds)


def receive(link: socket.socket) -> tuple[Packet | None, list[int]]:
    """The next message and its descriptors; (None, []) when the peer has closed."""
    data, fds = packets.receive(link, _MAX_FDS)
    return (_DECODER.decode(data) if data else None), fds
