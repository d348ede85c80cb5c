"""When a node forks standbys for the next launch, and how many.

Owns: this decision. Pure: time is an argument. Must not: fork; crew.py does.
"""

from __future__ import annotations

from . import inputs as f
from .generation import NS, Generation

REFILL_DELAY_S = 1.0
"""Standbys are forked this long after the first step, when start-up no longer needs the cores."""

SPARE_DELAY_S = 4.0
"""And this long after the welcome on a node that gets no seats. A spare often joins because another
node was just lost, and where nodes share cores its rehearsals would delay that recovery."""


class WarmPool:
    """`slots` is the number of workers that fit on the node."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.due_ns: int | None = None
        """When to give `refill` the next time."""
        self._retired = False

    def welcomed(self, now_ns: int) -> None:
        self._in(now_ns, SPARE_DELAY_S)

    def launching(self) -> None:
        self.due_ns = None

    def advanced(self, now_ns: int) -> None:
        self._in(now_ns, REFILL_DELAY_S)

    def retire(self) -> None:
        """The node leaves: no other launch will come."""
        self._retired, self.due_ns = True, None

    def _in(self, now_ns: int, delay_s: float) -> None:
        self.due_ns = None if self._retired else now_ns + int(delay_s * NS)

    def refill(self, now_ns: int, group: Generation | None) -> list[f.Output]:
        """What to fork now, for a launch as large as the running one."""
        if self.due_ns is None or now_ns < self.due_ns:
            return []
        self.due_ns = None
        running = group is not None and not group.stopped
        return [f.RefillStandbys(len(group.workers) if group and running else self._slots)]
