"""Where not every step is staged, a planned interruption has one staged first, and loses none."""

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
    story = Transcript(spec(nodes or {"min": 1, "max": 2}, checkpoint=tier or RARELY))
    names = ("a", "b", "c")[: (nodes or {}).get("max", 2) + (nodes or {}).get("spares", 0)]
    story.started(*names)
    story.wait(PACE_S)
    story.step(step)
    return story


def ask(story: Transcript, purpose: str) -> None:
    match purpose:
        case "resize":
            story.tell(ResizeRequested(nodes=1))
        case "suspend":
            story.tell(SuspendRequested(by="me"))
        case "cancel":
            story.tell(CancelRequested(by="me"))


@pytest.mark.parametrize("purpose", ["resize", "suspend", "cancel"])
def test_one_step_ahead_is_staged_by_all_before_anything_stops(purpose: str) -> None:
    story = trained()
    ask(story, purpose)
    orders = story.of(StageStep)
    step = step_ahead(story.state)
    assert [(order.node, order.step) for order in orders] == [("a", step), ("b", step)]
    assert step >= 30 + 2 + 4, "at 0.4 s a step others may be five steps further by now"
    assert not story.of(StopGroup)
    assert story.state.phase == "running"
    assert f"step {step} is staged first" in story.state.reason.text
    story.step(step - 1)
    assert story.state.step == step - 1, "training goes on meanwhile"
    story.succeed(StageStep)
    assert [stop.node for stop in story.of(StopGroup)] == ["a", "b"]
    story.all_stopped(step)
    if purpose == "resize":
        restore = story.one(LaunchGroup).membership.restore
        assert restore is not None and restore.step == step
    else:
        assert story.state.drain is not None and story.state.drain.step == step


def test_the_interruption_begins_when_training_stops() -> None:
    story = trained()
    ask(story, "resize")
    asked_ns = story.now
    story.wait(1.5)
    assert not story.state.incidents
    story.succeed(StageStep)
    assert story.state.incidents[-1].at_ns > asked_ns


@pytest.mark.parametrize(
    "tier",
    [
        {"memory": {"everySteps": 1}},
        {"memory": {"everySteps": 0}, "storage": {"everySeconds": 60}},
    ],
)
def test_who_stages_every_step_is_not_asked(tier: dict[str, Any]) -> None:
    story = trained(**tier)
    ask(story, "resize")
    assert len(story.of(StopGroup)) == 2 and not story.of(StageStep)


def test_a_job_that_has_not_done_a_step_is_not_asked() -> None:
    story = Transcript(spec(checkpoint=RARELY)).started(step=None)
    ask(story, "suspend")
    assert len(story.of(StopGroup)) == 2 and not story.of(StageStep)


def test_no_step_is_ordered_before_it_is_known_how_quick_they_are() -> None:
    """All that is heard at first is the time of a first step, which takes long."""
    story = Transcript(spec(checkpoint=RARELY)).started()
    ask(story, "resize")
    assert not story.of(StageStep) and not story.of(StopGroup)
    story.wait(1.0)
    story.tell(StepCompleted(generation=1, step=30, step_s=0.02))
    assert not story.of(StageStep) and not story.of(StopGroup)
    story.wait(PACE_S - 1.0)
    assert [order.step for order in story.of(StageStep)] == [30 + 2 + 200] * 2
    story.succeed(StageStep)
    assert len(story.of(StopGroup)) == 2


def test_a_leaving_node_without_time_for_that_is_left_at_once() -> None:
    story = Transcript(spec({"min": 2, "max": 2, "spares": 1}, checkpoint=RARELY))
    story.started("a", "b", "c")
    story.tell(PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=5.0))
    assert len(story.of(StopGroup)) == 2 and not story.of(StageStep)


def test_who_cannot_stage_it_holds_nobody_up() -> None:
    story = trained()
    ask(story, "resize")
    order = story.of(StageStep)[1]
    story.fail(order, "rank 2 was past step 36")
    assert len(story.of(StopGroup)) == 2
    assert "b: rank 2 was past step 36" in story.state.notes[-1][1]


def test_who_does_not_answer_is_not_waited_for_long() -> None:
    story = trained()
    ask(story, "resize")
    story.wait(5)
    assert not story.of(StopGroup)
    story.wait(10)
    assert len(story.of(StopGroup)) == 2


