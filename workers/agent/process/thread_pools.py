"""The agent's threads: one pool for each kind of work that waits for a disk, a network or memory.

Owns: how much of each kind goes on at once. Must not: know what is done. The kinds share no thread:
uploads wait for storage for minutes, and pushes to a buddy that was lost for their timeout, while a
copy in memory or a restore must not wait for either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar, get_args

R = TypeVar("R")
Kind = Literal["upload", "push", "fetch", "touch"]

AT_LEAST = 8
"""Of a kind at once: it waits for disks and networks, not for cores. A node with more workers has
as many as those, since all of them stage and restore at the same moment."""


class ThreadPools:
    """Threads are made when first needed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: int) -> None:
        self._loop = loop
        self._pools = {
            kind: ThreadPoolExecutor(max(AT_LEAST, slots), thread_name_prefix=f"holdfast-{kind}")
            for kind in get_args(Kind)
        }

    async def run(self, kind: Kind, work: Callable[..., R], *arguments: object) -> R:
        """What `work` returns or raises. Its turn comes when fewer than the pool's size of the same
        kind are under way."""
        return await self._loop.run_in_executor(self._pools[kind], work, *arguments)
