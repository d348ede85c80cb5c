"""Which rank a hang is suspected of, by its heartbeats and its last inspection. Pure functions."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from ..protocol.facts import SuspectBasis, WorkerBeat, counting
from .context import SECOND_NS
from .hang_limits import PULSE_STALE_S, InspectedStack, describe
from .rank_progress import RankProgress


@dataclass(frozen=True, slots=True)
class Suspects:
    """Live ranks, the likeliest culprit first."""

    ranks: tuple[int, ...]
    why: str
    """Of the first one."""
    basis: SuspectBasis
    """What distinguishes the first one."""

    @staticmethod
    def find(
        now_ns: int,
        world_size: int,
        exits: Container[int],
        known: Mapping[int, RankProgress],
        inspected: Mapping[int, InspectedStack],
    ) -> Suspects:
        """`exits`: ranks that have ended; `known`: those that have sent heartbeats."""
        live = {
            rank: one for rank, one in known.items() if rank not in exits and not one.beat.leaves
        }
        silent = [r for r in range(world_size) if r not in known and r not in exits]
        reporting = {beat.rank for beat in counting(one.beat for one in live.values())}
        done = max((one.beat.step for one in live.values()), default=-1)
        found = sorted(
            (_order(now_ns, one, rank in reporting, done, _waits(inspected.get(rank))), rank)
            for rank, one in live.items()
        )
        ranks = (*silent, *(rank for _order, rank in found))
        beats = [known[rank].beat for rank in ranks if rank in known]
        if not ranks:
            return Suspects((), "no rank has reported", "none")
        if ranks[0] not in known:
            return Suspects(ranks, f"rank {ranks[0]} has never reported", "unreported")
        first = known[ranks[0]]
        why = _why(now_ns, first, ranks[0] in reporting)
        shown = describe(ranks[0], first.beat, inspected.get(ranks[0]))
        reporting_beats = [beat for beat in beats if beat.rank in reporting]
        return Suspects(
            ranks, f"{why}; {shown}" if shown else why, _basis(first.beat, beats, reporting_beats)
        )


def _order(
    now_ns: int, one: RankProgress, reports: bool, done: int, waits: int
) -> tuple[bool, bool, int, int, int, float]:
    """At one step the slowest rank comes first: the others wait for it. A rank that reports no
    steps is as far as those that do."""
    beat, age_s = one.beat, (now_ns - one.moved_ns) / SECOND_NS
    moved = (beat.step, beat.ticks, age_s) if _counts(beat, reports) else (done, 0, 0.0)
    return (not beat.stopped, beat.pulse_age_s <= PULSE_STALE_S, waits, *moved)


def _why(now_ns: int, one: RankProgress, reports: bool) -> str:
    beat, age_s = one.beat, (now_ns - one.moved_ns) / SECOND_NS
    if beat.collectives and not _counts(beat, reports):
        age_s = beat.collectives_age_s  # its only progress
    if beat.stopped:
        return f"rank {beat.rank} is stopped (state T), last progress {age_s:.1f} s ago"
    if beat.pulse_age_s > PULSE_STALE_S:
        return f"rank {beat.rank} has not shown a pulse for {beat.pulse_age_s:.1f} s"
    if beat.collectives and not _counts(beat, reports):
        return f"rank {beat.rank} has begun no collective for {age_s:.1f} s"
    return f"rank {beat.rank} is at step {beat.step} (phase {beat.phase}), {age_s:.1f} s ago"


def _counts(beat: WorkerBeat, reports: bool) -> bool:
    """Steps, or what comes before the first one, show the progress of the rank."""
    return reports and not beat.silent


def _waits(known: InspectedStack | None) -> int:
    """How surely a rank waits for its peers, as of its inspection: from 0 (it does not)."""
    activity = known.stack.activity if known is not None else ""
    return {"nothing": 0, "reads": 1, "compiles": 1, "peers": 3, "device": 3}.get(activity, 2)


def _basis(first: WorkerBeat, beats: list[WorkerBeat], reporting: list[WorkerBeat]) -> SuspectBasis:
    """A later report alone is chance: a few milliseconds of one step. `reporting`: of the ranks
    that report steps."""
    if first.stopped:
        return "stopped"
    if first.pulse_age_s > PULSE_STALE_S:
        fresh = any(beat.pulse_age_s <= PULSE_STALE_S for beat in beats)
        return "no-pulse" if fresh or len(beats) == 1 else "none"
    behind = first in reporting and first.step < max(beat.step for beat in reporting)
    return "behind" if behind or len(beats) == 1 else "none"
