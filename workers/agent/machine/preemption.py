"""A node that is being taken away (SIGTERM: a drain, a preemption, an eviction): when it does what.
Pure.

Owns: the timetable. The controller is told at once, and again whenever it comes back. Workers train
on and memory is served while it plans; it says Shutdown when nothing here is needed any more. If
nobody answers, what is staged goes to storage at half time. In every case the node has ended before
its grace is over. Must not: end workers; the machine does.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.orchestrator.protocol import messages as m

from .generation import NS

SAVE_AT = 0.5
"""Of the grace: a controller that restarts is back within seconds and plans better than we do, and
storage needs time too."""
MARGIN_S = 2.0
"""Before the end of the grace: for workers to be reaped, and for the container's runtime to see
it. Half of it is kept for a worker that cannot be killed."""


@dataclass
class Preemption:
    """From SIGTERM on."""

    detail: str
    began_ns: int
    grace_s: float
    saved: bool = False

    @property
    def _margin_s(self) -> float:
        return min(MARGIN_S, self.grace_s / 4)

    @property
    def end_ns(self) -> int:
        """Workers are killed then."""
        return self.began_ns + int((self.grace_s - self._margin_s) * NS)

    @property
    def last_ns(self) -> int:
        """And the agent ends then, whatever its workers do."""
        return self.began_ns + int((self.grace_s - self._margin_s / 2) * NS)

    @property
    def save_ns(self) -> int:
        return self.began_ns + int(SAVE_AT * self.grace_s * NS)

    def due_ns(self, talking: bool) -> int:
        return self.end_ns if talking or self.saved else min(self.save_ns, self.end_ns)

    def message(self, now_ns: int) -> m.NodeLeaving:
        return m.NodeLeaving(detail=self.detail, grace_s=max(0.0, (self.end_ns - now_ns) / NS))

    @property
    def verdict(self) -> str:
        return f"{self.detail}; the grace period of {self.grace_s:g} s is over"
