"""Stacks of ranks, for people who ask: ranks with an equal stack share one entry.

Agents fold the ranks of their node, and the controller all ranks, with the same function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .facts import GroupProgress, StackActivity


class CollectiveSpan(msgspec.Struct, frozen=True):
    """The newest collective of some ranks in one process group, from torch's flight recorder."""

    group: str
    """Group's label, or its name if it has none."""
    operation: str
    first: int
    """The lowest number of it among the ranks, from 1."""
    last: int
    num_done: int
    """Ranks on which it is complete."""
    num_ranks: int


class RankStacks(msgspec.Struct, frozen=True):
    """Ranks whose main threads are at the same place."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...] = ()
    """`function (file:line)`, innermost first."""
    activity: StackActivity = ""
    state: str = ""
    """State of the processes: stopped, blocked in the kernel, or ended; empty: none of these."""
    problem: str = ""
    """Reason why there are no frames; empty: there are."""
    collectives: tuple[CollectiveSpan, ...] = ()


def fold(entries: Iterable[RankStacks]) -> list[RankStacks]:
    """One entry for each distinct stack; the most common first."""
    alike: dict[tuple[object, ...], list[RankStacks]] = {}
    for entry in entries:
        key = (entry.frames, entry.activity, entry.state, entry.problem)
        alike.setdefault(key, []).append(entry)
    return sorted(map(_merged, alike.values()), key=lambda one: (-len(one.ranks), one.ranks))


def _merged(entries: Sequence[RankStacks]) -> RankStacks:
    spans: dict[tuple[str, str], CollectiveSpan] = {}
    for span in (span for entry in entries for span in entry.collectives):
        key = (span.group, span.operation)
        earlier = spans.get(key)
        spans[key] = span if earlier is None else CollectiveSpan(
            *key,
            first=min(earlier.first, span.first),
            last=max(earlier.last, span.last),
            num_done=earlier.num_done + span.num_done,
            num_ranks=earlier.num_ranks + span.num_ranks,
        )  # fmt: skip
    ranks = tuple(sorted(rank for entry in entries for rank in entry.ranks))
    return msgspec.structs.replace(entries[0], ranks=ranks, collectives=tuple(spans.values()))


def spans_of(groups: Iterable[GroupProgress]) -> tuple[CollectiveSpan, ...]:
    """Spans of one rank."""
    return tuple(
        CollectiveSpan(
            group=group.label or group.group,
            operation=group.operation,
            first=group.sequence,
            last=group.sequence,
            num_done=int(group.done),
            num_ranks=1,
        )
        for group in groups
    )


def within(entries: Sequence[RankStacks], max_bytes: int) -> tuple[list[RankStacks], int]:
    """The first entries whose frames fit into so many bytes, and how many ranks are left out."""
    kept: list[RankStacks] = []
    for entry in entries:
        max_bytes -= len(msgspec.json.encode(entry))
        if max_bytes < 0:
            break
        kept.append(entry)
    return kept, sum(len(entry.ranks) for entry in entries[len(kept) :])


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 7`, `ranks 0-6, 9`; `ranks` is sorted."""
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    texts = [f"{first}-{last}" if last > first else f"{first}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
