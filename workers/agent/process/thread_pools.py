"""The agent's thread pools: one for each kind of work that waits for a disk, network or memory.

The kinds share no thread: an upload may wait for storage for minutes, and a push to a lost buddy
for its timeout, while a restore or an allocation must not wait for either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar, get_args

R = TypeVar("R")
Kind = Literal["upload", "push", "fetch", "touch"]

MIN_THREADS = 8
"""Threads of a kind, which wait for disks and networks, not for cores. A node with more workers has
that many threads, since all workers stage and restore at the same moment."""


class ThreadPools:
    """The pools. Threads start when they are first needed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: int) -> None:
        self._loop = loop
        self._pools = {
            kind: ThreadPoolExecutor(max(MIN_THREADS, slots), thread_name_prefix=f"holdfast-{kind}")
            for kind in get_args(Kind)
        }

    async def run(self, kind: Kind, work: Callable[..., R], *arguments: object) -> R:
        """Run `work` in a thread of this kind's pool; returns or raises what it does."""
        return await self._loop.run_in_executor(self._pools[kind], work, *arguments)
