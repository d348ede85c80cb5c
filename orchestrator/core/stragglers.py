"""Ranks that compute longer than their peers in every step. Pure.

All ranks of a job have the same step time, because they wait for each other in collectives. What
differs is the time outside: each worker reports the median over its last steps of the CPU time of
its training thread, or on a GPU the time that matrix products of one size take there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median

from .. import limits
from ..protocol.facts import WorkerBeat
from .state import JobState

MAD_TO_DEVIATION = 1.4826
"""Of a normal distribution."""
MANY_NODES = 8
SLOW_NODE_FACTOR = 1.5
SLOW_NODE_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class Slow:
    rank: int
    work_s: float
    usual_s: float
    """The median of the ranks that it was compared with."""

    def evidence(self, *, probed: bool) -> str:
        what = f"rank {self.rank} works {self.work_s * 1e3:.1f} ms a step outside collectives"
        if probed:
            what = (
                f"the GPU of rank {self.rank} takes {self.work_s * 1e3:.2f} ms for the matrix "
                "products that measure its speed"
            )
        return (
            f"{what}, {self.work_s / self.usual_s:.2f} times as long as the other ranks "
            f"({self.usual_s * 1e3:.2f} ms)"
        )


@dataclass(slots=True)
class StragglerFinder:
    """Of one generation."""

    since: dict[int, int] = field(default_factory=dict)
    """Rank -> the step at which it was first slow, without a pause since."""
    named: dict[int, None] = field(default_factory=dict)

    def observe(
        self,
        step: int,
        work_s: Mapping[int, float],
        kinds: Mapping[int, Hashable],
        node_of: Mapping[int, str],
        contended: Collection[str] = (),
    ) -> list[Slow]:
        """Ranks that are slow for the first time. A rank with 0 has not reported enough steps.
        Only ranks of one kind have the same work. No rank of the nodes in `contended` is named: its
        threads share cores with others."""
        alike: dict[Hashable, dict[int, float]] = {}
        for rank, value in work_s.items():
            alike.setdefault(kinds[rank], {})[rank] = value
        found: dict[int, Slow] = {}
        for one in alike.values():
            found |= slow_ranks(one, node_of)
        found = {rank: slow for rank, slow in found.items() if node_of.get(rank) not in contended}
        self.since = {rank: self.since.get(rank, step) for rank in found}
        new = [
            slow
            for rank, slow in found.items()
            if step - self.since[rank] >= limits.STRAGGLER_STEPS and rank not in self.named
        ]
        self.named |= dict.fromkeys(slow.rank for slow in new)
        return new


def slow_ranks(work_s: Mapping[int, float], node_of: Mapping[int, str]) -> dict[int, Slow]:
    """Ranks beyond the limit: a share above the ranks of other nodes, or six deviations of these,
    whichever is more. All ranks of a slow machine are slow. Of many nodes most are not, so the
    median and the deviation of all ranks are theirs."""
    if len(work_s) < 2 or min(work_s.values()) <= 0:
        return {}
    ranks: dict[str, list[int]] = {}
    for rank in work_s:
        ranks.setdefault(node_of.get(rank, ""), []).append(rank)
    found: dict[int, Slow] = {}
    common = _limit(list(work_s.values())) if len(ranks) >= MANY_NODES else None
    for own in ranks.values():
        known = common
        if known is None and len(ranks) > 1:
            here = dict.fromkeys(own)
            known = _limit([work_s[rank] for rank in work_s if rank not in here])
        for rank in own:
            others = [work_s[other] for other in own if other != rank]
            usual_s, limit_s = known or _limit(others)
            if work_s[rank] > limit_s:
                found[rank] = Slow(rank, work_s[rank], usual_s)
    return found


def _limit(others_s: list[float]) -> tuple[float, float]:
    """(the median of these, the time from which a rank is slow)."""
    usual_s = median(others_s)
    if len(others_s) < limits.STRAGGLER_MIN_RANKS:
        return usual_s, usual_s * (1 + limits.STRAGGLER_SHARE_FEW)
    spread_s = median(abs(value - usual_s) for value in others_s)
    margin_s = limits.STRAGGLER_DEVIATIONS * MAD_TO_DEVIATION * spread_s
    return usual_s, usual_s + max(limits.STRAGGLER_SHARE * usual_s, margin_s)


def _median_without(ordered: list[float], value: float) -> float:
    """The median of the others, of which there is one at least."""
    at, half = bisect_left(ordered, value), (len(ordered) - 1) // 2
    low, high = (ordered[i + (i >= at)] for i in (max(0, half - 1), half))
    return (low + high) / 2 if len(ordered) % 2 else high


@dataclass(slots=True)
class SlowNodes:
    """Of one generation whose ranks do not measure their work: by the step times they report."""

    in_a_row: dict[str, int] = field(default_factory=dict)
    """Node -> samples in a row in which it was slow."""
    named: dict[str, None] = field(default_factory=dict)

    def observe(self, step_s: Mapping[str, float]) -> list[tuple[str, str]]:
        """(Node, evidence) of nodes that have been slow for long, each once. `step_s`: of the
        slowest rank of each node."""
        found: list[tuple[str, str]] = []
        ordered = sorted(step_s.values())
        for node, here_s in step_s.items() if len(step_s) > 1 else ():
            others_s = _median_without(ordered, here_s)
            slow = others_s > 0 and here_s > SLOW_NODE_FACTOR * others_s
            self.in_a_row[node] = self.in_a_row.get(node, 0) + 1 if slow else 0
            if self.in_a_row[node] >= SLOW_NODE_SAMPLES and node not in self.named:
                self.named[node] = None
                evidence = (
                    f"{here_s:.2f} s a step, {others_s:.2f} s on the others, in "
                    f"{self.in_a_row[node]} samples in a row"
                )
                found.append((node, evidence))
        return found


@dataclass(slots=True)
class Stragglers:
    """Ranks that work longer than the others, and nodes whose ranks report much longer step times,
    in one generation."""

    finder: StragglerFinder = field(default_factory=StragglerFinder)
    slow_nodes: SlowNodes = field(default_factory=SlowNodes)

    def observe(
        self,
        state: JobState,
        step: int,
        beats: Mapping[int, WorkerBeat],
        contended: Collection[str],
    ) -> list[tuple[str, int, str]]:
        """(node, rank, evidence) of each that is found for the first time; rank -1: all of them."""
        work_s = {rank: beat.work_s for rank, beat in beats.items()}
        probe_s = {rank: beat.probe_s for rank, beat in beats.items()}
        node_of = {rank: state.node_of(rank) for rank in beats}
        if any(probe_s.values()):
            models = {rank: state.gpu_model(node) for rank, node in node_of.items()}
            found = self.finder.observe(step, probe_s, models, node_of)
        elif any(work_s.values()) and state.mesh is not None:
            stages = {rank: state.mesh.coordinates(rank)["pipeline"] for rank in beats}
            found = self.finder.observe(step, work_s, stages, node_of, contended)
        else:
            slowest: dict[str, float] = {}
            for rank, beat in beats.items():
                node = node_of[rank]
                slowest[node] = max(slowest.get(node, 0.0), beat.step_s)
            return [(node, -1, evidence) for node, evidence in self.slow_nodes.observe(slowest)]
        return [
            (node_of[slow.rank], slow.rank, slow.evidence(probed=probe_s[slow.rank] > 0))
            for slow in found
        ]
