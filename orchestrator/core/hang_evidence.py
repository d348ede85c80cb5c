"""Which rank is the cause of a hang, from stacks and from torch's flight recorder. Pure functions.

Every rank of a job waits for its peers sooner or later. The cause is the rank that does not: it has
not begun a collective that its peers wait in, or its main thread is in no collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..protocol.facts import GroupProgress, Stack, SuspectBasis

MAX_NAMED = 4
"""Ranks that a sentence names."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """`rank` None: the evidence points at no single rank."""

    rank: int | None
    why: str = ""


def culprit(suspects: tuple[int, ...], basis: SuspectBasis, stacks: Iterable[Stack]) -> Culprit:
    """Of ranks that are alive. `suspects`: the likeliest first, by heartbeats; `basis`: what
    the heartbeats show of the first one."""
    first = suspects[0] if suspects else None
    if basis in ("stopped", "no-pulse", "unreported", ""):
        # Empty: a journal from before the basis was recorded.
        return Culprit(first)
    known = {stack.rank: stack for stack in stacks}
    order = {rank: index for index, rank in enumerate(suspects)}
    absent = _absent(known)
    if absent:
        return _named(absent, order, "the flight recorder")
    outside = [rank for rank, stack in known.items() if stack.activity == "nothing"]
    outside += [rank for rank, stack in known.items() if stack.activity in ("reads", "compiles")]
    if outside and any(stack.in_collective for stack in known.values()):
        shows = {
            rank: f"the main thread of rank {rank} is in no collective, unlike its peers"
            for rank in outside
        }
        return _named(shows, order, "the stacks")
    return Culprit(first if basis == "behind" else None)


def _named(found: dict[int, str], order: dict[int, int], source: str) -> Culprit:
    ranks = sorted(found, key=lambda rank: (order.get(rank, len(order)), rank))
    why = f"{source}: {found[ranks[0]]}"
    if len(ranks) > 1:
        more = ", ".join(map(str, ranks[1:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")
        why += f"; the same holds for rank {more}"
    return Culprit(ranks[0], why)


def _absent(stacks: dict[int, Stack]) -> dict[int, str]:
    """Ranks that have not begun a collective that others wait in, and wait in none themselves."""
    groups: dict[str, dict[int, GroupProgress]] = {}
    for rank, stack in stacks.items():
        for group in stack.groups:
            groups.setdefault(group.group, {})[rank] = group
    waiting: dict[int, None] = {}
    missing: dict[int, str] = {}
    for members in groups.values():
        newest = max(members.values(), key=lambda one: one.sequence)
        late = [rank for rank, one in members.items() if one.sequence < newest.sequence]
        if newest.done or not late:
            continue
        waiting |= dict.fromkeys(
            rank for rank, one in members.items() if one.sequence == newest.sequence
        )
        for rank in late:
            missing[rank] = (
                f"rank {rank} has not begun {newest.operation} number {newest.sequence} of group "
                f"{newest.label or newest.group}, which {len(members) - len(late)} of its "
                f"{len(members)} ranks wait in"
            )
    return {rank: why for rank, why in missing.items() if rank not in waiting}
