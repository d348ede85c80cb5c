"""Messages between agent and forkserver: msgpack packets with file descriptors on a SOCK_SEQPACKET
socket pair."""

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
    """That a standby will probably get; -1: unknown."""


class SignalWorker(ForkMessage, frozen=True, kw_only=True, tag="signal"):
    """Signal a worker's process group."""

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


ToForkserver = ConfigureForkserver | ForkWorker | SignalWorker
FromForkserver = Forked | NotForked | ProcessEnded

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ToForkserver | FromForkserver)


def send(link: socket.socket, message: ForkMessage, fds: tuple[int, ...] = ()) -> None:
    """Raises OSError when the peer has ended."""
    packets.send(link, _ENCODER.encode(message), fds)


def encode(message: ConfigureForkserver) -> bytes:
    return _ENCODER.encode(message)


def decode_configure(data: bytes) -> ConfigureForkserver:
    """Reads the result of `encode`."""
    return msgspec.msgpack.decode(data, type=ConfigureForkserver)


def receive(link: socket.socket) -> tuple[ToForkserver | FromForkserver | None, list[int]]:
    """The next message and its descriptors; (None, []) when the peer has closed."""
    data, fds = packets.receive(link, _MAX_FDS)
    return (_DECODER.decode(data) if data else None), fds
