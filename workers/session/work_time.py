"""The CPU time of the training thread in a step.

Waits for peers, for storage and for a CPU are not in it, so ranks that wait for each other can be
compared. On a GPU the host waits actively for the device, so nothing is reported there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from holdfast.orchestrator import limits


class WorkMeter:
    """Median over the last steps. `clock` is a parameter for tests."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=limits.STRAGGLER_WINDOW)
        self._began_s = self._clock()

    def begin(self) -> None:
        """The next step begins now: what was done since the last one does not count."""
        self._began_s = self._clock()

    def end(self) -> float:
        """A step ends, and the next one begins. 0 until there are enough steps."""
        now_s = self._clock()
        self._recent.append(now_s - self._began_s)
        self._began_s = now_s
        full = len(self._recent) == limits.STRAGGLER_WINDOW
        return median(self._recent) if full else 0.0
