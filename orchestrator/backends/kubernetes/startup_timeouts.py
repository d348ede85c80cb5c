"""Pods that do not start: how long they are waited for, and when their room is given back. Pure:
time is an argument.

Owns: the time limit of a pod, and that half a gang does not hold what another job waits for (see
gang.py for the order). Must not: delete anything; the backend does.

Pods that have trained are never given back: their memory holds steps that no storage has. A job
that lost a node and cannot shrink keeps the others for as long as its replacement takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from holdfast.orchestrator.kube.client import Document

from . import pod_conditions
from .gang_arbiter import HOLD_S, PATIENCE_S, GangArbiter, GangPriority


@dataclass
class StartupDecision:
    """What to do now."""

    give_back: dict[str, str] = field(default_factory=dict)
    """Pod -> why, in words."""
    hold_off: str = ""
    """Ask for no new ones for a while, and why; empty: nothing against it."""
    due_s: float | None = None
    """Look again then, even if nothing changes."""


class StartupTimeouts:
    """Of one job."""

    def __init__(self, rank: GangPriority, needed: int, limit_s: float, gangs: GangArbiter) -> None:
        self._rank, self._limit_s, self._gangs = rank, limit_s, gangs
        self.needed = needed
        """Pods without which the job cannot train; its spec may change it."""
        self.troubled: dict[str, float] = {}
        """Pod that does not start -> since when."""
        self._incomplete_since: float | None = None

    def look(
        self, now_s: float, pods: Mapping[str, Document], trained: Set[str] = frozenset()
    ) -> StartupDecision:
        """`pods`: those that are neither over nor given back; `trained`: pods of the job that have
        finished a step, and may be over since."""
        troubled = {}
        for name, pod in pods.items():
            found = pod_conditions.trouble(pod)
            # Behind a gate it holds no room, and how long its queue takes is the queue's business.
            if found is not None and found.code != pod_conditions.GATED:
                troubled[name] = self.troubled.get(name, now_s)
        self.troubled = troubled
        decision = self._gang(now_s, pods, trained)
        if decision.give_back:
            return decision
        late = [name for name, since in troubled.items() if now_s - since >= self._limit_s]
        for name in late:
            decision.give_back[name] = pod_conditions.not_started(pods[name], self._limit_s)
            decision.hold_off = f"{name}: {decision.give_back[name]}"
            del troubled[name]
        due = [since + self._limit_s for since in troubled.values()]
        if decision.due_s is not None:
            due.append(decision.due_s)
        decision.due_s = min(due, default=None)
        return decision

    def blocked_by(self) -> str:
        """A job that comes first and has not enough either; asking for room now would only take it
        away from there."""
        return self._gangs.ahead_of(self._rank)

    def leave(self) -> None:
        """The job asks for nothing any more."""
        self._incomplete_since = None
        self._gangs.leave(self._rank.key)

    def _gang(
        self, now_s: float, pods: Mapping[str, Document], trained: Set[str]
    ) -> StartupDecision:
        placed = [name for name, pod in pods.items() if pod_conditions.place(pod)]
        stuck = [name for name in self.troubled if name not in placed]
        new = {name: pod for name, pod in pods.items() if name not in trained}
        to_free = any(name in new for name in placed)
        if not stuck or not placed or len(placed) >= self.needed:
            self.leave()
            return StartupDecision()
        if self._incomplete_since is None:
            self._incomplete_since = now_s
        if not to_free:
            # Its replacement comes before younger jobs, but not for ever: it may be impossible.
            until_s = self._incomplete_since + HOLD_S
            if now_s < until_s:
                self._gangs.enter(self._rank)
                return StartupDecision(due_s=until_s)
            self._gangs.leave(self._rank.key)
            return StartupDecision()
        self._gangs.enter(self._rank)
        ahead = self._gangs.ahead_of(self._rank)
        until_s = self._incomplete_since + (PATIENCE_S if ahead else HOLD_S)
        if now_s < until_s:
            # Somebody may come to be ahead meanwhile.
            return StartupDecision(due_s=min(now_s + PATIENCE_S / 2, until_s))
        whom = f"to job {ahead}, which came first" if ahead else "to whoever else needs it"
        whose = (
            "their room" if new.keys() == pods.keys() else "the room of those that never trained"
        )
        text = (
            f"{len(placed)} of the {self.needed} nodes that are needed at least have a place; "
            f"{whose} is given back {whom}"
        )
        self.leave()
        self.troubled = {}
        return StartupDecision(dict.fromkeys(new, text), text)
