"""The agent's connection to the controller, with reconnects and back-off."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections.abc import Callable

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.framing import HEADER_BYTES, BadFrame, frame_length

from .connect import Connector

WELCOME_TIMEOUT_S = 10.0
"""A controller that accepts a connection and sends no Welcome is stuck: connect again."""


class ControllerLink:
    """`on_up(own address)`, `on_message(message)` and `on_down()` are called in the event loop."""

    def __init__(
        self,
        connector: Connector,
        on_up: Callable[[str], None],
        on_message: Callable[[m.ToAgent | m.Question | m.CodePart], None],
        on_down: Callable[[], None],
    ) -> None:
        self._connector = connector
        self._on_up, self._on_message, self._on_down = on_up, on_message, on_down
        self._writer: asyncio.StreamWriter | None = None
        self._last_note = ""

    async def run(self) -> None:
        """Connect and receive; the pause grows with each failure. Never returns."""
        pause_s = limits.RECONNECT_MIN_S
        while True:
            try:
                streams = await self._connector.connect()
            except (OSError, ValueError, KeyError) as error:
                self._note(f"no controller yet: {error}")
                await asyncio.sleep(_jittered(pause_s))
                pause_s = min(2 * pause_s, limits.RECONNECT_MAX_S)
                continue
            welcomed = await self._receive(*streams)
            pause_s = limits.RECONNECT_MIN_S if welcomed else min(2 * pause_s, 1.0)
            await asyncio.sleep(_jittered(pause_s))

    def _note(self, text: str) -> None:
        """Print a reason once, not at every attempt."""
        if text != self._last_note:
            print(text, file=sys.stderr, flush=True)
        self._last_note = text

    def send(self, message: m.Message) -> None:
        if self._writer is not None:
            self._writer.write(m.encode(message))

    def close(self, why: str) -> None:
        self._note(f"closing the link: {why}")
        if self._writer is not None:
            self._writer.close()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Receive until the connection ends; whether a Welcome has come."""
        self._writer = writer
        self._on_up(str(writer.get_extra_info("sockname")[0]))
        welcomed = False
        while (message := await self._read(reader, welcomed)) is not None:
            if isinstance(message, m.Welcome):
                welcomed, self._last_note = True, ""
            self._on_message(message)
        self._writer = None
        writer.close()
        self._on_down()
        return welcomed

    async def _read(
        self, reader: asyncio.StreamReader, welcomed: bool
    ) -> m.ToAgent | m.Question | m.CodePart | None:
        """The next message; None: the connection is over."""
        try:
            async with asyncio.timeout(None if welcomed else WELCOME_TIMEOUT_S):
                length = frame_length(await reader.readexactly(HEADER_BYTES))
            message = m.decode(await reader.readexactly(length))
            if isinstance(message, m.ToAgent | m.Question | m.CodePart):
                return message
            self._note(f"controller: {type(message).__name__} is not for agents; closing")
        except asyncio.IncompleteReadError:
            self._note("the controller has closed the connection")
        except (OSError, TimeoutError) as error:
            # A certificate that the controller refuses fails here, not while connecting.
            self._note(f"the connection broke: {error or 'the controller sent no Welcome'}")
        except BadFrame as error:
            self._note(f"controller: {error}; closing the connection")
        return None


def _jittered(pause_s: float) -> float:
    """Agents of a controller that has ended must not all reconnect in the same millisecond."""
    return pause_s * random.uniform(0.5, 1.0)


class ReservedPort:
    """A port for the next MASTER_PORT. It stays bound without a listener, so that no other process
    of this node gets it, while a TCPStore that sets SO_REUSEADDR can use it."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self) -> int:
        """A new port. The previous one stays reserved: it was offered for the generation that is
        being launched."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 0))
        self._sockets.append(sock)
        while len(self._sockets) > 2:
            self._sockets.pop(0).close()
        return int(sock.getsockname()[1])
