"""Ranks that compute longer than their peers in every step. Pure.

All ranks of a job have the same step time, because they wait for each other in collectives. What
differs is the time outside: each worker reports the median over its last steps of the CPU time of
its training thread, or on a GPU the time that matrix products of one size take there.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median

from .. import limits

MAD_TO_DEVIATION = 1.4826
"""Factor of a normal distribution."""
MANY_NODES = 8


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
    """Finds stragglers of one generation."""

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
        lag: dict[int, Slow] = {}
        for group in alike.values():
            lag |= slow_ranks(group, node_of)
        lag = {rank: slow for rank, slow in lag.items() if node_of.get(rank) not in contended}
        self.since = {rank: self.since.get(rank, step) for rank in lag}
        new = [
            slow
            for rank, slow in lag.items()
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
    slow_of: dict[int, Slow] = {}
    common = _limit(list(work_s.values())) if len(ranks) >= MANY_NODES else None
    for own in ranks.values():
        limit = common
        if limit is None and len(ranks) > 1:
            here = dict.fromkeys(own)
            limit = _limit([work_s[rank] for rank in work_s if rank not in here])
        for rank in own:
            others = [work_s[other] for other in own if other != rank]
            usual_s, limit_s = limit or _limit(others)
            if work_s[rank] > limit_s:
                slow_of[rank] = Slow(rank, work_s[rank], usual_s)
    return slow_of


def _limit(others_s: list[float]) -> tuple[float, float]:
    """(the median of these, the time from which a rank is slow)."""
    usual_s = median(others_s)
    if len(others_s) < limits.STRAGGLER_MIN_RANKS:
        return usual_s, usual_s * (1 + limits.STRAGGLER_SHARE_FEW)
    spread_s = median(abs(value - usual_s) for value in others_s)
    margin_s = limits.STRAGGLER_DEVIATIONS * MAD_TO_DEVIATION * spread_s
    return usual_s, usual_s + max(limits.STRAGGLER_SHARE * usual_s, margin_s)
