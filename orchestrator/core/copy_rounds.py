"""The rounds of the buddy tier: which step all agents copy to their buddies next.

The copies of a step are of use only together, so all agents copy the same step, and the last step
that all of them have copied is kept everywhere until the next one is complete. A round lasts as
long as its slowest push: this is what chooses every how many steps a copy is made.

Not journaled: it decides nothing but what is copied. A new controller begins with the reports that
agents send again, and the agents keep what was confirmed before. Pure, like the monitor.
"""

from __future__ import annotations

import math

from ..protocol.facts import state_after
from ..protocol.messages import CopyStep, NodeRemarked, StepCopied
from .actions import ToNode
from .context import SECOND_NS
from .events import FromNode
from .state import JobState

MIN_ROUND_S = 0.1
"""Rounds of jobs with short steps begin so far apart at least: each costs a message per node."""
RETRY_S = 1.0
"""A push that failed is tried again with a step about this much later."""
LATE_S = 10.0
"""Time without a copied step after which a failure becomes an event, not only the status."""
MAX_MARGIN = 64
STEADY_ROUNDS = 32
"""Rounds in a row that were not missed, after which the margin is halved."""


class CopyScheduler:
    """The copy rounds of one controller. It reads the controller's state and changes nothing."""

    def __init__(self) -> None:
        self._generation = 0
        self._wanted = self.confirmed = -1
        self._margin = self._steady = 0
        """Steps that an order names beyond the next one: it grows when orders come too late."""
        self._began_ns = 0
        self._reports: dict[str, StepCopied] = {}
        """Node -> its last report."""
        self._copied: set[str] = set()
        """Nodes that have copied the step of this round. Reports come from each node in each
        round, so one must not look at those of all others."""
        self.status = ""
        """Sentence on how often all buddies get a copy, and why."""
        self._copied_ns = 0
        """Time at which all nodes last had copied a step, or the generation began."""
        self._reported = False
        self._remarks: list[FromNode] = []

    def observe(self, now_ns: int, node: str, fact: StepCopied, state: JobState) -> list[ToNode]:
        """A node's report; returns what is to be copied next, once that is known."""
        runs = state.runs and not state.given_up.copies and state.is_member(node)
        if not runs or fact.generation != state.generation:
            return []
        self._follow(now_ns, state)
        self._reports[node] = fact
        if fact.wanted < self._wanted:  # it has missed an order
            return [self._order(node)]
        if fact.wanted > self._wanted:  # of the controller before this one
            self._wanted, self._began_ns = fact.wanted, now_ns
            self._copied = set() if fact.detail else {node}
            behind = [n for n, report in self._reports.items() if report.wanted < fact.wanted]
            return [self._order(name) for name in behind]
        if fact.detail:
            return self._again(now_ns, node, fact, state)
        self._copied.add(node)
        return [] if len(self._copied) < len(state.group.members) else self._complete(now_ns, state)

    def take_remarks(self) -> list[FromNode]:
        """Events since the last call: no step is copied any more, or one is again."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def _follow(self, now_ns: int, state: JobState) -> None:
        if self._generation == state.generation:
            return
        assert state.group.membership is not None
        restore = state.group.membership.restore
        self._generation, self._reports, self._began_ns = state.generation, {}, now_ns
        self._copied, self._copied_ns = set(), now_ns
        # Agents begin with the first step that they stage.
        self._wanted, self.confirmed = (restore.step if restore else -1) + 1, -1
        self.status = ""

    def _again(self, now_ns: int, node: str, fact: StepCopied, state: JobState) -> list[ToNode]:
        """The step was missed, or a push has failed: another one, for all nodes."""
        self._steady = 0
        late_s = (now_ns - self._copied_ns) / SECOND_NS
        if late_s >= LATE_S and not self._reported:
            self._reported = True
            last = f"; the last is {state_after(self.confirmed)}" if self.confirmed >= 0 else ""
            text = (
                f"could not copy {state_after(fact.step)} to its buddy ({fact.detail}): no copy "
                f"of all nodes for {late_s:.0f} s{last}. Losing a node costs all steps since"
            )
            self._remarks.append(FromNode(node, NodeRemarked(text=text)))
        if fact.missed:
            self._margin = min(2 * self._margin + 1, MAX_MARGIN)
            return self._begin(now_ns, state, 0.0)
        self.status = f"{node} could not copy {state_after(fact.step)}: {fact.detail}"
        return self._begin(now_ns, state, RETRY_S)

    def _complete(self, now_ns: int, state: JobState) -> list[ToNode]:
        reports = [self._reports[name] for name in state.group.members]
        if len({report.step for report in reports}) > 1:
            return self._begin(now_ns, state, 0.0)
        before, self.confirmed = self.confirmed, reports[0].step
        self._copied_ns = now_ns
        if self._reported:
            self._reported = False
            text = f"all nodes copy to their buddies again: {state_after(self.confirmed)}"
            self._remarks.append(FromNode(state.group.members[0], NodeRemarked(text=text)))
        self._describe(state.group.members, before)
        self._steady += 1
        if self._steady >= STEADY_ROUNDS:
            self._steady, self._margin = 0, self._margin // 2
        return self._begin(now_ns, state, MIN_ROUND_S - (now_ns - self._began_ns) / SECOND_NS)

    def _describe(self, members: tuple[str, ...], before: int) -> None:
        slowest = max(members, key=lambda node: self._reports[node].seconds)
        steps = self.confirmed - before
        often = f"every {steps} steps" if steps > 1 else "every step"
        self.status = (
            f"{often if before >= 0 else 'the first step'}: the slowest push takes "
            f"{self._reports[slowest].seconds:.2g} s ({slowest})"
        )

    def _begin(self, now_ns: int, state: JobState, pause_s: float) -> list[ToNode]:
        pause = math.ceil(pause_s / state.step_s) if pause_s > 0 and state.step_s > 0 else 0
        newest = max(report.staged_step for report in self._reports.values())
        self._wanted = max(newest, self._wanted) + 1 + max(pause - 1, 0) + self._margin
        self._began_ns, self._copied = now_ns, set()
        return [self._order(name) for name in state.group.members]

    def _order(self, node: str) -> ToNode:
        return ToNode(
            node,
            CopyStep(generation=self._generation, step=self._wanted, confirmed=self.confirmed),
        )
