"""Suspects of a hang by heartbeats, and the sentence about them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.hang.facts import PULSE_STALE_S, InspectedStack
from holdfast.orchestrator.core.hang.suspects import describe, find
from holdfast.orchestrator.protocol.facts import Stack, SuspectBasis, WorkerBeat

from .moments import BEGUN, NOW, READS, WAITS, ranks

STALE = {"pulse_age_s": PULSE_STALE_S + 0.1}
JUST_FRESH = {"pulse_age_s": PULSE_STALE_S}
STOPPED = {"stopped": True}
SILENT = {"step": -1, "ticks": 0, "phase": "start", **BEGUN}
REPORTS = {"counted_by": "script"}
AT_9 = "rank 0 has finished 10 steps (phase train), 9.0 s ago"

CASES: list[tuple[str, SuspectBasis, str, list[dict[str, Any]]]] = [
    # (ranks in order, basis, why, heartbeats)
    ("0123", "none", AT_9, [{}]),
    ("1023", "none", "rank 1 has finished 10 steps", [{"ticks": 21}, {}, {"ticks": 22}]),
    ("3012", "behind", "rank 3 has finished 9 steps", [{}, {}, {}, {"step": 8}]),
    ("3120", "none", AT_9.replace("0", "3", 1) + "; rank 3 is in no collective",
     [WAITS, READS, {"activity": ""}, {"activity": "nothing"}]),
    ("2013", "no-pulse", "rank 2 has not shown a pulse for 1.6 s", [JUST_FRESH, {}, STALE, {}]),
    ("0123", "none", AT_9, [JUST_FRESH]),
    ("0123", "none", "rank 0 has not shown a pulse for 1.6 s", [STALE]),
    ("0123", "no-pulse", "rank 0 has not shown a pulse for 1.6 s",
     [STALE, STALE, STALE, JUST_FRESH]),
    ("1302", "stopped", "rank 1 is stopped (state T), last progress 9.0 s ago",
     [{}, STOPPED, {}, STALE]),
    ("2103", "unreported", "rank 2 has never reported", [{}, STOPPED, {"never": True}, {}]),
    ("0123", "none", "rank 0 has begun no collective for 9.0 s", [SILENT]),
    ("0123", "none", "rank 0 has finished 0 steps (phase start), 9.0 s ago",
     [SILENT | {"collectives": 0}]),
    # A rank that reports no steps is as far as the ranks that do.
    ("1230", "none", "rank 1 has begun no collective for 9.0 s", [REPORTS, SILENT]),
    ("0123", "none", "rank 0 has finished 10 steps", [REPORTS | BEGUN | {"ticks": 0}, SILENT]),
    ("0123", "behind", "rank 0 has begun no collective", [SILENT | {"ticks": 5}, SILENT, {}]),
]  # fmt: skip


@pytest.mark.parametrize(("order", "basis", "why", "given"), CASES)
def test_the_likeliest_rank_comes_first(
    order: str, basis: SuspectBasis, why: str, given: list[dict[str, Any]]
) -> None:
    known, stacks = ranks(*given)
    suspects = find(NOW, 4, (), known, stacks)
    assert suspects.ranks == tuple(map(int, order))
    assert suspects.basis == basis
    assert suspects.why.startswith(why)


def test_ranks_that_have_ended_are_not_suspected_and_a_single_rank_is_the_cause() -> None:
    known, stacks = ranks({"leaves": True}, {})
    assert find(NOW, 4, (1,), known, stacks).ranks == (2, 3)
    assert find(NOW, 4, (1, 2), known, stacks).basis == "behind"
    known, stacks = ranks(STALE)
    assert find(NOW, 4, (0, 1, 2), known, stacks).basis == "no-pulse"
    assert find(NOW, 10, range(9), {}, {}).why == "rank 9 has never reported"
    nothing = find(NOW, 0, (), {}, {})
    assert (nothing.ranks, nothing.why, nothing.basis) == ((), "no rank has reported", "none")


def test_a_rank_is_described_with_its_frame_and_its_idle_time_where_they_are_known() -> None:
    def stack(activity: Any, text: str = "") -> InspectedStack:
        return InspectedStack(Stack(2, text, False, "S", activity), 0)

    def idle(idle_s: float) -> WorkerBeat:
        return WorkerBeat(rank=2, idle_s=idle_s)

    reads = stack("reads", 'Thread 1:\n  File "data.py", line 8 in load\n')
    text = 'rank 2 reads at File "data.py", line 8 in load'
    waited = f"; it has used no CPU and done no I/O for {limits.IDLE_S:.1f} s"
    assert describe(2, idle(limits.IDLE_S - 0.1), reads) == text
    assert describe(2, idle(limits.IDLE_S), reads) == text + waited
    assert describe(2, None, stack("reads")) == "rank 2 reads"
    assert describe(2, None, stack("")) == "" == describe(2, idle(9.0), None)
