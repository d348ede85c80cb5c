"""Reports of a thousand ranks about one failure fit into a journal."""

from __future__ import annotations

from holdfast.orchestrator.protocol.facts import Exit, Stack
from holdfast.orchestrator.runtime import evidence_budget
from holdfast.orchestrator.runtime.evidence_budget import EvidenceBudget

KB = 1024


def test_all_stacks_of_a_small_job_are_kept() -> None:
    stacks = [Stack(rank, "x" * 20 * KB, in_collective=rank > 0) for rank in range(6)]
    assert EvidenceBudget().stacks(1, stacks) == tuple(stacks)


def test_a_few_stacks_of_waiting_ranks_are_kept_and_all_ranks_are_named() -> None:
    room = EvidenceBudget()
    kept = [
        stack
        for node in range(1000)
        for stack in room.stacks(1, [Stack(node, "x" * 20 * KB, in_collective=True)])
    ]
    assert [stack.rank for stack in kept] == list(range(1000))
    assert all(stack.in_collective for stack in kept)
    assert sum(len(stack.text) for stack in kept) < 2 * evidence_budget.WAITING_STACK_BYTES
    (culprit,) = room.stacks(1, [Stack(1000, "y" * 20 * KB, in_collective=False)])
    assert culprit.text == "y" * 20 * KB, "it has a room of its own"


def test_the_first_tracebacks_are_whole_and_the_others_keep_their_last_frame() -> None:
    room = EvidenceBudget()
    traceback = "Traceback\n" + "frame\n" * 2000 + "last frame\nValueError: x"
    ends = [
        room.exit(1, Exit(rank=rank, code=1, error_type="ValueError", traceback=traceback))
        for rank in range(1000)
    ]
    assert ends[0].traceback == traceback
    assert ends[-1].traceback.endswith("last frame\nValueError: x")
    assert ends[-1].error_type == "ValueError"
    total = sum(len(one.traceback) for one in ends)
    assert total < evidence_budget.TRACEBACK_BYTES + 1000 * (
        evidence_budget.TRACEBACK_TAIL_BYTES + 3
    )


def test_the_bound_holds_for_each_generation() -> None:
    room = EvidenceBudget()
    for generation in (1, 2):
        first, *_rest = room.stacks(
            generation, [Stack(rank, "x" * 100 * KB, in_collective=True) for rank in range(3)]
        )
        assert len(first.text) == 100 * KB
