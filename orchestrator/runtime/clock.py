"""The only clock of the control plane: integer nanoseconds since the Unix epoch that never go back.

Owns: reading the time. Must not: wait.
"""

from __future__ import annotations

import time


class Clock:
    """The wall clock of the moment of creation, carried on by the monotonic clock.

    A step of the wall clock (NTP, a person) therefore never moves a deadline. `not_before` is for a
    controller that takes over a journal: what it writes must not be older than what is there.
    """

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        return self._offset_ns + time.monotonic_ns()

    def not_before(self, earliest_ns: int) -> None:
        """Make sure that now_ns() is at least this from now on."""
        self._offset_ns += max(0, earliest_ns - self.now_ns())
