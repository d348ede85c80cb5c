"""The agent's connection to the controller: it dials in, again and again.

Owns: framing, back-off, and the reserved port for the next MASTER_PORT. Must not: know addresses
(dial.py does) or understand messages.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections.abc import Callable

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as m

from .connect import Connector

WELCOME_TIMEOUT_S = 10.0
"""A controller that accepts and says nothing is gone or stuck: dial again."""


class ControllerLink:
    """`on_up(own address)`, `on_message(message)` and `on_down()` are called in the event loop."""

    def __init__(
        self,
        dialler: Connector,
        on_up: Callable[[str], None],
        on_message: Callable[[m.ToAgent], None],
        on_down: Callable[[], None],
    ) -> None:
        self._dialler = dialler
        self._on_up, self._on_message, self._on_down = on_up, on_message, on_down
        self._writer: asyncio.StreamWriter | None = None
        self._told = ""

    async def run(self) -> None:
        """For ever: connect, hear, wait a little longer after each failure."""
        pause_s = limits.RECONNECT_MIN_S
        while True:
            try:
                streams = await self._dialler.dial()
            except (OSError, ValueError, KeyError) as error:
                self._tell(f"no controller yet: {error}")
                await asyncio.sleep(_jittered(pause_s))
                pause_s = min(2 * pause_s, limits.RECONNECT_MAX_S)
                continue
            welcomed = await self._hear(*streams)
            pause_s = limits.RECONNECT_MIN_S if welcomed else min(2 * pause_s, 1.0)
            await asyncio.sleep(_jittered(pause_s))

    def _tell(self, text: str) -> None:
        """Each reason once, not at every attempt."""
        if text != self._told:
            print(text, file=sys.stderr, flush=True)
        self._told = text

    def send(self, message: m.Message) -> None:
        if self._writer is not None:
            self._writer.write(m.encode(message))

    def close(self, why: str) -> None:
        self._tell(f"closing the link: {why}")
        if self._writer is not None:
            self._writer.close()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Until the connection ends; whether the controller has welcomed us."""
        self._writer = writer
        self._on_up(str(writer.get_extra_info("sockname")[0]))
        welcomed = False
        while (message := await self._read(reader, welcomed)) is not None:
            if isinstance(message, m.Welcome):
                welcomed, self._told = True, ""
            self._on_message(message)
        self._writer = None
        writer.close()
        self._on_down()
        return welcomed

    async def _read(self, reader: asyncio.StreamReader, welcomed: bool) -> m.ToAgent | None:
        """The next message; None: the connection has ended."""
        try:
            async with asyncio.timeout(None if welcomed else WELCOME_TIMEOUT_S):
                length = m.frame_length(await reader.readexactly(4))
            message = m.decode(await reader.readexactly(length))
            if isinstance(message, m.ToAgent):
                return message
            self._tell(f"controller: {type(message).__name__} is not for agents; closing")
        except asyncio.IncompleteReadError:
            self._tell("the controller has closed the connection")
        except (OSError, TimeoutError) as error:
            # A certificate that the controller does not accept shows here, not when dialling.
            self._tell(f"the connection broke: {error or 'the controller said nothing'}")
        except m.BadFrame as error:
            self._tell(f"controller: {error}; closing the connection")
        return None


def _jittered(pause_s: float) -> float:
    """All agents of a controller that has ended dial again: not all in the same millisecond."""
    return pause_s * random.uniform(0.5, 1.0)


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
