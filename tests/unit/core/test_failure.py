"""Failure attribution: every row of the table, and which row wins."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.core.failure import TABLE, attribute
from holdfast.orchestrator.core.failure import FailureEvidence as Evidence
from holdfast.orchestrator.core.hang.suspects import culprit
from holdfast.orchestrator.protocol.facts import Exit, GroupProgress, Stack, SuspectBasis

ERROR = {"error_type": "ValueError", "error_message": "bad"}
RESET = Exit(
    rank=0, code=1, error_type="DistBackendError", error_message="Connection reset by peer"
)
SAID_SECONDARY = Exit(rank=0, code=1, error_type="RuntimeError", secondary=True)


def exits(*ended: Exit) -> tuple[tuple[str, Exit], ...]:
    return tuple((f"node-{exit.rank // 2}", exit) for exit in ended)


CASES = {
    "launch-failed": Evidence(launch_failure=("node-0", "no processes left")),
    "journal-behind": Evidence(journal_behind="nodes run generation 3; the newest is 1"),
    "checkpoint-refused": Evidence(refused="a checksum differs"),
    "preempted": Evidence(lost=(("node-1", "preempted", "spot"),), exits=exits(RESET)),
    "lost-first": Evidence(
        lost=(("node-1", "silent", ""),),
        lost_first=True,
        exits=exits(Exit(rank=0, code=1, **ERROR)),
    ),
    "left-early": Evidence(exits=exits(Exit(rank=3, code=0), RESET), world_size=4),
    "hang": Evidence(
        hang=((2, 0), "rank 2 is stopped"), node_of=lambda r: f"node-{r // 2}", exits=exits(RESET)
    ),
    "out-of-memory-kill": Evidence(exits=exits(RESET, Exit(rank=1, signal=9, out_of_memory=True))),
    "outside-signal": Evidence(exits=exits(RESET, Exit(rank=1, signal=9))),
    "checkpoint-damaged": Evidence(
        exits=exits(Exit(rank=1, code=1, error_type="DamagedCheckpoint"))
    ),
    "checkpoint-missing": Evidence(
        exits=exits(Exit(rank=1, code=1, error_type="MissingCheckpoint"))
    ),
    "checkpoint-unreadable": Evidence(
        exits=exits(Exit(rank=1, code=1, error_type="UnreadableCheckpoint"))
    ),
    "diverged": Evidence(exits=exits(Exit(rank=1, code=1, error_type="ReplicasDiverged"))),
    "out-of-memory": Evidence(
        exits=exits(Exit(rank=1, code=1, error_type="OutOfMemoryError", out_of_memory=True))
    ),
    "device-missing": Evidence(
        exits=exits(RESET, Exit(rank=1, code=1, error_type="DeviceMissing", error_message="7 of 8"))
    ),
    "device-error": Evidence(
        exits=exits(
            Exit(
                rank=1, code=1, error_type="RuntimeError",
                error_message="CUDA error: an illegal memory access was encountered",
            )
        )
    ),
    "user-exception": Evidence(exits=exits(RESET, Exit(rank=1, code=1, **ERROR))),
    "exit-code": Evidence(exits=exits(RESET, Exit(rank=1, code=3))),
    "native-crash": Evidence(exits=exits(RESET, Exit(rank=1, signal=11))),
    "node-lost": Evidence(exits=exits(RESET), lost=(("node-1", "disconnected", ""),)),
    "network": Evidence(exits=exits(RESET, SAID_SECONDARY)),
    "unknown": Evidence(),
}  # fmt: skip
CLASS = {
    "left-early": "user", "user-exception": "user", "exit-code": "user", "hang": "hang",
    "preempted": "preemption",
}  # fmt: skip


def test_every_row_has_a_case() -> None:
    assert [name for name, _match in TABLE] == list(CASES)


@pytest.mark.parametrize("row", list(CASES))
def test_a_row_matches_with_its_class_and_evidence(row: str) -> None:
    failure = attribute(CASES[row])
    assert failure.rule == row
    assert failure.failure_class == CLASS.get(row, "infrastructure")
    assert failure.title and failure.evidence


def test_the_culprit_is_the_worker_with_the_primary_failure() -> None:
    failure = attribute(CASES["user-exception"])
    assert (failure.culprit_node, failure.culprit_rank) == ("node-0", 1)
    assert "1 peer then lost the connection to it" in failure.evidence


def test_the_suspect_of_a_hang_is_named_with_its_node() -> None:
    failure = attribute(CASES["hang"])
    assert (failure.culprit_node, failure.culprit_rank) == ("node-1", 2)
    assert failure.title == "worker 2 on node-1 hung"
    assert failure.evidence == "rank 2 is stopped"


def test_a_kill_comes_before_an_exception_that_is_not_marked_secondary() -> None:
    odd = Exit(rank=0, code=1, error_type="RuntimeError", error_message="something odd")
    assert attribute(Evidence(exits=exits(odd, Exit(rank=3, signal=9)))).rule == "outside-signal"


def test_an_exit_code_has_the_last_output_beside_it() -> None:
    said = Exit(rank=1, code=3, error_message="usage: train.py")
    ended = "without an exception"
    assert attribute(Evidence(exits=exits(Exit(rank=1, code=3)))).evidence.endswith(ended)
    evidence = attribute(Evidence(exits=exits(said))).evidence
    assert evidence.endswith(f"{ended}; last output: usage: train.py")


def test_an_exception_comes_before_a_crash() -> None:
    crash, error = Exit(rank=0, signal=6), Exit(rank=3, code=1, **ERROR)
    assert attribute(Evidence(exits=exits(crash, error))).rule == "user-exception"


def test_a_kill_by_holdfast_is_no_cause() -> None:
    ours = Exit(rank=1, signal=9, by_us=True)
    assert attribute(Evidence(exits=exits(ours, RESET))).rule == "network"


def test_an_exit_comes_before_a_hang_that_it_caused() -> None:
    hang = ((0,), "no progress")
    facts = Evidence(exits=exits(Exit(rank=1, signal=9)), hang=hang)
    assert attribute(facts).rule == "outside-signal"


def test_workers_that_all_ended_with_exit_code_0_did_not_leave_early() -> None:
    done = exits(Exit(rank=0, code=0), Exit(rank=1, code=0))
    assert attribute(Evidence(exits=done, world_size=2)).rule == "unknown"


def test_the_evidence_has_the_place_and_the_step() -> None:
    trace = 'Traceback\n  File "/a.py", line 3, in f\n  File "/b.py", line 9, in g\nValueError: bad'
    error = Exit(rank=2, code=1, step=17, traceback=trace, **ERROR)
    failure = attribute(Evidence(exits=exits(error)))
    assert failure.title == "worker 2 on node-1 raised ValueError after 18 steps"
    assert failure.evidence == 'ValueError: bad at File "/b.py", line 9, in g'


@pytest.mark.parametrize(
    "exit",
    [
        Exit(rank=0, code=1, error_type="BrokenPipeError", error_message="odd"),
        Exit(rank=0, code=1, error_type="RuntimeError", error_message="Socket Timeout (30 s)"),
        Exit(rank=0, signal=6, secondary=True),
        Exit(rank=0, code=3, secondary=True),
    ],
)
def test_an_error_of_the_network_is_secondary_by_its_type_its_text_or_its_mark(exit: Exit) -> None:
    assert attribute(Evidence(exits=exits(exit))).rule == "network"


def test_a_network_failure_names_the_rank_and_blames_no_node() -> None:
    failure = attribute(Evidence(exits=exits(RESET)))
    assert (failure.culprit_node, failure.culprit_rank) == ("", 0)
    assert failure.evidence == (
        "DistBackendError: Connection reset by peer; no worker or node shows another cause"
    )
    killed = attribute(Evidence(exits=exits(Exit(rank=0, signal=6, secondary=True))))
    assert killed.evidence == "SIGABRT; no worker or node shows another cause"
    ended = attribute(Evidence(exits=exits(Exit(rank=0, code=3, secondary=True))))
    assert ended.evidence == "exit code 3; no worker or node shows another cause"


def test_network_failures_on_several_nodes_are_no_aborts() -> None:
    ours = (Exit(rank=rank, signal=6, by_us=True) for rank in (3, 5))
    failure = attribute(Evidence(exits=exits(RESET, *ours, SAID_SECONDARY)))
    assert failure.evidence == (
        "DistBackendError: Connection reset by peer; no worker or node shows another cause"
    )


@pytest.mark.parametrize(
    ("peers", "text"),
    [
        (0, ""),
        (1, "; 1 peer then lost the connection to it"),
        (2, "; 2 peers then lost the connection to it"),
    ],
)
def test_the_evidence_counts_the_secondary_failures(peers: int, text: str) -> None:
    others = [Exit(rank=rank, code=1, secondary=True) for rank in range(1, peers + 1)]
    killed = Exit(rank=0, signal=9, step=4)
    failure = attribute(Evidence(exits=exits(*others, killed)))
    assert failure.evidence == f"SIGKILL after 5 steps, from outside the job{text}"
    assert failure.title == "worker 0 on node-0 was killed by SIGKILL"


def test_an_exit_before_the_first_step_has_no_step_in_its_evidence() -> None:
    failure = attribute(Evidence(exits=exits(Exit(rank=0, signal=35))))
    assert failure.evidence.startswith("signal 35 before it reported a step")
    error = attribute(Evidence(exits=exits(Exit(rank=0, code=1, step=0, **ERROR))))
    assert error.title == "worker 0 on node-0 raised ValueError after 1 step"
    assert error.evidence == "ValueError: bad", "there is no traceback"


def test_a_lost_node_is_counted_with_the_others() -> None:
    lost = (("a", "gone", "killed"), ("b", "gone", ""))
    failure = attribute(Evidence(lost=lost))
    assert (failure.title, failure.evidence) == ("a and 1 more were lost (gone)", "killed")
    alone = attribute(Evidence(lost=lost[1:]))
    assert (alone.title, alone.evidence) == ("b was lost (gone)", "gone")


@pytest.mark.parametrize("signal", [9, 15])
def test_a_worker_killed_on_a_node_with_a_preemption_notice_was_preempted(signal: int) -> None:
    killed = Exit(rank=1, signal=signal, step=2)
    leaving = (("node-0", "spot"),)
    failure = attribute(Evidence(exits=exits(killed), leaving=leaving))
    assert (failure.rule, failure.culprit_rank) == ("preempted", 1)
    other = attribute(Evidence(exits=exits(Exit(rank=1, signal=11)), leaving=leaving))
    assert other.rule == "native-crash"
    elsewhere = attribute(Evidence(exits=exits(Exit(rank=3, signal=9)), leaving=leaving))
    assert elsewhere.rule == "outside-signal"
    ours = attribute(Evidence(exits=exits(Exit(rank=1, signal=9, by_us=True)), leaving=leaving))
    assert ours.rule == "unknown"


def test_a_worker_that_left_early_does_not_explain_a_lost_node_or_another_error() -> None:
    early = Exit(rank=3, code=0, step=7)
    left = attribute(Evidence(exits=exits(early), world_size=4))
    assert left.evidence == "it left after 8 steps; 3 of 4 workers had not ended"
    assert left.title == "worker 3 on node-1 ended with exit code 0 while others continued"
    lost = (("node-0", "gone", ""),)
    assert attribute(Evidence(exits=exits(early), lost=lost, world_size=4)).rule == "node-lost"
    error = Exit(rank=0, code=1, **ERROR)
    assert attribute(Evidence(exits=exits(early, error), world_size=4)).rule == "user-exception"
    ours = Exit(rank=3, code=0, by_us=True)
    assert attribute(Evidence(exits=exits(ours), world_size=4)).rule == "unknown"


def test_a_hang_without_suspects_names_no_rank() -> None:
    failure = attribute(Evidence(hang=((), "no rank has reported")))
    assert (failure.title, failure.culprit_rank) == ("the job made no progress", None)
    assert failure.culprit_node == ""


@pytest.mark.parametrize(
    ("exit", "rule"),
    [
        (Exit(rank=0, code=1, out_of_memory=True, **ERROR), "out-of-memory"),
        (Exit(rank=0, signal=9, out_of_memory=True), "out-of-memory-kill"),
        (Exit(rank=0, code=1, error_type="AcceleratorError", error_message="odd"), "device-error"),
        (Exit(rank=0, code=1, error_type="RuntimeError", error_message="XID 79"), "device-error"),
        (Exit(rank=0, code=1, **ERROR), "user-exception"),
        (Exit(rank=0, signal=11, error_type="E"), "user-exception"),
    ],
)
def test_memory_and_device_errors_are_no_errors_of_the_user(exit: Exit, rule: str) -> None:
    assert attribute(Evidence(exits=exits(exit))).rule == rule


def test_only_a_damaged_checkpoint_throws_doubt_on_the_whole_state() -> None:
    assert attribute(CASES["checkpoint-damaged"]).damaged
    assert attribute(CASES["checkpoint-refused"]).damaged
    assert not attribute(CASES["checkpoint-unreadable"]).damaged


def stack(rank: int, activity: str, *groups: GroupProgress) -> Stack:
    return Stack(rank, "", activity in ("peers", "device"), "S", activity, groups)  # type: ignore[arg-type]


def reduce(sequence: int, *, done: bool = False, group: str = "0") -> GroupProgress:
    return GroupProgress(group, "default_pg", sequence, "gloo:all_reduce", done)


def hang(basis: SuspectBasis, *stacks: Stack) -> Evidence:
    return Evidence(
        hang=((2, 0, 1, 3), "no progress"), hang_basis=basis, stacks=stacks,
        node_of=lambda rank: f"node-{rank}", world_size=4,
    )  # fmt: skip


def test_no_rank_is_blamed_for_a_hang_in_which_all_wait_alike() -> None:
    failure = attribute(hang("none", *(stack(rank, "peers") for rank in range(4))))
    assert (failure.culprit_rank, failure.culprit_node) == (None, "")
    assert failure.title == "the job made no progress"
    assert "no rank differs from its peers" in failure.evidence


def test_the_rank_outside_the_collective_is_blamed_for_a_hang() -> None:
    stacks = [stack(rank, "nothing" if rank == 3 else "peers") for rank in range(4)]
    failure = attribute(hang("none", *stacks))
    assert (failure.culprit_rank, failure.culprit_node) == (3, "node-3")
    assert "the main thread of rank 3 is in no collective, unlike its peers" in failure.evidence


@pytest.mark.parametrize(
    ("outside", "first", "more"),
    [
        ((3,), 3, ""),
        ((0, 3), 0, "; the same holds for rank 3"),
        ((0, 1, 2, 3), 2, "; the same holds for rank 0, 1, 3"),
        ((0, 1, 2, 3, 5), 2, "; the same holds for rank 0, 1, 3, ..."),
    ],
)
@pytest.mark.parametrize("activity", ["nothing", "reads", "compiles"])
def test_the_likeliest_of_the_ranks_outside_a_collective_is_blamed_and_four_are_named(
    activity: str, outside: tuple[int, ...], first: int, more: str
) -> None:
    stacks = [stack(rank, activity if rank in outside else "peers") for rank in range(8)]
    found = culprit((2, 0, 1, 3), "none", stacks)
    why = f"the stacks: the main thread of rank {first} is in no collective, unlike its peers"
    assert found == (first, why + more)


def test_without_suspects_the_lowest_rank_outside_a_collective_is_blamed() -> None:
    kinds = {2: "reads", 3: "nothing"}
    stacks = [stack(rank, kinds.get(rank, "peers")) for rank in range(4)]
    rank, why = culprit((), "none", stacks)
    assert rank == 2 and why.endswith("; the same holds for rank 3")


@pytest.mark.parametrize("neutral", ["staging", "engine", ""])
def test_a_rank_that_waits_for_its_copy_is_not_blamed(neutral: str) -> None:
    stacks = [stack(rank, neutral if rank == 3 else "peers") for rank in range(4)]
    assert attribute(hang("none", *stacks)).culprit_rank is None


def test_the_flight_recorder_names_the_rank_that_has_not_arrived() -> None:
    stacks = [
        stack(rank, "peers", reduce(7 if rank != 1 else 6, done=rank == 1)) for rank in range(4)
    ]
    failure = attribute(hang("none", *stacks))
    assert failure.culprit_rank == 1
    assert (
        "rank 1 has not begun gloo:all_reduce number 7 of group default_pg, which 3 of its 4 ranks "
        "wait in"
    ) in failure.evidence


def test_a_collective_that_the_others_have_ended_shows_nothing() -> None:
    stacks = [stack(rank, "peers", reduce(7 - (rank == 1), done=True)) for rank in range(4)]
    assert attribute(hang("none", *stacks)).culprit_rank is None


def test_a_rank_that_is_absent_because_it_waits_elsewhere_is_not_blamed() -> None:
    """Rank 0 waits in group A for rank 1, and is therefore absent from group B."""
    stacks = [
        stack(0, "peers", reduce(5, group="A"), reduce(2, group="B", done=True)),
        stack(1, "peers", reduce(4, group="A", done=True)),
        stack(2, "peers", reduce(3, group="B")),
        stack(3, "peers", reduce(3, group="B")),
    ]
    assert attribute(hang("none", *stacks)).culprit_rank == 1


def test_a_stopped_process_is_blamed_whatever_the_stacks_show() -> None:
    stacks = [stack(rank, "nothing" if rank == 3 else "peers") for rank in range(4)]
    assert attribute(hang("stopped", *stacks)).culprit_rank == 2
    assert attribute(hang("behind")).culprit_rank == 2, "no stack: the heartbeats decide"


def aborted(*ranks: int, at_s: float = 0.0, line: str = "") -> tuple[tuple[str, Exit], ...]:
    return tuple(
        (
            f"node-{rank // 8}",
            Exit(
                rank=rank, signal=6, step=500, at_ns=round(at_s * index * 1e9),
                error_message=line, secondary=bool(line),
            ),
        )
        for index, rank in enumerate(ranks)
    )  # fmt: skip


def test_sigabrt_on_several_nodes_within_seconds_is_the_network_and_no_node_is_blamed() -> None:
    failure = attribute(Evidence(exits=aborted(13, 2, 7, 40, at_s=0.4), world_size=64))
    assert (failure.rule, failure.culprit_node) == ("network", "")
    assert "4 workers on several nodes were aborted within seconds" in failure.evidence
    late = attribute(Evidence(exits=aborted(13, 2, at_s=10.0), world_size=64))
    assert late.rule == "network"
    apart = attribute(Evidence(exits=aborted(13, 2, at_s=60), world_size=64))
    assert (apart.rule, apart.culprit_node) == ("native-crash", "node-1")
    one_node = attribute(Evidence(exits=aborted(2, 3), world_size=64))
    assert one_node.rule == "native-crash"


def test_a_node_that_is_lost_after_its_peers_were_aborted_is_blamed() -> None:
    lost = (("node-3", "silent", "no heartbeat for 3.0 s"),)
    failure = attribute(Evidence(exits=aborted(13, 2), lost=lost, world_size=64))
    assert (failure.rule, failure.culprit_node) == ("node-lost", "node-3")


def test_one_sigabrt_by_the_watchdog_of_nccl_is_the_network() -> None:
    line = "[rank2]: ProcessGroupNCCL's watchdog got stuck"
    failure = attribute(Evidence(exits=aborted(2, line=line), world_size=64))
    assert (failure.rule, failure.culprit_node) == ("network", "")
    assert line in failure.evidence
