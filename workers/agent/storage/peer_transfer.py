"""The data port: transfers shards between agents, from memory to memory.

A request frame carries the job's token, a frame answers, and raw bytes follow. Bytes move in
threads, so that the event loop keeps sending heartbeats.

Between machines both sides present the job's certificate over TLS; the token is the second factor
and never leaves a machine in clear. In clear, on loopback, bytes go from the page cache to the
socket (sendfile). Python's ssl cannot do that: the memory is mapped and encrypted record by record
(16 KiB) without an extra copy. That costs about twice the CPU (bench/results/data_port.md); on two
cores that both sides share, half of the throughput.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import mmap
import os
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.orchestrator.protocol import tls
from holdfast.orchestrator.protocol.fabric import is_loopback
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.orchestrator.protocol.framing import (
    HEADER_BYTES,
    UNDECODABLE,
    BadFrame,
    frame,
    frame_length,
)
from holdfast.orchestrator.protocol.strangers import ConnectionLimit, listen

from .memfd import Memfd

R = TypeVar("R")

LOOPBACK = "127.0.0.1"

TIMEOUT_S = 30.0
"""Seconds between two parts of a transfer, so that a dead peer does not hold a buffer."""

MAX_REQUEST_BYTES = 4096
SEND_BYTES = 8 * 2**20
PUSH_BYTES = 2 * 2**20
"""A push that may use a share of the network only pauses after each such part."""
TRANSFERS = 32
"""Parallel transfers; a restore after a loss of nodes fetches all shards from one node."""


class PeerMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages."""


class Get(PeerMessage, frozen=True, kw_only=True, tag="get"):
    token: str
    step: int
    generation: int
    shard: int


class Put(PeerMessage, frozen=True, kw_only=True, tag="put"):
    token: str
    staged: StagedShard
    confirmed: int = -1
    """The same as in commands.PushToBuddy."""


class Yes(PeerMessage, frozen=True, kw_only=True, tag="yes"):
    """Consent. After Get, `num_bytes` follow. After Put, a second Yes confirms the bytes sent."""

    num_bytes: int = 0
    num_shards: int = 0


class No(PeerMessage, frozen=True, kw_only=True, tag="no"):
    detail: str


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Get | Put | Yes | No] = msgspec.msgpack.Decoder(
    Get | Put | Yes | No
)


class PeerError(Exception):
    """The transfer failed; the message is the reason."""


@dataclass(frozen=True)
class PeerCredentials:
    """Credentials with which agents of one job authenticate each other."""

    token: str
    name: str = ""
    """The name in the job's certificate."""
    client: ssl.SSLContext | None = None
    server: ssl.SSLContext | None = None
    """Both None: in clear, on loopback only."""


def credentials(token: str, directory: Path | None, name: str) -> PeerCredentials:
    """Read them from the directory with the job's tls.crt and tls.key. Raises TlsUnusable."""
    if directory is None:
        return PeerCredentials(token)
    files = tls.files(directory)
    return PeerCredentials(token, name, tls.client_context(*files), tls.server_context(*files))


@dataclass(frozen=True)
class TransferBuffer:
    """A buffer for a transfer, and its callback."""

    memory: Memfd
    num_bytes: int
    num_shards: int
    done: Callable[[bool], None]


Answer = TransferBuffer | str
"""The buffer for a request, or the reason of a refusal."""


