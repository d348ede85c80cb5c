"""Ranks that cause a hang, by heartbeats, stacks and torch's flight recorder. Pure.

Every rank of a job waits for its peers sooner or later. The cause is the rank that does not: it is
stopped or blocked, it has not begun a collective that its peers wait in, or its main thread is in
no collective.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from ... import limits
from ...protocol.facts import GroupProgress, Stack, SuspectBasis, WorkerBeat, counting, steps_done
from ..context import SECOND_NS
from .facts import PULSE_STALE_S, InspectedStack, RankProgress

MAX_NAMED = 4
"""Ranks that a sentence names."""
WORDS: dict[str, str] = {
    "peers": "waits for its peers in a collective",
    "device": "waits for its device",
    "staging": "waits for the copy of its state",
    "engine": "is in the backward pass",
    "reads": "reads",
    "compiles": "compiles",
    "nothing": "is in no collective",
}
WAITS = {"nothing": 0, "reads": 1, "compiles": 1, "peers": 3, "device": 3}
"""Certainty that a rank waits for its peers, by its stack; 2: not known."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Live ranks, the likeliest culprit first."""

    ranks: tuple[int, ...]
    why: str
    """Facts about the first one."""
    basis: SuspectBasis
    """Difference between the first one and the others."""


def find(
    now_ns: int,
    world_size: int,
    exits: Container[int],
    known: Mapping[int, RankProgress],
    inspected: Mapping[int, InspectedStack],
) -> Suspects:
    """`exits`: ranks that have ended; `known`: ranks that have sent heartbeats."""
    live = {r: w for r, w in known.items() if r not in exits and not w.beat.leaves}
    beats = {rank: w.beat for rank, w in live.items()}
    done = max((beat.step for beat in beats.values()), default=-1)
    reporting = {beat.rank: beat.step for beat in counting(beats.values())}

    def order(rank: int) -> tuple[bool, bool, int, int, int, int]:
        """A rank that reports no steps is as far as the ranks that do."""
        beat, stack = beats[rank], inspected.get(rank)
        waits = WAITS.get(stack.stack.activity, 2) if stack is not None else 2
        moved = (beat.step, beat.ticks) if rank in reporting and not beat.silent else (done, 0)
        return (not beat.stopped, beat.pulse_age_s <= PULSE_STALE_S, waits, *moved, rank)

    silent = [rank for rank in range(world_size) if rank not in known and rank not in exits]
    ranks = (*silent, *sorted(live, key=order))
    if silent:
        return Suspects(ranks, f"rank {ranks[0]} has never reported", "unreported")
    if not ranks:
        return Suspects((), "no rank has reported", "none")
    rank, first = ranks[0], beats[ranks[0]]
    age_s = (now_ns - live[rank].moved_ns) / SECOND_NS
    basis: SuspectBasis = "none"
    if first.stopped:
        why, basis = f"rank {rank} is stopped (state T), last progress {age_s:.1f} s ago", "stopped"
    elif first.pulse_age_s > PULSE_STALE_S:
        why = f"rank {rank} has not shown a pulse for {first.pulse_age_s:.1f} s"
        fresh = any(beat.pulse_age_s <= PULSE_STALE_S for beat in beats.values())
        basis = "no-pulse" if fresh or len(live) == 1 else "none"
    else:
        reached = f"rank {rank} has finished {steps_done(first.step)}"
        why = f"{reached} (phase {first.phase}), {age_s:.1f} s ago"
        if first.collectives and (first.silent or rank not in reporting):
            why = f"rank {rank} has begun no collective for {age_s:.1f} s"
        behind = rank in reporting and first.step < max(reporting.values())
        basis = "behind" if behind or len(live) == 1 else "none"
    shown = describe(rank, first, inspected.get(rank))
    return Suspects(ranks, f"{why}; {shown}" if shown else why, basis)


def describe(rank: int, beat: WorkerBeat | None, known: InspectedStack | None) -> str:
    """`rank 3 is in no collective, at File "train.py", line 88 in load; it uses no CPU`."""
    if known is None or not known.stack.activity:
        return ""
    text = f"rank {rank} {WORDS[known.stack.activity]}"
    frame = next((line.strip() for line in known.stack.text.splitlines() if "line" in line), "")
    text += f" at {frame}" if frame else ""
    if beat is not None and beat.idle_s >= limits.IDLE_S:
        text += f"; it has used no CPU and done no I/O for {beat.idle_s:.1f} s"
    return text


def culprit(
    suspects: tuple[int, ...], basis: SuspectBasis, stacks: Iterable[Stack]
) -> tuple[int | None, str]:
    """(rank, why) of the cause among live ranks; None: the evidence points at no single rank.
    `suspects`: the likeliest first; `basis`: what heartbeats show of the first one."""
    first = suspects[0] if suspects else None
    if basis in ("stopped", "no-pulse", "unreported", ""):
        return first, ""
    stack_of = {stack.rank: stack for stack in stacks}
    absent, source = _absent(stack_of), "the flight recorder"
    if not absent and any(stack.in_collective for stack in stack_of.values()):
        source = "the stacks"
        absent = {
            rank: f"the main thread of rank {rank} is in no collective, unlike its peers"
            for rank, stack in stack_of.items()
            if stack.activity in ("nothing", "reads", "compiles")
        }
    if not absent:
        return (first if basis == "behind" else None), ""
    order = {rank: index for index, rank in enumerate(suspects)}
    ranks = sorted(absent, key=lambda rank: (order.get(rank, len(order)), rank))
    why = f"{source}: {absent[ranks[0]]}"
    if len(ranks) > 1:
        more = ", ".join(map(str, ranks[1:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")
        why += f"; the same holds for rank {more}"
    return ranks[0], why


def _absent(stacks: Mapping[int, Stack]) -> dict[int, str]:
    """Ranks that have not begun a collective that others wait in, and wait in none themselves."""
    groups: dict[str, dict[int, GroupProgress]] = {}
    for rank, stack in stacks.items():
        for group in stack.groups:
            groups.setdefault(group.group, {})[rank] = group
    waiting: dict[int, None] = {}
    missing: dict[int, str] = {}
    for members in groups.values():
        newest = max(members.values(), key=lambda member: member.sequence)
        late = [rank for rank, member in members.items() if member.sequence < newest.sequence]
        if newest.done or not late:
            continue
        waiting |= dict.fromkeys(rank for rank in members if rank not in late)
        text = (
            f"has not begun {newest.operation} number {newest.sequence} of group "
            f"{newest.label or newest.group}, which {len(members) - len(late)} of its "
            f"{len(members)} ranks wait in"
        )
        missing |= {rank: f"rank {rank} {text}" for rank in late}
    return {rank: why for rank, why in missing.items() if rank not in waiting}
