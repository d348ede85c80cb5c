"""A node that will be taken away: when its workers are stopped, and when its memory is written.

Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.orchestrator.protocol import messages as m

from .script_progress import SECOND_NS

SAVE_SHARE = 0.5
"""Share of the grace after which a node without a controller writes what it has staged. A restarted
controller is back within seconds and plans better; storage needs time too."""
MARGIN_S = 2.0
"""End of the workers before the end of the grace: to reap them, and for the container runtime to
notice. Half of it is kept for a worker that cannot be killed."""


@dataclass
class Preemption:
    """A node that will be taken away (SIGTERM: drain, preemption, eviction), from SIGTERM on.

    The controller is notified at once and after every reconnect. Workers train on and memory is
    served until the controller sends Shutdown. Without a controller the staged state goes to
    storage at `save_ns`. The node always ends before its grace is over.
    """

    detail: str
    began_ns: int
    grace_s: float
    saved: bool = False

    @property
    def _margin_s(self) -> float:
        return min(MARGIN_S, self.grace_s / 4)

    @property
    def kill_ns(self) -> int:
        """The workers are killed."""
        return self.began_ns + int((self.grace_s - self._margin_s) * SECOND_NS)

    @property
    def end_ns(self) -> int:
        """The agent ends, whatever its workers do."""
        return self.began_ns + int((self.grace_s - self._margin_s / 2) * SECOND_NS)

    @property
    def save_ns(self) -> int:
        return self.began_ns + int(SAVE_SHARE * self.grace_s * SECOND_NS)

    def due_ns(self, connected: bool) -> int:
        return self.kill_ns if connected or self.saved else min(self.save_ns, self.kill_ns)

    def message(self, now_ns: int) -> m.PreemptionNoticed:
        grace_s = max(0.0, (self.kill_ns - now_ns) / SECOND_NS)
        return m.PreemptionNoticed(detail=self.detail, grace_s=grace_s)
