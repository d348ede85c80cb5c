"""Wakes watchers when something has changed, also while one is busy with an earlier change."""

from __future__ import annotations

import asyncio


class ChangeNotifier:
    """A count of changes that can be awaited, within one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, seen: int) -> None:
        """Wait until `count` is greater than `seen`."""
        while self.count <= seen:
            await self._changed.wait()
