"""The agent's connection to the controller: it dials in, again and again.

Owns: connecting, framing, back-off, and the reserved port for the next MASTER_PORT. Must not:
understand messages.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from orchestrator.protocol import limits
from orchestrator.protocol import messages as m

CONNECT_TIMEOUT_S = 5.0
WELCOME_TIMEOUT_S = 10.0
"""A controller that accepts and says nothing is gone or stuck: dial again."""


class ControllerLink:
    """`on_up(own address)`, `on_message(message)` and `on_down()` are called in the event loop."""

    def __init__(
        self,
        endpoint_file: Path,
        on_up: Callable[[str], None],
        on_message: Callable[[m.ToAgent], None],
        on_down: Callable[[], None],
    ) -> None:
        self._endpoint_file = endpoint_file
        self._on_up, self._on_message, self._on_down = on_up, on_message, on_down
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """For ever: connect, hear, wait a little longer after each failure."""
        pause_s = limits.RECONNECT_MIN_S
        while True:
            try:
                # Read again each time: a new controller has a new port.
                address, port = self._endpoint()
                opening = asyncio.open_connection(address, port)
                reader, writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
            except (OSError, ValueError, KeyError, TimeoutError):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, limits.RECONNECT_MAX_S)
                continue
            welcomed = await self._hear(reader, writer)
            pause_s = limits.RECONNECT_MIN_S if welcomed else min(2 * pause_s, 1.0)
            await asyncio.sleep(pause_s)

    def send(self, message: m.Message) -> None:
        if self._writer is not None:
            self._writer.write(m.encode(message))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _endpoint(self) -> tuple[str, int]:
        document = json.loads(self._endpoint_file.read_text(encoding="utf-8"))
        return str(document["address"]), int(document["port"])

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Until the connection ends; whether the controller has spoken."""
        own = writer.get_extra_info("socket")
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._writer = writer
        self._on_up(own.getsockname()[0])
        spoken = False
        try:
            while True:
                header = reader.readexactly(4)
                patience_s = None if spoken else WELCOME_TIMEOUT_S
                length = m.frame_length(await asyncio.wait_for(header, patience_s))
                message = m.decode(await reader.readexactly(length))
                if not isinstance(message, m.ToAgent):
                    raise m.BadFrame(f"{type(message).__name__} is not for agents")
                spoken = True
                self._on_message(message)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        except m.BadFrame as error:
            print(f"controller: {error}; closing the connection", file=sys.stderr)
        self._writer = None
        writer.close()
        self._on_down()
        return spoken


class ReservedPort:
    """A port that stays bound, not listened on, until the next one is taken: nothing else on this
    node can get it meanwhile, and a TCPStore that sets SO_REUSEADDR can."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self) -> int:
        """A fresh port. The one before stays reserved: it was offered for the generation that
        starts now."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 0))
        self._sockets.append(sock)
        while len(self._sockets) > 2:
            self._sockets.pop(0).close()
        return int(sock.getsockname()[1])
