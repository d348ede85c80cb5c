"""Hangs, budgets, strikes, repeated mistakes, announced losses and failed launches."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import (
    CommitManifest,
    FinishJob,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.events import HangDetected, PreemptionNoticed, WorkerExited
from holdfast.orchestrator.protocol.facts import Exit

from .harness import Transcript, spec, stack


def test_a_hang_is_stopped_with_stacks_and_names_its_culprit() -> None:
    story = Transcript().started(step=10)
    story.tell(HangDetected(generation=1, ranks=(3, 0, 1, 2), evidence="rank 3 is stopped"))
    stops = story.of(StopGroup)
    assert all(stop.stacks for stop in stops)
    story.stopped("a", 10)
    story.stopped("b", 10, stacks=(stack(3), stack(2, True)))
    incident = story.state.incidents[0]
    assert (incident.failure_class, incident.culprit_node, incident.culprit_rank) == (
        "hang",
        "b",
        3,
    )
    assert incident.stacks == {3: "stack of 3", 2: "stack of 2"}
    assert story.state.restarts == {"hang": 1}


def test_a_hang_of_an_old_generation_is_nothing() -> None:
    story = Transcript().started()
    story.exits(0, signal=9)
    story.all_stopped(3)
    assert not story.tell(HangDetected(generation=1, ranks=(0,), evidence="late"))


def test_the_same_exception_at_the_same_step_twice_fails_fast_with_its_traceback() -> None:
    story = Transcript().started()
    crash = {
        "code": 1,
        "step": 41,
        "error_type": "ValueError",
        "error_message": "bad sample",
        "traceback": 'Traceback\n  File "train.py", line 7, in step\nValueError: bad sample',
    }
    story.exits(1, **crash)
    story.all_stopped(41)
    assert len(story.of(LaunchGroup)) == 2
    story.succeed(LaunchGroup)
    story.exits(3, **crash)
    story.all_stopped(41)
    assert not story.of(LaunchGroup)
    assert story.one(PersistStep).step == 41, "what was trained is not lost with the job"
    story.commit(41)
    finish = story.one(FinishJob)
    assert finish.outcome == "failed" and finish.reason.code == "user-error"
    assert "ValueError after step 41, twice" in finish.reason.text
    assert "line 7" in story.state.traceback


def test_the_same_exception_at_another_step_is_only_charged() -> None:
    story = Transcript().started()
    for step in (4, 5, 6):
        story.exits(1, code=1, step=step, error_type="ValueError", error_message="x")
        story.all_stopped(step)
        assert story.of(LaunchGroup)
        story.succeed(LaunchGroup)
    assert story.state.restarts == {"user": 3}
    story.exits(1, code=1, step=7, error_type="ValueError", error_message="x")
    story.all_stopped(7)
    story.commit(7)
    assert story.one(FinishJob).reason.code == "budget"


def test_a_checkpoint_of_another_model_is_not_tried_twice() -> None:
    story = Transcript().started(step=None)
    story.exits(0, code=1, step=-1, error_type="OtherModel", error_message="F32[64], not F32[32]")
    story.all_stopped()
    finish = story.one(FinishJob)
    assert (finish.outcome, finish.reason.code) == ("failed", "user-error")
    assert "F32[64], not F32[32]" in finish.reason.text


def test_a_budget_is_a_window() -> None:
    story = Transcript(
        spec(recovery={"budgets": {"infrastructure": {"restarts": 1, "windowSeconds": 60}}})
    ).started()
    for _ in range(3):
        story.exits(2, signal=9)
        story.all_stopped(5)
        assert story.of(LaunchGroup), story.state.reason
        story.succeed(LaunchGroup)
        story.wait(61)
    story.exits(2, signal=9)
    story.all_stopped(5)
    story.succeed(LaunchGroup)
    story.exits(2, signal=9)
    story.all_stopped(5)
    story.commit(5)
    assert story.one(FinishJob).outcome == "failed"
    assert "infrastructure budget is used up" in story.state.reason.text


def test_ten_lost_nodes_are_not_the_users_fault() -> None:
    story = Transcript(spec({"min": 1, "max": 2})).started()
    for number in range(10):
        story.lose(story.state.members[0])
        story.succeed(RequestNodes)
        story.all_stopped(number)
        story.join(f"n{number}")
        assert story.of(LaunchGroup)
        story.succeed(LaunchGroup)
    assert story.state.restarts == {"infrastructure": 10}


def test_a_node_blamed_again_and_again_is_not_used_again() -> None:
    story = Transcript(spec({"min": 1, "max": 2}, recovery={"badNodeStrikes": 2})).started()
    story.exits(2, signal=9)
    story.all_stopped(3)
    story.succeed(LaunchGroup)
    story.step(4)
    story.exits(3, signal=9)
    story.stopped("a", 5)
    story.stopped("b", 5)
    request = story.one(RequestNodes)
    assert (request.count, request.avoid) == (1, ("b",))
    story.succeed(RequestNodes)
    story.join("c")
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]
    story.succeed(LaunchGroup)
    story.step(6)
    assert story.one(ReleaseNode).node == "b"


def test_a_node_that_lacks_a_gpu_is_replaced_at_once_whoever_told() -> None:
    story = Transcript(spec({"min": 2, "max": 2, "spares": 1})).started("a", "b", "c", step=40)
    lacking = {"code": 1, "error_type": "DeviceMissing", "error_message": "got 0 GPUs; expected 2"}
    story.exits(2, signal=9, step=40)
    story.all_stopped(40)
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "b"]
    story.succeed(LaunchGroup)
    story.exits(3, step=-1, **lacking)
    story.exits(2, step=-1, **lacking)
    story.all_stopped(40)
    incident = story.state.incidents[-1]
    assert (incident.failure_class, incident.rule) == ("infrastructure", "device-missing")
    assert (incident.culprit_node, incident.culprit_rank) == ("b", 3)
    launches = story.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "c"], "the spare has its place"
    assert launches[0].membership.restore.step == 40
    assert story.state.catalog.distrusted == {}, "the state is not to blame"
    story.succeed(LaunchGroup)
    story.step(41)
    assert story.state.phase == "running"
    assert story.one(ReleaseNode).node == "b"
    assert "b cannot be used: worker 3 on b raised DeviceMissing" in story.state.released_nodes["b"]
    assert story.state.restarts == {"infrastructure": 2}


def test_a_cordoned_node_whose_memory_nobody_needs_makes_room_for_its_replacement() -> None:
    story = Transcript(spec({"min": 1, "max": 1})).started("a", step=None)
    story.exits(0, code=1, error_type="DeviceMissing", error_message="got 1 GPU; expected 2")
    story.all_stopped()
    assert story.one(ReleaseNode).node == "a"
    assert story.one(RequestNodes).avoid == ("a",)
    story.succeed(RequestNodes, ReleaseNode)
    assert [launch.node for launch in story.join("b") if isinstance(launch, LaunchGroup)] == ["b"]


def test_a_cordoned_node_writes_what_only_its_memory_has_and_then_makes_room() -> None:
    """Its replacement may wait for the GPUs that it holds."""
    story = Transcript(spec({"min": 1, "max": 1})).started("a", step=40)
    story.exits(0, code=1, error_type="DeviceMissing", error_message="got 1 GPU; expected 2")
    story.all_stopped(40)
    assert {action.node: action.step for action in story.of(PersistStep)} == {"a": 40}
    story.fail(story.one(RequestNodes))
    assert not story.of(ReleaseNode)
    story.persisted(40, 0)
    story.persisted(40, 1)
    story.succeed(CommitManifest)
    assert story.one(ReleaseNode).node == "a"
    story.join("b")
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, bool(restore.directory)) == (40, True)


def test_a_rehearsed_failure_is_neither_charged_nor_held_against_the_node() -> None:
    from holdfast.orchestrator.core.events import FaultInjected

    story = Transcript().started()
    story.tell(FaultInjected(kind="kill-worker", node="b", rank=2))
    story.exits(2, signal=9)
    story.all_stopped(3)
    assert story.state.incidents[0].fault_injected
    assert story.state.restarts == {} and story.state.strikes == {}


def test_an_announced_loss_is_replaced_before_it_happens() -> None:
    story = Transcript().started()
    story.tell(PreemptionNoticed(node="b", detail="spot"))
    assert story.one(RequestNodes).count == 1
    assert not story.of(StopGroup), "it trains on until somebody can take its place"
    story.succeed(RequestNodes)
    story.join("c")
    assert [stop.reason.code for stop in story.of(StopGroup)] == ["preemption"] * 2
    story.all_stopped(30)
    launches = story.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "c"]
    story.succeed(LaunchGroup)
    story.step(31)
    assert story.one(ReleaseNode).node == "b", "given back once nobody needs its memory"
    assert story.state.restarts == {"preemption": 1}


def test_a_failed_launch_is_charged_to_its_node() -> None:
    story = Transcript().started(step=None)
    story.exits(0, signal=9)
    story.all_stopped(None)
    story.fail(story.of(LaunchGroup)[1], "cannot fork")
    story.all_stopped(None)
    incident = story.state.incidents[-1]
    assert (incident.rule, incident.culprit_node) == ("launch-failed", "b")


def test_a_launch_without_an_answer_is_said_again_and_then_given_up() -> None:
    story = Transcript()
    story.submit()
    story.succeed(RequestNodes)
    story.join("a", "b")
    story.wait(15.1)
    assert len(story.of(LaunchGroup)) == 2
    story.wait(15.1)
    assert len(story.of(StopGroup)) == 2


def test_facts_of_an_old_generation_are_noted_and_nothing_else() -> None:
    story = Transcript().started()
    story.exits(0, signal=9)
    story.all_stopped(3)
    before = len(story.actions)
    late = Exit(rank=0, signal=9)
    story.tell(WorkerExited(node="a", generation=1, exit=late))
    assert story.persisted(3, 0, generation=1) == []
    assert len(story.actions) == before
    assert len(story.state.notes) == 2
