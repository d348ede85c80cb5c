"""Strangers, without token and certificate: silent, slow, or connecting again and again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BOUND_S = 60.0


@dataclass
class Crowd:
    """Strangers, in the event loop of a thread."""

    port: int
    behave: Callable[[Crowd], Any]
    size: int
    num_connected: int = 0
    all_here: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.all_here.wait(BOUND_S)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._strangers.cancel)
        self._thread.join()

    def _run(self) -> None:
        async def act() -> None:
            await asyncio.gather(*(self.behave(self) for _ in range(self.size)))

        self._strangers = self._loop.create_task(act())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._strangers)
        self._loop.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                connection = await asyncio.open_connection("127.0.0.1", self.port)
                break
            except OSError:
                await asyncio.sleep(0.05)
        self.num_connected += 1
        if self.num_connected == self.size:
            self.all_here.set()
        return connection


async def idle(crowd: Crowd) -> None:
    connection = await crowd.connect()
    await asyncio.Event().wait()
    del connection


async def slow(crowd: Crowd) -> None:
    """Announce a message, or begin a request, and send a byte of it now and then."""
    while True:
        _, writer = await crowd.connect()
        try:
            writer.write((4000).to_bytes(4, "big"))
            while not writer.is_closing():
                writer.write(b"\0")
                await writer.drain()
                await asyncio.sleep(0.5)
        except OSError:
            await asyncio.sleep(0.05)


async def reconnecting(crowd: Crowd) -> None:
    while True:
        reader, writer = await crowd.connect()
        with contextlib.suppress(OSError):
            await reader.read()
            writer.close()
