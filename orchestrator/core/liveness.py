"""Failure detector: which nodes have sent a heartbeat when, and which are lost.

A node without heartbeats is lost after `heartbeatTimeoutSeconds`, if other nodes sent some
meanwhile. If no node did, the controller is probably the problem: its machine is overloaded, or its
network is down. Then no node is declared lost until one sends a heartbeat again; the others get
half a heartbeat timeout more. After ALL_SILENT_FACTOR timeouts all nodes are declared lost; if they
really were, the wait has cost that time. A node whose machine was short of CPU time at its last
heartbeat, or has been since by those of other nodes there, gets the same time.
"""

from __future__ import annotations

from collections.abc import Iterable

from .. import limits
from ..api.v1alpha1 import Recovery
from .context import SECOND_NS, seconds
from .events import AnyEvent, HeartbeatsLost, HeartbeatsRestored, NodeLost

FRESH_BEATS = 1.5
"""Heartbeat intervals for which the last heartbeat counts as current."""
BEATS_TO_DOUBT = 1.5
"""Fewest heartbeat intervals without any heartbeat after which the controller suspects itself."""


class FailureDetector:
    """Detects failed nodes of one job. Times are arguments."""

    def __init__(self) -> None:
        self._observed: dict[str, int] = {}
        """Watched nodes -> when their last message was observed."""
        self._arrived: dict[str, int] = {}
        """Time of a message that may wait to be observed."""
        self._starved: dict[str, int] = {}
        """Node -> when its machine was last short of CPU time."""
        self._any_ns = 0
        """Time of the last message of any node."""
        self.ended_ns = 0
        """End of the last time without any heartbeat."""
        self._lost_since_ns: int | None = None
        """Begin of the reported time without any heartbeat."""
        self._quiet_until_ns = 0
        """Time before which no node can be lost, however many messages come."""
        self._judged_ns = 0
        """Time at which that was computed."""

    # -- in -----------------------------------------------------------------------------------
    def begin(self, now_ns: int) -> None:
        """A new controller: it watches a node from the first message on."""
        self._observed, self._lost_since_ns, self.ended_ns = {}, None, 0
        self._quiet_until_ns = self._judged_ns = 0
        self._any_ns = max(self._any_ns, now_ns)

    def reset(self, now_ns: int) -> None:
        """The heartbeat interval has changed: no heartbeat is late by the new one yet."""
        self._observed = dict.fromkeys(self._observed, now_ns)
        self._quiet_until_ns = 0

    def arrived(self, now_ns: int, node: str, recovery: Recovery) -> None:
        """A message of the node waits to be observed."""
        self._arrived[node] = now_ns
        self._end_doubt(now_ns, recovery)

    def observed(self, now_ns: int, node: str, recovery: Recovery) -> None:
        """A message of the node is observed."""
        self._observed[node] = now_ns
        self._end_doubt(now_ns, recovery)

    def starved(self, now_ns: int, nodes: Iterable[str]) -> None:
        """The machine of these nodes is short of CPU time: their heartbeats may be late."""
        self._starved |= dict.fromkeys(nodes, now_ns)

    def _end_doubt(self, now_ns: int, recovery: Recovery) -> None:
        if now_ns - self._any_ns >= _doubt_ns(recovery):
            self.ended_ns = now_ns
        self._any_ns = max(self._any_ns, now_ns)

    # -- out ----------------------------------------------------------------------------------
    def last_ns(self, node: str) -> int:
        """Time at which the node's last message was observed; 0: it is not watched."""
        return self._observed.get(node, 0)

    def current_at(self, at_ns: int, nodes: Iterable[str], recovery: Recovery) -> bool:
        """The last heartbeats of all these nodes count as current at this time."""
        since_ns = at_ns - seconds(FRESH_BEATS * recovery.heartbeat_interval_s)
        return all(self.last_ns(node) >= since_ns for node in nodes)

    def next_ns(
        self, nodes: Iterable[str], recovery: Recovery, *, rough: bool = False
    ) -> int | None:
        """Time to judge again without a message. `rough`: maybe too early, but mostly cheap."""
        if rough and self._lost_since_ns is None and self._judged_ns < self._quiet_until_ns:
            return self._quiet_until_ns if self._observed else None
        watched = [node for node in nodes if node in self._observed]
        due = [self._lost_ns(node, recovery) for node in watched]
        if watched and self._lost_since_ns is None:
            due.append(self._all_lost_ns(watched, recovery))
        return min(due, default=None)

    def judge(self, now_ns: int, nodes: Iterable[str], recovery: Recovery) -> list[AnyEvent]:
        """The events of this moment; each is returned once."""
        if self._lost_since_ns is None and now_ns < self._quiet_until_ns:
            return []
        current = dict.fromkeys(nodes)
        self._observed = {node: at for node, at in self._observed.items() if node in current}
        self._arrived = {node: at for node, at in self._arrived.items() if node in current}
        self._starved = {node: at for node, at in self._starved.items() if node in current}
        out: list[AnyEvent] = []
        if self._lost_since_ns is not None and self._any_ns > self._lost_since_ns:
            quiet_s = (self.ended_ns - self._lost_since_ns) / SECOND_NS
            out.append(HeartbeatsRestored(seconds=quiet_s))
            self._lost_since_ns = None
        for node in list(self._observed):
            if now_ns >= self._lost_ns(node, recovery):
                quiet_ns = now_ns - self._at(node)
                detail = _why(quiet_ns, recovery.heartbeat_timeout_s)
                if self._starved.get(node, -1) >= self._at(node):
                    detail += " or when its machine is short of CPU time"
                del self._observed[node]
                ago_s = quiet_ns / SECOND_NS
                out.append(NodeLost(node=node, cause="silent", detail=detail, ago_s=ago_s))
        if not self._observed:
            self._lost_since_ns = None
        elif self._lost_since_ns is None and now_ns >= self._all_lost_ns(self._observed, recovery):
            self._lost_since_ns = self._any_ns
            quiet_s = (now_ns - self._any_ns) / SECOND_NS
            patience_s = limits.ALL_SILENT_FACTOR * recovery.heartbeat_timeout_s
            out.append(
                HeartbeatsLost(nodes=len(self._observed), seconds=quiet_s, patience_s=patience_s)
            )
        first_ns = min((self._at(node) for node in self._observed), default=now_ns)
        self._judged_ns = now_ns
        self._quiet_until_ns = first_ns + seconds(recovery.heartbeat_timeout_s)
        return out

    def _all_lost_ns(self, watched: Iterable[str], recovery: Recovery) -> int:
        """Time at which the first node would be lost if others sent heartbeats."""
        first = min(self._at(node) for node in watched)
        at = first + seconds(recovery.heartbeat_timeout_s)
        return max(at, self._any_ns + _doubt_ns(recovery))

    def _at(self, node: str) -> int:
        return max(self._observed[node], self._arrived.get(node, 0))

    def _lost_ns(self, node: str, recovery: Recovery) -> int:
        """Time at which the node is lost, if no message of any node comes until then."""
        at, doubt = self._at(node), _doubt_ns(recovery)
        latest = at + seconds(limits.ALL_SILENT_FACTOR * recovery.heartbeat_timeout_s)
        if self._starved.get(node, -1) >= at:
            return latest
        due = max(at + seconds(recovery.heartbeat_timeout_s), self.ended_ns + doubt)
        return latest if self._any_ns + doubt <= due else min(due, latest)


def _why(quiet_ns: int, limit_s: float) -> str:
    text = f"no heartbeat for {quiet_ns / SECOND_NS:.1f} s; the limit is {limit_s:g} s"
    longest_s = limits.ALL_SILENT_FACTOR * limit_s
    if quiet_ns < seconds(longest_s):
        return text
    return f"{text}, {longest_s:g} s when no node sends heartbeats"


def _doubt_ns(recovery: Recovery) -> int:
    """Time without any heartbeat after which the controller suspects its own machine."""
    beats_s = BEATS_TO_DOUBT * recovery.heartbeat_interval_s
    return seconds(max(recovery.heartbeat_timeout_s / 2, beats_s))
