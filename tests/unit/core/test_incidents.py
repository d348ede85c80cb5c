"""Traces of an interruption: its steps, its stacks, the reason of the next launch, and doubt."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.core.actions import LaunchGroup, RequestNodes, StopGroup
from holdfast.orchestrator.core.events import (
    CheckpointRefused,
    ControllerStarted,
    FromNode,
    HangDetected,
    HangSuspicionEnded,
    HeartbeatsLost,
    NodeLost,
    SuspendRequested,
)
from holdfast.orchestrator.core.recovery import STORE_UNREADABLE
from holdfast.orchestrator.protocol.facts import Exit, Stack, StagedShard
from holdfast.orchestrator.protocol.messages import GroupInspected, NodeRemarked, PreemptionNoticed
from holdfast.orchestrator.runtime.observe.incidents import incident

from .harness import SECOND, Transcript, spec


def _stack(rank: int, activity: str, text: str = "") -> Stack:
    return Stack(rank, text or f"{activity} {rank}", activity == "peers", "S", activity)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "lost", "expected", "at_least"),
    [
        ((9, 9, 10, 9), False, 9, False),
        ((9, 11), False, 10, False),
        ((9, 11), True, 10, True),
        ((), True, 3, True),
    ],
)
def test_the_last_step_of_all_ranks_follows_from_the_exits(
    steps: tuple[int, ...], lost: bool, expected: int, at_least: bool
) -> None:
    job = Transcript().started(step=3)
    if not steps:
        job.exits(0, signal=9, step=-1)
    for rank, step in enumerate(steps):
        job.exits(rank, signal=9, step=step)
    job.stopped("a")
    job.lose("b") if lost else job.stopped("b")
    incident = job.state.incidents[0]
    assert (incident.step_before, incident.at_least) == (expected, at_least)


def test_the_end_of_all_workers_is_no_part_of_the_incident_before() -> None:
    job = Transcript().started(step=3)
    job.exits(0, signal=9)
    job.all_stopped(3)
    job.succeed(LaunchGroup)
    incident = job.state.incidents[0]
    before = (incident.stopped_ns, incident.step_before)
    job.wait(1)
    for rank in range(4):
        job.exits(rank, code=0, step=9)
    job.all_stopped(9)
    assert (incident.stopped_ns, incident.step_before) == before
    assert job.state.phase == "finishing"


# -- stacks -----------------------------------------------------------------------------------
def test_a_hang_has_the_stacks_of_the_inspection_where_none_were_taken_at_the_end() -> None:
    job = Transcript().started(step=3)
    job.apply(
        FromNode("a", GroupInspected(generation=1, stacks=(_stack(0, "peers"), _stack(1, "peers"))))
    )
    job.apply(FromNode("b", GroupInspected(generation=1, stacks=(_stack(3, "nothing"),))))
    job.apply(HangDetected(generation=1, ranks=(3, 0), evidence="quiet"))
    job.stopped("a", 3, stacks=(_stack(0, "peers", "newer"),))
    job.stopped("b", 3)
    assert job.state.incidents[0].stacks == {0: "newer", 1: "peers 1", 3: "nothing 3"}
    assert job.state.inspected == {}


def test_a_failure_after_an_inspection_has_no_stacks_of_it() -> None:
    job = Transcript().started(step=3)
    job.apply(FromNode("b", GroupInspected(generation=1, stacks=(_stack(3, "nothing"),))))
    job.exits(0, signal=9)
    job.all_stopped(3)
    assert job.state.incidents[0].stacks == {} and job.state.inspected == {}


def test_an_inspection_shows_what_a_rank_does_that_its_peers_may_wait_for() -> None:
    job = Transcript().started(step=3)
    reason = job.state.reason
    for activity in ("peers", "device", ""):
        job.apply(FromNode("a", GroupInspected(generation=1, stacks=(_stack(0, activity),))))
        assert job.state.reason == reason
    stacks = (_stack(2, "peers"), _stack(3, "compiles"))
    job.apply(FromNode("b", GroupInspected(generation=1, stacks=stacks)))
    assert job.state.reason.text == "no progress: rank 3 compiles, on b"
    assert sorted(job.state.inspected) == [0, 2, 3]
    job.apply(HangSuspicionEnded(generation=1, seconds=4.0))
    assert job.state.inspected == {}
    assert job.state.notes[-1][1] == "progress after 4.0 s without any"
    assert job.state.reason.text == "all 4 ranks train"


def test_nodes_without_heartbeats_are_counted_in_the_reason() -> None:
    job = Transcript().started(step=3)
    job.apply(HeartbeatsLost(nodes=2, seconds=3.0, patience_s=12.0))
    assert job.state.reason.text == (
        "no heartbeat from any of 2 nodes for 3.0 s: this machine may be overloaded or "
        "disconnected; they are declared lost after 12 s"
    )


# -- what follows from the judgement ----------------------------------------------------------
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        ({"code": 3}, "user-error"),
        ({"signal": 9}, "infrastructure"),
        ({"code": 1, "error_type": "ValueError"}, "user-error"),
    ],
)
def test_the_next_launch_has_the_reason_of_the_failure(failure: dict[str, Any], code: str) -> None:
    job = Transcript().started(step=3)
    job.exits(2, step=3, **failure)
    job.all_stopped(3)
    assert {launch.reason.code for launch in job.of(LaunchGroup)} == {code}


def test_an_interruption_by_a_store_that_cannot_be_read_is_named_as_such() -> None:
    job = Transcript().started()
    job.commit(9)
    job.exits(0, signal=9)
    job.all_stopped(None)
    job.succeed(LaunchGroup)
    job.exits(0, code=1, error_type="UnreadableCheckpoint", error_message="not mounted")
    job.all_stopped(None)
    assert job.state.incidents[-1].rule == STORE_UNREADABLE
    assert job.state.reason.text == (
        "the store cannot be read (not mounted); it is tried again in 1 s"
    )


def test_a_damaged_state_in_memory_is_not_tried_again() -> None:
    job = Transcript().started(step=3)
    staged = tuple(StagedShard(3, 1, shard, 2, 1) for shard in range(2))
    for how in ({"signal": 9}, {"code": 1, "step": -1, "error_type": "DamagedCheckpoint"}):
        job.exits(0, **how)
        for node in ("a", "b"):
            job.stopped(node, staged=staged)
        job.succeed(LaunchGroup)
    assert job.state.catalog.distrusted == {(3, 1): 2}
    assert job.state.group.membership is not None and job.state.group.membership.restore is None


def test_a_cordon_counts_its_incidents() -> None:
    job = Transcript(spec(recovery={"badNodeStrikes": 2})).started()
    for step in (3, 4):
        job.exits(2, signal=9)
        job.all_stopped(step)
        job.succeed(LaunchGroup)
        job.step(step)
    assert job.state.ledger.cordoned == {"b": "b caused 2 incidents"}


def test_a_checkpoint_refused_between_two_generations_stops_nothing() -> None:
    job = Transcript(spec({"min": 2, "max": 2})).started()
    job.commit(9)
    job.exits(0, signal=9)
    job.all_stopped(None)
    job.succeed(LaunchGroup)
    job.lose("b")
    job.fail(job.one(RequestNodes))
    job.stopped("a", None)
    assert not job.state.group.active and job.state.phase == "pending"
    job.apply(CheckpointRefused(step=9, generation=1, detail="a checksum differs"))
    assert not job.of(StopGroup) and job.state.catalog.committed[0].refused
    assert job.state.num_incidents == 2


def test_a_notice_of_preemption_does_not_shorten_the_grace_period_of_a_suspend() -> None:
    job = Transcript(spec(script=True, recovery={"terminationGraceSeconds": 30}))
    job.started(step=None)
    job.step(0)
    job.apply(FromNode("b", PreemptionNoticed(grace_s=40, detail="spot")))
    assert not job.of(StopGroup)
    job.apply(SuspendRequested())
    assert {stop.grace_s for stop in job.of(StopGroup)} == {30.0}


def test_exits_that_come_with_the_stop_count_for_the_last_step() -> None:
    job = Transcript().started(step=3)
    job.exits(0, signal=9, step=6)
    job.stopped("a", exits=(Exit(rank=1, code=1, by_us=True, step=6),))
    job.stopped("b", exits=tuple(Exit(rank=r, code=1, by_us=True, step=6) for r in (2, 3)))
    assert job.state.incidents[0].step_before == 6


# -- when the fault happened ------------------------------------------------------------------
def _taken_over(job: Transcript, away_s: float, **found: Any) -> None:
    """A new controller comes after so long."""
    job.wait(2)
    job.apply(FromNode("a", NodeRemarked(text="the last record of the old controller")))
    job.now_ns += round(away_s * SECOND)
    job.apply(ControllerStarted(incarnation=2, **found))


def test_an_incident_begins_when_the_worker_ended_not_when_a_controller_came_back() -> None:
    job = Transcript().started(step=3)
    _taken_over(job, 300)
    job.join("a", "b", generation=1, ranks=(0, 1))
    job.exits(0, signal=9, ago_s=285.0)
    job.stopped("a", 3)
    job.stopped("b", 3, exits=(Exit(rank=2, signal=6, ago_s=285.4), Exit(rank=3, by_us=True)))
    job.succeed(LaunchGroup)
    job.wait(1.5)
    job.step(4)
    seconds = incident(job.state.incidents[0], no_steps=False).seconds
    assert seconds["detect"] == pytest.approx(285.4) and seconds["total"] == pytest.approx(286.9)
    assert list(seconds) == ["detect", "stop", "place", "launch", "first-step", "total"]


def test_an_incident_does_not_begin_before_its_generation_trained() -> None:
    job = Transcript().started(step=3)
    since_ns = job.state.group.first_step_ns
    job.wait(2)
    job.exits(0, signal=9, ago_s=1000.0)
    job.all_stopped(3)
    assert job.state.incidents[0].at_ns == since_ns


def test_a_fault_that_is_reported_within_a_heartbeat_was_noticed_at_once() -> None:
    job = Transcript().started(step=3)
    job.wait(5)
    job.exits(0, signal=9, ago_s=0.3)
    job.all_stopped(3)
    found = job.state.incidents[0]
    assert found.at_ns == found.noticed_ns == job.now_ns


@pytest.mark.parametrize(("ended_s", "expected_s"), [(None, 300.0), (40.0, 40.0)])
def test_a_node_that_vanished_without_a_controller_was_lost_after_its_last_record(
    ended_s: float | None, expected_s: float
) -> None:
    """Peers that ended by themselves are nearer to the fault."""
    job = Transcript().started(step=3)
    _taken_over(job, 300, nodes=("a",))
    job.join("a", generation=1, ranks=(0, 1))
    exits = (Exit(rank=0, signal=6, ago_s=ended_s),) if ended_s else ()
    job.stopped("a", 3, exits=exits)
    found = job.state.incidents[0]
    assert found.noticed_ns is not None
    assert (found.noticed_ns - found.at_ns) / SECOND == expected_s


def test_a_silent_node_was_lost_at_its_last_heartbeat() -> None:
    job = Transcript().started(step=3)
    job.wait(9)
    job.apply(NodeLost(node="b", cause="silent", ago_s=3.0))
    job.stopped("a", 3)
    found = job.state.incidents[0]
    assert found.at_ns == job.now_ns - 3 * SECOND