def test_a_failure_meanwhile_is_a_failure() -> None:
    story = trained()
    ask(story, "resize")
    story.lose("b")
    assert [stop.node for stop in story.of(StopGroup)] == ["a"]
    assert story.state.quiesce is None
    story.all_stopped(30)
    assert story.state.incidents[-1].rule == "lost-first"


def test_a_hang_meanwhile_is_a_hang() -> None:
    story = trained()
    ask(story, "resize")
    story.tell(HangDetected(generation=1, ranks=(0,), evidence="rank 0 is stopped"))
    story.all_stopped(30)
    assert story.state.incidents[-1].failure_class == "hang"


def test_a_wish_that_is_taken_back_stops_nothing() -> None:
    story = trained()
    ask(story, "suspend")
    late = story.of(StageStep)
    story.now += 1
    story.tell(ResumeRequested())
    assert story.state.quiesce is None and "was withdrawn" in story.state.reason.text
    for order in late:
        assert not story.fail(order, "too late")
    story.wait(60)
    assert not [action for action in story.actions if isinstance(action, StopGroup)]
    assert story.state.phase == "running"


def test_who_cancels_twice_does_not_wait_for_it() -> None:
    story = trained()
    ask(story, "cancel")
    assert not story.of(StopGroup)
    ask(story, "cancel")
    assert len(story.of(StopGroup)) == 2


def test_a_leaving_node_is_asked_while_there_is_time() -> None:
    story = trained(nodes={"min": 2, "max": 2, "spares": 1})
    story.tell(PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=30.0))
    assert len(story.of(StageStep)) == 2
    story.succeed(StageStep)
    assert len(story.of(StopGroup)) == 2
    assert story.state.stop is not None and story.state.stop.leaving == [("b", "got SIGTERM")]


def test_a_leaving_node_without_time_is_left_at_once() -> None:
    story = trained(nodes={"min": 2, "max": 2, "spares": 1})
    story.tell(PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=6.0))
    assert len(story.of(StopGroup)) == 2 and not story.of(StageStep)


def test_a_leaving_node_is_waited_for_a_third_of_its_time_at_most() -> None:
    story = trained(nodes={"min": 2, "max": 2, "spares": 1})
    story.tell(PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=18.0))
    assert len(story.of(StageStep)) == 2
    story.wait(6.1)
    assert len(story.of(StopGroup)) == 2


def test_a_node_that_leaves_soon_is_not_waited_for_whatever_else_is_wanted() -> None:
    leaving = PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=6.0)
    story = trained(nodes={"min": 2, "max": 2})
    story.tell(leaving)
    ask(story, "suspend")
    assert len(story.of(StopGroup)) == 2 and not story.of(StageStep)

    story = trained(nodes={"min": 2, "max": 2})
    ask(story, "suspend")
    story.tell(leaving)
    assert not story.of(StopGroup), "it is told while the step is waited for"
    story.wait(2.1)
    assert len(story.of(StopGroup)) == 2


def test_room_that_comes_and_goes_does_not_call_it_off() -> None:
    """Ranks wait after the step that was ordered; that must not be in vain, again and again."""
    story = trained(nodes={"min": 1, "max": 2})
    story.tell(PreemptionNoticed(node="b", detail="got SIGTERM", grace_s=60.0))
    story.fail(story.one(RequestNodes))
    assert len(story.of(StageStep)) == 2, "there is no room, and one node is enough"
    story.wait(REQUEST_RETRY_S)
    assert story.one(RequestNodes), "there may be room now"
    assert story.state.quiesce is not None
    story.succeed(StageStep)
    assert len([a for a in story.actions if isinstance(a, StopGroup)]) == 2


def test_a_new_controller_asks_once_it_has_heard_of_all() -> None:
    story = trained()
    ask(story, "suspend")
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    assert not story.of(StopGroup)
    for node in ("a", "b"):
        assert not story.of(StageStep)
        ranks = tuple(seat.rank for seat in story.state.launch_actions[node].seats)
        story.tell(NodeJoined(node=node, facts=facts(node), generation=1, ranks=ranks))
    assert len(story.of(StageStep)) == 2
    story.succeed(StageStep)
    assert len(story.of(StopGroup)) == 2


def test_an_order_whose_link_broke_is_no_reason_to_wait() -> None:
    story = trained()
    ask(story, "resize")
    story.tell(ActionUnknown(action_id=story.of(StageStep)[0].action_id))
    assert len(story.of(StopGroup)) == 2
