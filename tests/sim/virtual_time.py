"""Virtual time and the trace: a priority queue, one seeded source of chance, and a running hash.

Owns: order. Two things due at the same moment happen in the order in which they were asked for, so
a seed names one history. Must not: know jobs.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable

NS = 1_000_000_000


class VirtualTime:
    def __init__(self, seed: int, verbose: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now = 1_000 * NS
        self.lines: list[str] = []
        self._verbose = verbose
        self._hash = hashlib.blake2b(digest_size=16)
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def time_s(self) -> float:
        """Since the beginning of the story."""
        return self.now / NS - 1_000

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now + round(delay_s * NS), act)

    def at(self, due_ns: int, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (max(due_ns, self.now), self._count, act))

    def run(self, until_s: float, done: Callable[[], bool]) -> bool:
        """Until `done` or the time is up; returns whether it is done."""
        limit = round((1_000 + until_s) * NS)
        while self._queue and not done():
            due, _count, act = self._queue[0]
            if due > limit:
                return done()
            heapq.heappop(self._queue)
            self.now = due
            act()
        return done()

    def between(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def tell(self, text: str) -> None:
        """One line of the transcript; all of them make the hash."""
        line = f"{self.time_s:9.3f} {text}"
        self._hash.update(line.encode())
        self.lines.append(line)
        if self._verbose:
            print(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()
