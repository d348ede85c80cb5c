"""The clock of a job's controller: integer nanoseconds since the Unix epoch that never go back."""

from __future__ import annotations

import time


class Clock:
    """The wall clock at the time of creation, continued by the monotonic clock, so that a step of
    the wall clock (NTP, a person) never moves a deadline."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        return self._offset_ns + time.monotonic_ns()

    def not_before(self, earliest_ns: int) -> None:
        """Keep now_ns() at this or later from now on. A controller that takes over writes no record
        that is older than those of its journal."""
        self._offset_ns += max(0, earliest_ns - self.now_ns())
