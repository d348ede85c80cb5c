"""Jobs that compete for room: who holds on to half of what it needs, and who gives it back.

Owns: that order. Must not: touch pods; each job's backend gives back its own.

Without a scheduler that places gangs as a whole, two jobs can each get half of the room, and both
would wait for ever. All jobs of an operator meet here: of those that have some of their nodes but
not enough, the first (by priority, then by age, then by name) holds on to what it has; the others
give everything back after a moment and ask again when the first has got what it needs. A job that
is the only one or the first gives back too, later and for a random time: whoever it competes with
may not be seen from here (another operator, other workloads).
"""

from __future__ import annotations

from typing import NamedTuple

PATIENCE_S = 8.0
"""Pods of one request are placed within a second or two of each other where there is room."""
HOLD_S = 60.0
"""The first one of those that compete holds on for this long."""


class GangPriority(NamedTuple):
    """Sorts jobs: the smallest comes first."""

    minus_priority: int
    created: str
    """creationTimestamp, RFC 3339: sorts as text."""
    key: str


class GangArbiter:
    """The incomplete gangs of one operator."""

    def __init__(self) -> None:
        self._waiting: dict[str, GangPriority] = {}

    def enter(self, rank: GangPriority) -> None:
        """It has some of its nodes, but not enough of them."""
        self._waiting[rank.key] = rank

    def leave(self, key: str) -> None:
        """It has enough, or none."""
        self._waiting.pop(key, None)

    def ahead_of(self, rank: GangPriority) -> str:
        """The job that comes first, where that is another one; empty: nobody is ahead."""
        first = min(self._waiting.values(), default=rank)
        return first.key if first < rank else ""
