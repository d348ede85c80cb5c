"""Quiesce: before a planned interruption all nodes stage the same step, and none is lost."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.core.actions import LaunchGroup, RequestNodes, StageStep, StopGroup
from holdfast.orchestrator.core.context import seconds
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    ActionUnknown,
    CancelRequested,
    ControllerStarted,
    FromNode,
    HangDetected,
    ResizeRequested,
    ResumeRequested,
    StepCompleted,
    SuspendRequested,
    Tick,
)
from holdfast.orchestrator.core.provisioning import REQUEST_RETRY_S
from holdfast.orchestrator.core.quiesce import (
    PACE_S,
    SECOND_MARGIN_S,
    SLACK_S,
    pace_left_s,
    step_ahead,
)
from holdfast.orchestrator.protocol.messages import NodeJoined, PreemptionNoticed

from .harness import Transcript, facts, spec

RARELY = {"memory": {"everySteps": 100}, "storage": {"everySteps": 1000}}


def trained(step: int = 30, nodes: dict[str, int] | None = None, **tier: Any) -> Transcript:
    """Job that has staged step 0 at most."""
    job = Transcript(spec(nodes or {"min": 1, "max": 2}, checkpoint=tier or RARELY))
    names = ("a", "b", "c")[: (nodes or {}).get("max", 2) + (nodes or {}).get("spares", 0)]
    job.started(*names)
    job.wait(PACE_S)
    job.step(step)
    return job


def ask(job: Transcript, purpose: str) -> None:
    match purpose:
        case "resize":
            job.apply(ResizeRequested(nodes=1))
        case "suspend":
            job.apply(SuspendRequested(by="me"))
        case "cancel":
            job.apply(CancelRequested(by="me"))


@pytest.mark.parametrize("purpose", ["resize", "suspend", "cancel"])
def test_all_nodes_stage_a_step_ahead_before_a_planned_stop(purpose: str) -> None:
    job = trained()
    ask(job, purpose)
    orders = job.of(StageStep)
    step = step_ahead(job.state)
    assert [(order.node, order.step) for order in orders] == [("a", step), ("b", step)]
    assert step >= 30 + 2 + 4, "at 0.4 s a step ranks may be five steps further by now"
    assert not job.of(StopGroup)
    assert job.state.phase == "running"
    assert f"the state after {step + 1} steps is staged first" in job.state.reason.text
    job.step(step - 1)
    assert job.state.step == step - 1, "training continues"
    job.succeed(StageStep)
    assert [stop.node for stop in job.of(StopGroup)] == ["a", "b"]
    job.all_stopped(step)
    if purpose == "resize":
        restore = job.one(LaunchGroup).membership.restore
        assert restore is not None and restore.step == step
    else:
        assert job.state.drain is not None and job.state.drain.step == step


def test_the_incident_begins_when_training_stops() -> None:
    job = trained()
    ask(job, "resize")
    asked_ns = job.now_ns
    job.wait(1.5)
    assert not job.state.incidents
    job.succeed(StageStep)
    assert job.state.incidents[-1].at_ns > asked_ns


@pytest.mark.parametrize(
    "tier",
    [{"memory": {"everySteps": 1}}, {"memory": {"everySteps": 0}, "storage": {"everySeconds": 60}}],
)
def test_a_job_that_stages_every_step_stages_no_extra_step(tier: dict[str, Any]) -> None:
    job = trained(**tier)
    ask(job, "resize")
    assert len(job.of(StopGroup)) == 2 and not job.of(StageStep)


@pytest.mark.parametrize("counted_by", ["script", "counted", "posted", "collectives"])
def test_a_script_that_keeps_its_own_checkpoints_is_stopped_at_once(counted_by: Any) -> None:
    """The script stages no step: to wait for one delays the stop, maybe past its end."""
    job = Transcript(spec(checkpoint=RARELY)).started()
    event = StepCompleted(generation=1, step=30, step_s=0.4, counted_by=counted_by)
    job.apply(event)
    job.wait(PACE_S)
    ask(job, "suspend")
    assert len(job.of(StopGroup)) == 2 and not job.of(StageStep)


def test_a_job_without_a_finished_step_stages_no_extra_step() -> None:
    job = Transcript(spec(checkpoint=RARELY)).started(step=None)
    ask(job, "suspend")
    assert len(job.of(StopGroup)) == 2 and not job.of(StageStep)


def test_no_step_is_requested_before_the_step_time_is_known() -> None:
    """The first reported step time includes the start-up."""
    job = Transcript(spec(checkpoint=RARELY)).started()
    ask(job, "resize")
    assert not job.of(StageStep) and not job.of(StopGroup)
    job.wait(1.0)
    job.apply(StepCompleted(generation=1, step=30, step_s=0.02))
    assert not job.of(StageStep) and not job.of(StopGroup)
    job.wait(PACE_S - 1.0)
    assert [order.step for order in job.of(StageStep)] == [30 + 2 + 200] * 2
    job.succeed(StageStep)
    assert len(job.of(StopGroup)) == 2


def test_a_leaving_node_without_time_to_learn_the_step_time_is_stopped_at_once() -> None:
    job = Transcript(spec({"min": 2, "max": 2, "spares": 1}, checkpoint=RARELY))
    job.started("a", "b", "c")
    job.apply(FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=5.0)))
    assert len(job.of(StopGroup)) == 2 and not job.of(StageStep)


@pytest.mark.parametrize("purpose", ["resize", "suspend", "cancel"])
def test_a_step_that_a_rank_was_past_is_followed_by_one_further_ahead(purpose: str) -> None:
    job = trained()
    ask(job, purpose)
    first, order = job.of(StageStep)
    job.fail(order, "rank 2 was past 37 steps")
    assert not job.of(StopGroup)
    assert "b: rank 2 was past 37 steps" in job.state.notes[-1][1]
    step = step_ahead(job.state, SECOND_MARGIN_S)
    again = job.of(StageStep)
    assert [(one.node, one.step) for one in again] == [("a", step), ("b", step)]
    job.apply(ActionSucceeded(action_id=first.action_id))
    assert job.state.quiesce is not None and len(job.state.quiesce.waiting) == 2
    job.succeed(StageStep)
    assert len(job.of(StopGroup)) == 2


def test_a_second_step_lies_behind_the_first_also_if_steps_have_become_slow() -> None:
    job = trained()
    ask(job, "resize")
    order = job.of(StageStep)[1]
    job.state.step_s = 12.0
    job.fail(order, "rank 2 was past 43 steps")
    assert {one.step for one in job.of(StageStep)} == {order.step + 1}


def test_a_node_that_cannot_stage_the_second_step_either_ends_the_wait() -> None:
    job = trained()
    ask(job, "resize")
    job.fail(job.of(StageStep)[1], "rank 2 was past 37 steps")
    job.fail(job.of(StageStep)[1], "rank 2 was past 57 steps")
    assert len(job.of(StopGroup)) == 2 and len(job.all(StageStep)) == 4


def test_a_second_step_is_not_awaited_by_a_node_that_leaves_before() -> None:
    job = trained(nodes={"min": 2, "max": 2, "spares": 1})
    job.apply(FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=25.0)))
    job.fail(job.of(StageStep)[1], "rank 2 was past 37 steps")
    assert len(job.of(StopGroup)) == 2 and len(job.all(StageStep)) == 2


def test_a_node_that_does_not_answer_is_awaited_for_a_limited_time() -> None:
    job = trained()
    ask(job, "resize")
    job.wait(5)
    assert not job.of(StopGroup)
    job.wait(10)
    assert len(job.of(StopGroup)) == 2


def test_a_failure_while_a_step_is_awaited_is_a_failure() -> None:
    job = trained()
    ask(job, "resize")
    job.lose("b")
    assert [stop.node for stop in job.of(StopGroup)] == ["a"]
    assert job.state.quiesce is None
    job.all_stopped(30)
    assert job.state.incidents[-1].rule == "lost-first"


def test_a_hang_while_a_step_is_awaited_is_a_hang() -> None:
    job = trained()
    ask(job, "resize")
    job.apply(HangDetected(generation=1, ranks=(0,), evidence="rank 0 is stopped"))
    job.all_stopped(30)
    assert job.state.incidents[-1].failure_class == "hang"


def test_a_withdrawn_request_stops_nothing() -> None:
    job = trained()
    ask(job, "suspend")
    late = job.of(StageStep)
    job.now_ns += 1
    job.apply(ResumeRequested())
    assert job.state.quiesce is None and "was withdrawn" in job.state.reason.text
    for order in late:
        assert not job.fail(order, "too late")
    job.wait(60)
    assert not [action for action in job.actions if isinstance(action, StopGroup)]
    assert job.state.phase == "running"


def test_a_second_cancel_does_not_wait_for_the_step() -> None:
    job = trained()
    ask(job, "cancel")
    assert not job.of(StopGroup)
    ask(job, "cancel")
    assert len(job.of(StopGroup)) == 2


def test_a_step_is_staged_before_a_node_leaves_if_there_is_time() -> None:
    job = trained(nodes={"min": 2, "max": 2, "spares": 1})
    job.apply(FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=30.0)))
    assert len(job.of(StageStep)) == 2
    job.succeed(StageStep)
    assert len(job.of(StopGroup)) == 2
    assert job.state.stop is not None and job.state.stop.leaving == [("b", "got SIGTERM")]


def test_a_leaving_node_without_time_for_the_step_is_stopped_at_once() -> None:
    job = trained(nodes={"min": 2, "max": 2, "spares": 1})
    job.apply(FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=6.0)))
    assert len(job.of(StopGroup)) == 2 and not job.of(StageStep)


def test_a_staged_step_is_awaited_for_a_third_of_the_leaving_nodes_time() -> None:
    job = trained(nodes={"min": 2, "max": 2, "spares": 1})
    job.apply(FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=18.0)))
    assert len(job.of(StageStep)) == 2
    job.wait(6.1)
    assert len(job.of(StopGroup)) == 2


def test_a_node_that_leaves_soon_limits_the_wait_of_other_interruptions() -> None:
    leaving = FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=6.0))
    job = trained(nodes={"min": 2, "max": 2})
    job.apply(leaving)
    ask(job, "suspend")
    assert len(job.of(StopGroup)) == 2 and not job.of(StageStep)

    job = trained(nodes={"min": 2, "max": 2})
    ask(job, "suspend")
    job.apply(leaving)
    assert not job.of(StopGroup), "the notice comes while the step is awaited"
    job.wait(2.1)
    assert len(job.of(StopGroup)) == 2


def test_a_pending_request_for_nodes_does_not_withdraw_the_interruption() -> None:
    """Ranks wait after the requested step; they must not do so repeatedly for nothing."""
    job = trained(nodes={"min": 1, "max": 2})
    job.apply(FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=60.0)))
    job.fail(job.one(RequestNodes))
    assert len(job.of(StageStep)) == 2, "no capacity, and one node is enough"
    job.wait(REQUEST_RETRY_S)
    assert job.one(RequestNodes), "capacity may be free now"
    assert job.state.quiesce is not None
    job.succeed(StageStep)
    assert len([a for a in job.actions if isinstance(a, StopGroup)]) == 2


def test_a_new_controller_requests_a_step_when_all_members_have_reconnected() -> None:
    job = trained()
    ask(job, "suspend")
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    assert not job.of(StopGroup)
    for node in ("a", "b"):
        assert not job.of(StageStep)
        ranks = tuple(seat.rank for seat in job.state.group.launches[node].seats)
        job.apply(FromNode(node, NodeJoined(facts=facts(node), generation=1, ranks=ranks)))
    assert len(job.of(StageStep)) == 2
    job.succeed(StageStep)
    assert len(job.of(StopGroup)) == 2


def test_a_request_lost_with_its_connection_is_repeated_once() -> None:
    job = trained()
    ask(job, "resize")
    job.apply(ActionUnknown(action_id=job.of(StageStep)[0].action_id))
    assert not job.of(StopGroup)
    job.apply(ActionUnknown(action_id=job.of(StageStep)[0].action_id))
    assert len(job.of(StopGroup)) == 2


def test_the_step_lies_ahead_by_the_margin_over_the_step_time() -> None:
    job = trained()
    assert step_ahead(job.state) == 30 + 2 + 10
    job.state.step_s = 0.0
    assert step_ahead(job.state) == 32


def test_the_pace_is_known_two_seconds_after_the_first_step() -> None:
    job = Transcript(spec(checkpoint=RARELY)).started()
    assert pace_left_s(job.state) == PACE_S
    job.wait(0.5)
    job.step(1)
    assert pace_left_s(job.state) == PACE_S - 0.5
    job.wait(5)
    job.step(2)
    assert pace_left_s(job.state) == 0.0


@pytest.mark.parametrize(("grace_s", "waits"), [(6.0, False), (6.1, True)])
def test_a_leaving_node_needs_three_times_the_time_to_learn_the_pace(
    grace_s: float, waits: bool
) -> None:
    job = Transcript(spec({"min": 2, "max": 2, "spares": 1}, checkpoint=RARELY))
    job.started("a", "b", "c")
    job.apply(FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=grace_s)))
    assert (not job.of(StopGroup)) == waits


@pytest.mark.parametrize(("grace_s", "waits"), [(14.5, True), (14.3, False)])
def test_a_leaving_node_needs_three_times_the_time_of_the_step(grace_s: float, waits: bool) -> None:
    """Twelve steps of 0.4 s are 4.8 s."""
    job = trained(nodes={"min": 2, "max": 2, "spares": 1})
    job.apply(FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=grace_s)))
    assert bool(job.of(StageStep)) == waits and bool(job.of(StopGroup)) != waits


def test_a_wait_for_a_step_ends_after_its_time_and_some_slack() -> None:
    job = trained()
    ask(job, "resize")
    assert job.state.timers["stage"] == job.now_ns + seconds(SLACK_S + 1.5 * 12 * 0.4)
    text = "from 2 to 1 nodes, as requested; the state after 43 steps is staged first"
    assert job.one_reason(StageStep) == text
    assert job.state.quiesce is not None and job.state.quiesce.requested_ns == job.now_ns
    job.wait(1)
    job.step(32)
    assert job.state.quiesce.requested_ns == job.now_ns, "the request still stands"
    late = job.all(StageStep)
    job.apply(ActionSucceeded(action_id=late[0].action_id))
    assert list(job.state.quiesce.waiting) == ["b"] and not job.of(StopGroup)
    job.apply(ActionSucceeded(action_id=late[1].action_id))
    assert len(job.of(StopGroup)) == 2 and job.state.quiesce is None
    assert "stage" not in job.state.timers


def test_an_answer_to_an_earlier_request_does_not_count() -> None:
    job = trained()
    ask(job, "suspend")
    old = job.of(StageStep)[0]
    job.now_ns += 1
    job.apply(ResumeRequested())
    job.wait(1)
    ask(job, "suspend")
    assert len(job.of(StageStep)) == 2
    job.apply(ActionSucceeded(action_id=old.action_id))
    assert job.state.quiesce is not None and len(job.state.quiesce.waiting) == 2
    for _request in range(2):
        job.fail(job.all(StageStep)[-1], "past it")
    assert len(job.of(StopGroup)) == 2


def test_a_new_controller_awaits_members_only_while_they_may_reconnect() -> None:
    job = trained()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    ask(job, "suspend")
    assert not job.fresh, "b and a may reconnect"
    job.state.timers.pop("rejoin")
    job.apply(Tick())
    assert len(job.of(StopGroup)) == 2


def test_a_preemption_does_not_wait_for_members_that_reconnect() -> None:
    job = trained(nodes={"min": 2, "max": 2, "spares": 1})
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    for node in ("a", "c"):
        ranks = tuple(s.rank for s in job.state.group.launches[node].seats) if node == "a" else ()
        generation = 1 if node == "a" else 0
        job.apply(FromNode(node, NodeJoined(facts=facts(node), generation=generation, ranks=ranks)))
    job.apply(FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=60.0)))
    assert len(job.of(StopGroup)) == 2 and not job.of(StageStep)


def test_a_leaving_node_has_time_for_a_step_that_takes_exactly_a_third_of_it() -> None:
    job = trained(nodes={"min": 2, "max": 2, "spares": 1})
    job.apply(StepCompleted(generation=1, step=31, step_s=0.5))
    assert step_ahead(job.state) - job.state.step == 10
    job.apply(FromNode("b", PreemptionNoticed(detail="got SIGTERM", grace_s=15.0)))
    assert len(job.of(StageStep)) == 2


def test_a_cancel_waits_for_the_step_that_a_resize_requested() -> None:
    job = trained()
    ask(job, "resize")
    ask(job, "cancel")
    assert job.state.quiesce is not None and not job.of(StopGroup)
    ask(job, "cancel")
    assert len(job.of(StopGroup)) == 2, "a second one does not"


@pytest.mark.parametrize(
    "counted_by, grace_s, after_step",
    [
        ("script", 30.0, 30 + 2 + 10),  # at 0.4 s a step
        ("script", 4.0, -1),  # it would come too late
        ("session", 30.0, -1),  # its state is in memory
        ("posted", 30.0, -1),  # its steps are not exact
    ],
)
def test_a_script_with_its_own_checkpoints_gets_a_step_to_save_after(
    counted_by: Any, grace_s: float, after_step: int
) -> None:
    recovery = {"terminationGraceSeconds": grace_s}
    job = Transcript(spec({"min": 1, "max": 2}, shard="auto", script=True, recovery=recovery))
    job.started("a", "b")
    job.wait(PACE_S)
    job.apply(
        StepCompleted(generation=job.state.generation, step=30, step_s=0.4, counted_by=counted_by)
    )
    ask(job, "suspend")
    assert [stop.after_step for stop in job.of(StopGroup)] == [after_step] * 2