class DataPort:
    """The listener. `on_get` and `on_put` decide about requests.

    Handshake and request are awaited in the event loop, so that strangers hold no thread.
    """

    def __init__(
        self,
        credentials: PeerCredentials,
        on_get: Callable[[Get], Answer],
        on_put: Callable[[Put], Answer],
    ) -> None:
        self._credentials = credentials
        self._on_get, self._on_put = on_get, on_put
        self._strangers = ConnectionLimit()
        # Separate threads: slow uploads and name lookups must not delay the serving of memory.
        self._threads = ThreadPoolExecutor(TRANSFERS, thread_name_prefix="holdfast-port")
        self._serving: asyncio.Task[None] | None = None
        self._address, self.port = "", 0

    def open(self, address: str) -> int:
        """Listen at an address of this node, at all if it is none; returns the port. Listening at
        another address before ends; transfers continue."""
        if self._serving is not None and address == self._address:
            return self.port
        self.close()
        in_clear = self._credentials.server is None
        try:
            listener = listen(LOOPBACK if in_clear and not is_loopback(address) else address)
        except OSError:  # a name, or the address of a gateway
            listener = listen(LOOPBACK if in_clear else "")
        self._address, self.port = address, int(listener.getsockname()[1])
        serving = self._strangers.serve(listener, self._serve, self._credentials.server)
        self._serving = asyncio.get_running_loop().create_task(serving)
        return self.port

    def close(self) -> None:
        """Accept no more connections."""
        if self._serving is not None:
            self._serving.cancel()

    async def _serve(self, sock: socket.socket) -> None:
        """Raises OSError for a stranger, and for a peer that has gone and tries again."""
        with contextlib.suppress(PeerError), sock:
            if isinstance(sock, ssl.SSLSocket):
                await _when_ready(sock, sock.do_handshake)
            request = await _request(sock)
            if hmac.compare_digest(request.token.encode(), self._credentials.token.encode()):
                self._strangers.leave(sock)
                sock.settimeout(TIMEOUT_S)
                await self._answer(sock, request)
            else:
                sock.send(frame(_ENCODER.encode(No(detail="wrong token"))))
        self._strangers.leave(sock)

    async def _in_thread(self, work: Callable[..., R], *arguments: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _answer(self, sock: socket.socket, request: Get | Put) -> None:
        if isinstance(request, Get):
            answer = self._on_get(request)
            work = _send_bytes
        else:
            answer = self._on_put(request)
            work = _take_bytes
        if isinstance(answer, str):
            await self._in_thread(_send, sock, No(detail=answer))
            return
        ok = False
        try:
            await self._in_thread(work, sock, answer)
            ok = True
        finally:
            answer.done(ok)
        if isinstance(request, Put):
            await self._in_thread(_send, sock, Yes())


def fetch(address: str, port: int, credentials: PeerCredentials, wanted: StagedShard) -> Memfd:
    """A copy of a shard in another agent's memory. Blocks. Raises PeerError."""
    get = Get(
        token=credentials.token,
        step=wanted.step,
        generation=wanted.generation,
        shard=wanted.shard,
    )
    try:
        with _connect(address, port, credentials) as sock:
            _send(sock, get)
            answer = _expect_yes(_receive(sock))
            if answer.num_shards != wanted.num_shards:
                raise PeerError(f"it has one of {answer.num_shards} shards")
            memory = Memfd(f"shard-{wanted.shard}", answer.num_bytes)
            _receive_into(sock, memory.fd, answer.num_bytes)
            return memory
    except OSError as error:
        raise PeerError(f"{address}:{port}: {error}") from None


class NetworkShare:
    """Keeps a transfer below a share of what the network gives it: after a part that took t seconds
    it pauses for t (1 / share - 1). So the rate of the link need not be known."""

    def __init__(
        self,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._factor, self._clock, self._pause = 1 / share - 1, clock, pause
        self.part_bytes = SEND_BYTES if share >= 1 else PUSH_BYTES
        self._began = clock()

    def sent(self, *, last: bool) -> None:
        """A part was sent; there is no pause after the last one."""
        took_s = self._clock() - self._began
        if self._factor > 0 and not last:
            self._pause(took_s * self._factor)
        self._began = self._clock()


def push(
    address: str,
    port: int,
    credentials: PeerCredentials,
    staged: StagedShard,
    memory: Memfd,
    share: float = 1.0,
    confirmed: int = -1,
) -> None:
    """Copy a shard to another agent's memory, with a share of the network. Blocks. Raises
    PeerError."""
    try:
        with _connect(address, port, credentials) as sock:
            _send(sock, Put(token=credentials.token, staged=staged, confirmed=confirmed))
            _expect_yes(_receive(sock))
            _send_file(sock, memory.fd, staged.num_bytes, NetworkShare(share))
            _expect_yes(_receive(sock))
    except OSError as error:
        raise PeerError(f"{address}:{port}: {error}") from None


# -- connections ------------------------------------------------------------------------------
def _connect(address: str, port: int, credentials: PeerCredentials) -> socket.socket:
    """Raises OSError (a wrong certificate too) or PeerError."""
    if credentials.client is None and not is_loopback(address):
        raise PeerError(
            f"{address}:{port}: no connection without TLS: the job's token would cross the "
            f"network in clear"
        )
    bare = socket.create_connection((address, port), TIMEOUT_S)
    if credentials.client is None:
        return bare
    try:
        return credentials.client.wrap_socket(bare, server_hostname=credentials.name)
    except BaseException:
        bare.close()
        raise


# -- bytes ------------------------------------------------------------------------------------
def _expect_yes(message: PeerMessage) -> Yes:
    if isinstance(message, Yes):
        return message
    raise PeerError(message.detail if isinstance(message, No) else f"got {message!r}")


def _send_bytes(sock: socket.socket, hold: TransferBuffer) -> None:
    _send(sock, Yes(num_bytes=hold.num_bytes, num_shards=hold.num_shards))
    _send_file(sock, hold.memory.fd, hold.num_bytes)


def _take_bytes(sock: socket.socket, hold: TransferBuffer) -> None:
    _send(sock, Yes())
    _receive_into(sock, hold.memory.fd, hold.num_bytes)


def _send_file(
    sock: socket.socket, fd: int, num_bytes: int, network: NetworkShare | None = None
) -> None:
    """Send from the page cache to the socket. socket.sendfile waits while the socket is full."""
    network = network or NetworkShare(1.0)
    if isinstance(sock, ssl.SSLSocket):
        _send_mapped(sock, fd, num_bytes, network)
        return
    at = 0
    with os.fdopen(os.dup(fd), "rb", buffering=0) as file:
        while at < num_bytes:
            at += sock.sendfile(file, at, min(network.part_bytes, num_bytes - at))
            network.sent(last=at >= num_bytes)


def _send_mapped(sock: ssl.SSLSocket, fd: int, num_bytes: int, network: NetworkShare) -> None:
    """Encrypts from the mapped pages; SSLSocket.sendfile would read the file in pieces of 8 KiB."""
    with (
        mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ) as memory,
        memoryview(memory) as view,
    ):
        at = 0
        while at < num_bytes:
            with view[at : at + network.part_bytes] as part:
                sock.sendall(part)
                at += len(part)
            network.sent(last=at >= num_bytes)


def _receive_into(sock: socket.socket, fd: int, num_bytes: int) -> None:
    with mmap.mmap(fd, num_bytes) as memory, memoryview(memory) as view:
        at = 0
        while at < num_bytes:
            with view[at:] as rest:
                got = sock.recv_into(rest)
            if got == 0:
                raise PeerError(f"the connection ended at byte {at} of {num_bytes}")
            at += got


def _send(sock: socket.socket, message: PeerMessage) -> None:
    sock.sendall(frame(_ENCODER.encode(message)))


def _receive(sock: socket.socket) -> PeerMessage:
    length = _length(_exactly(sock, HEADER_BYTES))
    return _decoded(_exactly(sock, length))


def _exactly(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        data += _part(sock, length - len(data))
    return data


async def _request(sock: socket.socket) -> Get | Put:
    """The first message of a non-blocking connection. Raises OSError or PeerError."""

    async def exactly(length: int) -> bytes:
        data = b""
        while len(data) < length:
            data += await _when_ready(sock, partial(_part, sock, length - len(data)))
        return data

    message = _decoded(await exactly(_length(await exactly(HEADER_BYTES))))
    if isinstance(message, Get | Put):
        return message
    raise PeerError(f"got {message!r}")


def _length(header: bytes) -> int:
    try:
        return frame_length(header, MAX_REQUEST_BYTES)
    except BadFrame as error:
        raise PeerError(f"not the data port's protocol: {error}") from None


def _decoded(body: bytes) -> PeerMessage:
    try:
        return _DECODER.decode(body)
    except UNDECODABLE as error:
        raise PeerError(f"not the data port's protocol: {error}") from None


def _part(sock: socket.socket, length: int) -> bytes:
    part = sock.recv(length)
    if not part:
        raise PeerError("the connection ended")
    return part


async def _when_ready(sock: socket.socket, attempt: Callable[[], R]) -> R:
    """The result of `attempt` as soon as the non-blocking socket permits it."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return attempt()
        except (BlockingIOError, ssl.SSLWantReadError):
            add, remove = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            add, remove = loop.add_writer, loop.remove_writer
        ready = asyncio.Event()
        add(sock, ready.set)
        try:
            await ready.wait()
        finally:
            remove(sock)
