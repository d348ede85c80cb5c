"""One side of a connection in a test: the real frames, spoken by hand."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.orchestrator.protocol import messages as wire


class Frames:
    """One side of a connection in a test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, address: str, port: int) -> Frames:
        return cls(*await asyncio.open_connection(address, port))

    def send(self, message: wire.Message) -> None:
        self.writer.write(wire.encode(message))

    async def receive(self) -> Any:
        """The next message; None at the end."""
        try:
            header = await self.reader.readexactly(4)
            return wire.decode(await self.reader.readexactly(wire.frame_length(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self.writer.close()
