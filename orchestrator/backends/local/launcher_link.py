"""The node launcher's process and the connection to it."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol import launcher_protocol as protocol
from holdfast.orchestrator.protocol import python_command
from holdfast.orchestrator.protocol.framing import UNDECODABLE, BadFrame, FrameReader, frame

from .processes import Identity, Watch, identify, watch

MIN_START_TIMEOUT_S = 120.0
"""The launcher imports torch before it listens: 2 s warm, minutes from a cold disk or on a machine
that is short of CPU time. So it has recovery.startupTimeoutSeconds if that is more."""

RETRY_INTERVAL_S = 0.01
LOG_TAIL_BYTES = 2000

_UCRED = struct.Struct("3i")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[protocol.FromLauncher] = msgspec.msgpack.Decoder(
    protocol.FromLauncher
)


class LauncherLink(asyncio.Protocol):
    """A connection to a launcher."""

    def __init__(
        self, on_message: Callable[[protocol.FromLauncher], None], on_closed: Callable[[], None]
    ) -> None:
        self._on_message, self._on_closed = on_message, on_closed
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self.launcher: Identity | None = None
        """The process at the other end, perhaps started by a previous controller."""
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("socket")
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        self.launcher = identify(_UCRED.unpack(credentials)[0])

    def data_received(self, data: bytes) -> None:
        try:
            messages = [_DECODER.decode(body) for body in self._frames.feed(data)]
        except (BadFrame, *UNDECODABLE):
            self.close()  # not a launcher of this version
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        self._on_closed()

    def send(self, message: protocol.LauncherMessage) -> None:
        assert self._transport is not None
        self._transport.write(frame(_ENCODER.encode(message)))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class LauncherProcess:
    """The launcher as a child process, which outlives this one."""

    def __init__(
        self,
        module: str,
        socket_path: Path,
        log: Path,
        environment: dict[str, str],
        directory: Path,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*python_command.start(module), "--socket", str(socket_path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )
        self.ended = asyncio.get_running_loop().create_future()
        identity = identify(self._process.pid)
        self._watch: Watch | None = watch(identity, self._on_end) if identity else None
        if self._watch is None:
            self._on_end()

    def _on_end(self) -> None:
        self._process.wait()
        self._watch = None
        if not self.ended.done():
            self.ended.set_result(None)

    def kill(self) -> None:
        if self._watch is not None:
            self._watch.kill()

    def failure(self) -> str:
        """Launcher's exit code and the end of its log."""
        code = self._process.poll()
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - LOG_TAIL_BYTES))
                tail = file.read().decode(errors="replace").strip()
        except OSError as error:
            tail = str(error)
        return f"the node launcher ended with code {code}; {self._log} ends with:\n{tail}"


async def connect(
    socket_path: Path,
    make: Callable[[], LauncherLink],
    process: LauncherProcess | None,
    timeout_s: float = MIN_START_TIMEOUT_S,
) -> LauncherLink | None:
    """A connection to the launcher at `socket_path`.

    Without `process`: None if no launcher listens. With it: waits until it listens; raises
    HoldfastError if it ends before that or takes longer than `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        try:
            _, link = await loop.create_unix_connection(make, str(socket_path))
            return link
        except (FileNotFoundError, ConnectionRefusedError):
            if process is None:
                return None
        if process.ended.done():
            raise HoldfastError(process.failure())
        if loop.time() > deadline_s:
            process.kill()
            raise HoldfastError(
                f"the node launcher did not listen within {timeout_s:g} s; if this machine is "
                "slow, raise recovery.startupTimeoutSeconds"
            )
        await asyncio.wait([process.ended], timeout=RETRY_INTERVAL_S)


def launcher_environment(threads: int, extra: dict[str, str]) -> dict[str, str]:
    """The environment of the launcher, and through fork of every agent and worker.

    The thread counts must be set before numpy and torch are imported: OpenBLAS starts its threads
    at import, and a process with threads must not fork.
    """
    return {
        **os.environ,
        "PYTHONPATH": python_command.import_path(),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        **extra,
        "OPENBLAS_NUM_THREADS": "1",
    }
