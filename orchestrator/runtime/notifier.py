"""News for those who watch: something has changed since they last looked.

Owns: that no change is missed, also one that comes while a watcher is busy with the one before.
Must not: know what has changed.
"""

from __future__ import annotations

import asyncio


class ChangeNotifier:
    """A count of changes that can be waited for, within one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._news = asyncio.Event()

    def tell(self) -> None:
        self.count += 1
        self._news.set()
        self._news = asyncio.Event()

    async def after(self, seen: int) -> None:
        """Returns when `count` is past what was seen: at once if it is so already."""
        while self.count <= seen:
            await self._news.wait()
