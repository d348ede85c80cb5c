"""Workers of a node that joins build beside the running job, which stops when they are ready."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import Recovery
from holdfast.orchestrator.core import launching
from holdfast.orchestrator.core.actions import LaunchGroup, StopGroup
from holdfast.orchestrator.core.events import (
    ActionUnknown,
    ControllerStarted,
    FromNode,
    ResumeRequested,
    StepCompleted,
    SuspendRequested,
)
from holdfast.orchestrator.protocol.messages import PreemptionNoticed, StandbysReported

from .harness import RequestNodes, Transcript, spec

GROW_DELAY_S = Recovery().grow_delay_s
AT_ONCE = {"replacementWaitSeconds": 0}


def trains(job: Transcript, step: int, *, keeps: bool = True) -> None:
    generation = job.state.generation
    job.apply(StepCompleted(generation=generation, step=step, step_s=0.4, keeps=keeps))


def shrunk(*, keeps: bool = True) -> Transcript:
    job = Transcript().started()
    job.lose("b")
    job.succeed(RequestNodes)
    job.stopped("a", 5, kept=(0, 1))
    job.wait(2.1)
    job.succeed(LaunchGroup)
    trains(job, 6, keeps=keeps)
    job.join("c")
    job.wait(GROW_DELAY_S)
    return job


def test_new_workers_build_while_the_others_train_and_get_the_seats_that_they_built_for() -> None:
    job = shrunk()
    ahead = job.one(LaunchGroup)
    assert ahead.node == "c" and ahead.membership.ahead and ahead.membership.generation == 2
    assert [seat.rank for seat in ahead.seats] == [2, 3] and ahead.membership.world_size == 4
    restore = ahead.membership.restore
    assert restore is not None and restore.step == 5 and not restore.sources
    assert not job.all(StopGroup)[2:] and job.state.phase == "running"
    assert job.state.reason.text.endswith("the workers of c are built first")
    trains(job, 7)
    assert not job.fresh, "it builds once"
    job.succeed(LaunchGroup)
    text = "2 nodes are usable, 1 are used; the new workers are ready"
    assert job.one_reason(StopGroup) == text
    job.stopped("a", 20, kept=(0, 1))
    launches = job.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "c"]
    assert launches[0].membership.kept_from == 2 and not launches[1].membership.ahead
    assert launches[1].seats == ahead.seats
    assert launches[1].membership.mesh == ahead.membership.mesh
    assert job.replayed().state == job.state


def test_a_job_that_keeps_no_process_grows_as_before() -> None:
    job = shrunk(keeps=False)
    assert job.one_reason(StopGroup) == "2 nodes are usable, 1 are used"
    assert not any(launch.membership.ahead for launch in job.all(LaunchGroup))


def test_a_job_grows_without_workers_that_cannot_build_or_take_too_long() -> None:
    job = shrunk()
    job.fail(job.last(LaunchGroup), "rank 2: the script has no step left")
    why = "not all new workers are ready: c: rank 2: the script has no step left"
    assert job.one_reason(StopGroup).endswith(why)
    job = shrunk()
    job.apply(ActionUnknown(action_id=job.last(LaunchGroup).action_id))
    assert job.one_reason(StopGroup).endswith("c: result unknown")
    job = shrunk()
    job.wait(limits.JOIN_WAIT_S - 0.1)
    assert not job.of(StopGroup)
    job.wait(0.1)
    assert job.one_reason(StopGroup).endswith("c has not built after 120 s")


def test_the_wait_ends_with_the_node_and_the_next_one_builds_too() -> None:
    job = shrunk()
    job.lose("c")
    assert job.state.phase == "running" and "join" not in job.state.timers
    assert job.state.joining is None
    assert job.state.reason.text == "training continues on the nodes that it has"
    job.join("d")
    job.wait(GROW_DELAY_S)
    assert job.one(LaunchGroup).node == "d" and not job.of(StopGroup)
    job.succeed(LaunchGroup)
    assert job.of(StopGroup)


def test_a_failure_meanwhile_is_recovered_at_once_on_all_nodes() -> None:
    job = shrunk()
    job.exits(0, signal=9, step=7)
    assert [stop.node for stop in job.of(StopGroup)] == ["a"]
    job.stopped("a", 7, kept=(1,))
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]
    assert job.of(LaunchGroup)[0].membership.kept_from == 2


def test_an_event_while_they_build_plans_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = shrunk()
    monkeypatch.setattr(launching, "plan", lambda *_: pytest.fail("planned again"))
    trains(job, 7)
    job.apply(FromNode("a", StandbysReported(ready=True)))
    monkeypatch.undo()
    job.join("d")  # as many as before can train
    assert not job.of(LaunchGroup) and job.state.joining is not None
    assert list(job.state.joining.actions) == ["c"]


def test_another_controller_asks_again_whether_they_are_ready() -> None:
    job = shrunk()
    job.apply(ControllerStarted(incarnation=2))
    job.join("a", generation=2)
    job.join("c")
    job.wait(GROW_DELAY_S)
    assert job.last(LaunchGroup).membership.ahead and job.last(LaunchGroup).node == "c"
    assert not job.of(StopGroup), "the first controller's question has no answer yet"
    job.succeed(LaunchGroup)
    assert job.of(StopGroup)


def test_the_node_of_rank_0_is_replaced_without_a_second_rank_0_beside_it() -> None:
    job = Transcript().started(step=5)
    trains(job, 6)
    job.apply(FromNode("a", PreemptionNoticed(detail="spot", grace_s=30.0)))
    job.succeed(RequestNodes)
    job.join("c")
    assert not job.last(LaunchGroup).membership.ahead
    assert job.all(StopGroup)


@pytest.mark.parametrize("builds", [True, False])
def test_a_replacement_builds_before_the_leaving_node_is_left(builds: bool) -> None:
    job = Transcript().started(step=5)
    trains(job, 6)
    job.apply(FromNode("b", PreemptionNoticed(detail="spot", grace_s=30.0)))
    job.succeed(RequestNodes)
    job.join("c")
    ahead = job.last(LaunchGroup)
    assert ahead.membership.ahead and (ahead.node, ahead.node_rank) == ("c", 1)
    assert not job.all(StopGroup)
    if builds:
        job.succeed(LaunchGroup)
    else:
        job.wait(10.1)  # a third of the grace
    assert job.all(StopGroup)


def after_a_failure(*, lost: bool, **document: Any) -> Transcript:
    """Worker 0 of two nodes is killed, or its node is lost and a spare has joined."""
    job = Transcript(spec(**document)).started(step=None)
    trains(job, 3)
    if lost:
        job.lose("a")
        job.join("spare")
    else:
        job.exits(0, signal=9, step=3)
        job.stopped("a", 3, kept=(1,))
    job.stopped("b", 3, kept=(2, 3))
    return job


@pytest.mark.parametrize("lost", [False, True])
def test_whole_nodes_train_at_once_in_a_job_that_waits_for_no_replacement(lost: bool) -> None:
    job = after_a_failure(lost=lost, recovery=AT_ONCE)
    alone = job.one(LaunchGroup)
    assert (alone.node, alone.membership.world_size, alone.membership.kept_from) == ("b", 2, 1)
    text = "2 of 2 workers keep their process; the others are built beside the running job"
    assert alone.reason.text.endswith(text)
    job.succeed(LaunchGroup)
    trains(job, 4)
    job.wait(GROW_DELAY_S)
    ahead = job.one(LaunchGroup)
    assert ahead.node == ("spare" if lost else "a") and ahead.membership.ahead
    job.succeed(LaunchGroup)
    job.stopped("b", 5, kept=(0, 1))
    both = job.of(LaunchGroup)
    assert [one.node for one in both] == ["b", ahead.node] and both[0].membership.kept_from == 2
    assert job.state.ledger.restarts == {"infrastructure": 1}


def test_all_wait_for_a_new_process_in_a_job_of_one_size() -> None:
    job = after_a_failure(lost=False, recovery=AT_ONCE, nodes={"min": 2, "max": 2})
    launches = job.of(LaunchGroup)
    assert [(one.node, one.membership.kept_from) for one in launches] == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("suspended", [False, True])
def test_a_resumed_job_keeps_no_process_that_its_nodes_have_ended(suspended: bool) -> None:
    job = Transcript(spec(recovery=AT_ONCE)).started(step=None)
    trains(job, 3)
    job.exits(0, signal=9, step=3)
    job.apply(SuspendRequested())
    job.stopped("a", 3, kept=(1,))
    job.stopped("b", 3, kept=(2, 3))
    job.commit(3) if suspended else job.wait(limits.KEPT_S)
    job.apply(ResumeRequested())
    if suspended:
        job.succeed(RequestNodes)
        job.join("c")
        job.wait(6)
    assert [one.membership.kept_from for one in job.of(LaunchGroup)] == [0, 0][suspended:]


def test_a_replica_over_two_nodes_trains_on_if_both_are_whole() -> None:
    six = spec({"min": 2, "max": 6}, shard=4, recovery=AT_ONCE)
    job = Transcript(six).started(*"abcdef", step=None)
    trains(job, 3)
    job.exits(0, signal=9, step=3)
    for number, name in enumerate("abcdef"):
        job.stopped(name, 3, kept=(2 * number, 2 * number + 1)[name in "ac" :])
    assert [one.node for one in job.of(LaunchGroup)] == ["e", "f"]
