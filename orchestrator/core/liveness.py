"""Who was heard when, and when silence means that a node is lost.

Owns: these times and that judgement. Must not: change the controller's state, or read a clock.

A silent node is lost after `heartbeatTimeoutSeconds`, if others were heard meanwhile. If nobody
was, the likelier reason is on our side: a machine that starves us or all agents, or our own link.
Then nobody is given up until somebody is heard again, who shows that ears and machine work; the
others have half a timeout more to speak up. After ALL_SILENT_FACTOR timeouts silence is believed,
however common it is: if truly everybody was lost, that is what the doubt has cost.
"""

from __future__ import annotations

from collections.abc import Iterable

from .. import limits
from ..api.v1alpha1 import Recovery
from .context import SECOND_NS, seconds
from .events import AnyEvent, HeartbeatsLost, HeartbeatsRestored, NodeLost

BEATS_TO_DOUBT = 1.5
"""Beats missed by everybody at least, before that is a silence of everybody."""


class FailureDetector:
    """Of the nodes of one job, as its controller hears them."""

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}
        """Watched nodes -> when they were heard of last."""
        self._arrived: dict[str, int] = {}
        """News that is there and was not observed yet."""
        self._any_ns = 0
        """When anybody was heard of last."""
        self.ended_ns = 0
        """When the last silence of everybody ended."""
        self._told_ns: int | None = None
        """Beginning of the silence that was told of."""

    # -- in -----------------------------------------------------------------------------------
    def begin(self, now_ns: int) -> None:
        """A new controller: it watches a node from the first word that it hears of it."""
        self._heard, self._told_ns, self.ended_ns = {}, None, 0
        self._any_ns = max(self._any_ns, now_ns)

    def forgive(self, now_ns: int) -> None:
        """Beats are due at other times from now on: what is old by them was not late."""
        self._heard = dict.fromkeys(self._heard, now_ns)

    def arrived(self, now_ns: int, node: str, recovery: Recovery) -> None:
        """Something has come that will be observed in its ctx: its node is not silent."""
        self._arrived[node] = now_ns
        self._hear(now_ns, recovery)

    def heard(self, now_ns: int, node: str, recovery: Recovery) -> None:
        self._heard[node] = now_ns
        self._hear(now_ns, recovery)

    def _hear(self, now_ns: int, recovery: Recovery) -> None:
        if now_ns - self._any_ns >= _doubt_ns(recovery):
            self.ended_ns = now_ns
        self._any_ns = max(self._any_ns, now_ns)

    # -- out ----------------------------------------------------------------------------------
    def last(self, node: str) -> int:
        """When something of it was observed last; 0: it is not watched."""
        return self._heard.get(node, 0)

    def next_ns(self, nodes: Iterable[str], recovery: Recovery) -> int | None:
        """When to judge again, if nothing is heard until then."""
        watched = [node for node in nodes if node in self._heard]
        due = [self._lost_ns(node, recovery) for node in watched]
        if watched and self._told_ns is None:
            due.append(self._tell_ns(watched, recovery))
        return min(due, default=None)

    def judge(self, now_ns: int, nodes: Iterable[str], recovery: Recovery) -> list[AnyEvent]:
        """The verdicts of this moment; each is given once."""
        known = dict.fromkeys(nodes)
        self._heard = {node: at for node, at in self._heard.items() if node in known}
        self._arrived = {node: at for node, at in self._arrived.items() if node in known}
        out: list[AnyEvent] = []
        if self._told_ns is not None and self._any_ns > self._told_ns:
            out.append(HeartbeatsRestored(seconds=(self.ended_ns - self._told_ns) / SECOND_NS))
            self._told_ns = None
        for node in list(self._heard):
            if now_ns >= self._lost_ns(node, recovery):
                detail = _why(now_ns - self._at(node), recovery.heartbeat_timeout_s)
                del self._heard[node]
                out.append(NodeLost(node=node, cause="silent", detail=detail))
        if not self._heard:
            self._told_ns = None
        elif self._told_ns is None and now_ns >= self._tell_ns(self._heard, recovery):
            self._told_ns = self._any_ns
            quiet_s = (now_ns - self._any_ns) / SECOND_NS
            patience_s = limits.ALL_SILENT_FACTOR * recovery.heartbeat_timeout_s
            out.append(
                HeartbeatsLost(nodes=len(self._heard), seconds=quiet_s, patience_s=patience_s)
            )
        return out

    def _tell_ns(self, watched: Iterable[str], recovery: Recovery) -> int:
        """When somebody would be lost by now, had anybody been heard."""
        first = min(self._at(node) for node in watched)
        at = first + seconds(recovery.heartbeat_timeout_s)
        return max(at, self._any_ns + _doubt_ns(recovery))

    def _at(self, node: str) -> int:
        return max(self._heard[node], self._arrived.get(node, 0))

    def _lost_ns(self, node: str, recovery: Recovery) -> int:
        """When it is lost, if nobody says anything until then."""
        at, doubt = self._at(node), _doubt_ns(recovery)
        latest = at + seconds(limits.ALL_SILENT_FACTOR * recovery.heartbeat_timeout_s)
        due = at + seconds(recovery.heartbeat_timeout_s)
        if self.ended_ns > at:
            due = max(due, self.ended_ns + doubt)
        return latest if self._any_ns + doubt <= due else min(due, latest)


def _why(quiet_ns: int, limit_s: float) -> str:
    text = f"no heartbeat for {quiet_ns / SECOND_NS:.1f} s; the limit is {limit_s:g} s"
    longest_s = limits.ALL_SILENT_FACTOR * limit_s
    return (
        f"{text}, {longest_s:g} s when no node is heard of"
        if quiet_ns >= seconds(longest_s)
        else text
    )


def _doubt_ns(recovery: Recovery) -> int:
    """Silence of everybody for so long is more than chance."""
    beats_s = BEATS_TO_DOUBT * recovery.heartbeat_interval_s
    return seconds(max(recovery.heartbeat_timeout_s / 2, beats_s))
