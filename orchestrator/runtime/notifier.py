"""Wakes watchers when something has changed, also while a watcher is busy with an earlier change.
A module of its own because hosts and the control API share it."""

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
