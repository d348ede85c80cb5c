"""Stacks of many ranks: equal ones share an entry, and an answer has a largest size."""

from __future__ import annotations

from holdfast.orchestrator.protocol.facts import GroupProgress
from holdfast.orchestrator.protocol.rank_stacks import (
    CollectiveSpan,
    RankStacks,
    fold,
    rank_list,
    spans_of,
    within,
)


def waits(rank: int, sequence: int, *, done: bool = False) -> RankStacks:
    group = GroupProgress("0", "default_pg", sequence, "nccl:all_reduce", done)
    return RankStacks((rank,), ("wait (c10d.py:1)",), "peers", collectives=spans_of([group]))


def test_ranks_at_the_same_place_share_an_entry_and_the_largest_comes_first() -> None:
    late = RankStacks((5,), ("read (data.py:9)",), "reads")
    stopped = RankStacks((6,), ("wait (c10d.py:1)",), "peers", state="stopped")
    found = fold([late, waits(2, 7), waits(0, 8, done=True), stopped, waits(1, 7)])
    assert [entry.ranks for entry in found] == [(0, 1, 2), (5,), (6,)]
    span = CollectiveSpan("default_pg", "nccl:all_reduce", 7, 8, num_done=1, num_ranks=3)
    assert found[0].collectives == (span,)
    assert fold(fold([waits(0, 7), waits(1, 7)])) == fold([waits(1, 7), waits(0, 7)])


def test_the_entries_of_4096_equal_ranks_are_one() -> None:
    nodes = [
        fold(waits(rank, 3) for rank in range(first, first + 8)) for first in range(0, 4096, 8)
    ]
    (entry,) = fold(entry for node in nodes for entry in node)
    assert rank_list(entry.ranks) == "ranks 0-4095"
    assert entry.collectives[0].num_ranks == 4096


def test_an_answer_has_a_largest_size() -> None:
    entries = [RankStacks((rank,), ("x" * 1000,)) for rank in range(10)]
    kept, left_out = within(entries, 3500)
    assert (len(kept), left_out) == (3, 7)
    assert within(entries, 10**6) == (entries, 0)


def test_ranks_as_text() -> None:
    assert rank_list((7,)) == "rank 7"
    assert rank_list((0, 1, 2, 5, 7, 8)) == "ranks 0-2, 5, 7-8"
