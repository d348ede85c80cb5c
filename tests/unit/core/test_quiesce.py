"""Quiesce: before a planned interruption all nodes stage the same step, and none is lost."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.core.actions import LaunchGroup, RequestNodes, StageStep, StopGroup
from holdfast.orchestrator.core.events import (
    ActionUnknown,
    CancelRequested,
    ControllerStarted,
    HangDetected,
    NodeJoined,
    PreemptionNoticed,
    ResizeRequested,
    ResumeRequested,
    StepCompleted,
    SuspendRequested,
)
from holdfast.orchestrator.core.provisioning import REQUEST_RETRY_S
from holdfast.orchestrator.core.quiesce import PACE_S, step_ahead

from .harness import Transcript, facts, spec

RARELY = {"memory": {"everySteps": 100}, "storage": {"everySteps": 1000}}


def trained(step: int = 30, nodes: dict[str, int] | None = None, **tier: Any) -> Transcript:
    """It has staged step 0 at most."""
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
    assert f"step {step} is staged first" in job.state.reason.text
    job.step(step - 1)
    assert job.state.step == step - 1, "training goes on"
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
    [
        {"memory": {"everySteps": 1}},
        {"memory": {"everySteps": 0}, "storage": {"everySeconds": 60}},
    ],
)
def test_a_job_that_stages_every_step_stages_no_extra_step(tier: dict[str, Any]) -> None:
    job = trained(**tier)
    ask(job, "resize")
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
    job.apply(PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=5.0))
    assert len(job.of(StopGroup)) == 2 and not job.of(StageStep)


def test_a_node_that_cannot_stage_the_step_ends_the_wait() -> None:
    job = trained()
    ask(job, "resize")
    order = job.of(StageStep)[1]
    job.fail(order, "rank 2 was past step 36")
    assert len(job.of(StopGroup)) == 2
    assert "b: rank 2 was past step 36" in job.state.notes[-1][1]


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
    job.apply(PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=30.0))
    assert len(job.of(StageStep)) == 2
    job.succeed(StageStep)
    assert len(job.of(StopGroup)) == 2
    assert job.state.stop is not None and job.state.stop.leaving == [("b", "got SIGTERM")]


def test_a_leaving_node_without_time_for_the_step_is_stopped_at_once() -> None:
    job = trained(nodes={"min": 2, "max": 2, "spares": 1})
    job.apply(PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=6.0))
    assert len(job.of(StopGroup)) == 2 and not job.of(StageStep)


def test_a_staged_step_is_awaited_for_a_third_of_the_leaving_nodes_time() -> None:
    job = trained(nodes={"min": 2, "max": 2, "spares": 1})
    job.apply(PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=18.0))
    assert len(job.of(StageStep)) == 2
    job.wait(6.1)
    assert len(job.of(StopGroup)) == 2


def test_a_node_that_leaves_soon_limits_the_wait_of_other_interruptions() -> None:
    leaving = PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=6.0)
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
    job.apply(PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=60.0))
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
        ranks = tuple(seat.rank for seat in job.state.launch_actions[node].seats)
        job.apply(NodeJoined(node=node, facts=facts(node), generation=1, ranks=ranks))
    assert len(job.of(StageStep)) == 2
    job.succeed(StageStep)
    assert len(job.of(StopGroup)) == 2


def test_a_request_lost_with_its_connection_ends_the_wait() -> None:
    job = trained()
    ask(job, "resize")
    job.apply(ActionUnknown(action_id=job.of(StageStep)[0].action_id))
    assert len(job.of(StopGroup)) == 2
