"""Virtual time, the random numbers of one seed, and the transcript with its hash.

Two acts that are due at the same time happen in the order in which they were scheduled, so that a
seed has exactly one history.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable

from holdfast.orchestrator.core.context import SECOND_NS


class VirtualTime:
    def __init__(self, seed: int, verbose: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now = 1_000 * SECOND_NS
        self.lines: list[str] = []
        self._verbose = verbose
        self._hash = hashlib.blake2b(digest_size=16)
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def time_s(self) -> float:
        """Seconds since the start of the simulation."""
        return self.now / SECOND_NS - 1_000

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now + round(delay_s * SECOND_NS), act)

    def at(self, due_ns: int, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (max(due_ns, self.now), self._count, act))

    def run(self, until_s: float, done: Callable[[], bool]) -> bool:
        """Run until `done` or the time limit; returns `done()`."""
        limit = round((1_000 + until_s) * SECOND_NS)
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

    def log(self, text: str) -> None:
        """Add a line to the transcript and its hash."""
        line = f"{self.time_s:9.3f} {text}"
        self._hash.update(line.encode())
        self.lines.append(line)
        if self._verbose:
            print(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()
