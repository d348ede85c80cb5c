"""Suspend, resume, cancel, resize and the deadline."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import Recovery, job_from_mapping
from holdfast.orchestrator.core.actions import (
    CommitManifest,
    FinishJob,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    AdjustRequested,
    CancelRequested,
    HeartbeatReceived,
    ResizeRequested,
    ResumeRequested,
    SuspendRequested,
)
from holdfast.orchestrator.core.progress_monitor import ProgressMonitor
from holdfast.orchestrator.core.rank_assignment import check_resize
from holdfast.orchestrator.protocol.facts import Exit

from ..planner.builders import make_job
from .harness import SECOND, Transcript, spec


def test_a_suspended_job_has_its_newest_step_in_storage_and_no_nodes() -> None:
    story = Transcript().started()
    story.tell(SuspendRequested(by="ann"))
    assert story.state.phase == "suspending"
    assert "ann" in story.of(StopGroup)[0].reason.text
    story.all_stopped(33)
    assert story.one(PersistStep).step == 33
    story.commit(33)
    assert sorted(action.node for action in story.of(ReleaseNode)) == ["a", "b"]
    assert story.state.phase == "suspended"
    assert not story.wait(3600)
    story.tell(ResumeRequested())
    assert story.one(RequestNodes).count == 2
    story.succeed(RequestNodes)
    story.join("c", "d")
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.directory == "step-00000033.gen-1"
    assert story.state.restarts == {}


def test_a_resume_before_the_suspension_is_through_goes_on_from_memory() -> None:
    story = Transcript().started()
    story.tell(SuspendRequested())
    story.stopped("a", 33)
    story.tell(ResumeRequested())
    story.stopped("b", 33)
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, restore.directory) == (33, "")


def test_a_resume_while_the_last_step_is_written_goes_on_from_memory() -> None:
    story = Transcript().started()
    story.tell(SuspendRequested())
    story.all_stopped(33)
    story.tell(ResumeRequested())
    assert len(story.of(LaunchGroup)) == 2
    assert story.state.drain is None


def test_a_job_submitted_suspended_asks_for_nothing() -> None:
    story = Transcript(spec(suspend=True))
    assert not story.submit()
    assert story.state.phase == "suspended"
    story.tell(ResumeRequested())
    assert story.one(RequestNodes).count == 2


def test_a_suspension_while_nodes_are_awaited_is_at_once() -> None:
    story = Transcript()
    story.submit()
    story.succeed(RequestNodes)
    story.join("a")
    story.tell(SuspendRequested())
    assert story.state.phase == "suspended"
    assert story.one(ReleaseNode).node == "a"
    assert story.join("b") and story.one(ReleaseNode).node == "b", "it came too late"


def test_a_suspension_during_a_recovery_waits_for_the_stops() -> None:
    story = Transcript().started()
    story.exits(0, signal=9)
    story.tell(SuspendRequested())
    assert not story.fresh
    story.all_stopped(8)
    assert story.one(PersistStep).step == 8
    assert story.state.phase == "suspending"


def test_a_script_is_asked_to_end_before_it_is_killed() -> None:
    story = Transcript(spec(script=True, recovery={"terminationGraceSeconds": 7})).started(
        step=None
    )
    story.tell(SuspendRequested())
    assert {stop.grace_s for stop in story.of(StopGroup)} == {7}
    story.wait(12)
    assert story.state.phase == "suspending", "the grace is added to the time to stop"


@pytest.mark.parametrize("moment", ["pending", "running", "recovering", "suspended", "draining"])
def test_a_job_can_be_cancelled_at_any_moment(moment: str) -> None:
    story = Transcript()
    if moment == "pending":
        story.submit()
    else:
        story.started()
    if moment == "recovering":
        story.exits(0, signal=9)
    if moment in ("suspended", "draining"):
        story.tell(SuspendRequested())
        story.all_stopped(None if moment == "suspended" else 9)
    story.tell(CancelRequested(by="bob"))
    if story.state.stop is not None:
        story.all_stopped(9)
    if story.state.drain is not None:
        assert story.one(PersistStep).step == 9, "what was trained is not lost with the job"
        story.commit(9)
    assert story.last(FinishJob).outcome == "cancelled"
    assert "bob" in story.last(FinishJob).reason.text
    assert story.state.phase == "cancelled"


def test_who_cancels_twice_does_not_wait_for_storage() -> None:
    story = Transcript().started()
    story.tell(CancelRequested(by="bob"))
    story.all_stopped(3)
    assert story.state.phase == "finishing" and story.of(PersistStep)
    story.tell(CancelRequested(by="ann"))
    finish = story.one(FinishJob)
    assert finish.outcome == "cancelled"
    assert "bob" in finish.reason.text and "ann" in finish.reason.text


def test_a_job_that_fails_while_storage_is_out_of_reach_fails_in_the_end() -> None:
    story = Transcript(spec(checkpoint={"storage": {"finalTimeoutSeconds": 30}})).started()
    for step in (4, 5, 6, 7):
        story.exits(1, code=3, step=step)
        story.all_stopped(step)
        story.succeed(LaunchGroup)
    assert story.state.phase == "finishing"
    story.wait(31)
    assert story.state.phase == "failed"
    assert "budget is used up" in story.state.reason.text
    assert "step 7 was not written" in story.state.reason.text


def test_steps_that_were_finished_while_the_stop_was_under_way_count() -> None:
    story = Transcript().started(step=5)
    story.tell(CancelRequested())
    for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
        exits = tuple(Exit(rank=rank, signal=9, by_us=True, step=9) for rank in ranks)
        story.stopped(node, 9, exits=exits)
    assert story.state.step == 9 == story.state.incidents[-1].step_before


def test_a_step_that_is_staged_counts_though_its_ranks_were_ended_before_they_said_so() -> None:
    story = Transcript().started(step=5)
    story.tell(SuspendRequested())
    for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
        exits = tuple(Exit(rank=rank, signal=9, by_us=True, step=8) for rank in ranks)
        story.stopped(node, 9, exits=exits)
    assert story.state.step == 9 == story.state.incidents[-1].step_before


def test_the_last_checkpoint_of_a_failed_job_survives_the_controller() -> None:
    story = Transcript().started()
    story.tell(CancelRequested(by="bob"))
    story.all_stopped(3)
    again = story.replayed()
    assert again.state == story.state and again.state.termination_reason is not None


def test_a_cancelled_job_is_finished_once() -> None:
    story = Transcript().started()
    story.tell(CancelRequested())
    story.all_stopped(3)
    story.tell(CancelRequested())
    story.wait(100)
    assert sum(isinstance(action, FinishJob) for action in story.actions) == 1


def test_a_resize_to_fewer_nodes_is_free_and_gives_nodes_back() -> None:
    story = Transcript().started()
    story.tell(ResizeRequested(nodes=1))
    assert len(story.of(StopGroup)) == 2
    story.all_stopped(5)
    launch = story.one(LaunchGroup)
    assert launch.node == "a" and launch.membership.num_nodes == 1
    story.succeed(LaunchGroup)
    story.step(6)
    assert story.one(ReleaseNode).node == "b"
    assert story.state.restarts == {}
    assert story.state.incidents[0].failure_class is None


def test_a_resize_to_more_nodes_is_made_as_soon_as_they_are_there() -> None:
    story = Transcript().started()
    story.tell(ResizeRequested(nodes=3))
    assert story.one(RequestNodes).count == 1
    story.succeed(RequestNodes)
    assert not story.of(StopGroup)
    story.join("c")
    story.all_stopped(5)
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "b", "c"]


def adjusted(**more: Any) -> AdjustRequested:
    recovery = Recovery(**more).model_dump(mode="json", by_alias=True)
    return AdjustRequested(min_nodes=1, spares=1, recovery=recovery, by="ann")


def test_a_running_job_follows_what_may_change_of_its_spec() -> None:
    story = Transcript().started()
    story.tell(adjusted(replacement_wait_s=40, bad_node_strikes=7))
    assert story.one(RequestNodes).count == 1, "the spare"
    assert story.state.job.spec.recovery.bad_node_strikes == 7
    story.succeed(RequestNodes)
    story.join("c")
    story.lose("b")
    story.all_stopped(5)
    assert [launch.node for launch in story.of(LaunchGroup)][-2:] == ["a", "c"]
    again = story.replayed()
    assert again.state == story.state


def test_silence_is_measured_with_the_limits_as_they_are_now() -> None:
    story = Transcript().started()
    monitor = ProgressMonitor(story.state.job, story.controller)
    monitor.observe(story.now, HeartbeatReceived(node="a", generation=1))
    before = monitor.next_deadline_ns()
    story.tell(adjusted(heartbeat_timeout_s=60))
    monitor.observe(story.now, HeartbeatReceived(node="a", generation=1))
    after = monitor.next_deadline_ns()
    assert before is not None and after is not None
    assert after - before == 57 * SECOND


def test_a_minimum_above_the_size_is_the_size() -> None:
    story = Transcript().started()
    recovery = Recovery().model_dump(mode="json", by_alias=True)
    story.tell(AdjustRequested(min_nodes=9, spares=0, recovery=recovery))
    assert story.state.job.spec.nodes.min == 2
    assert story.state.phase == "running"


def promised(*names: str) -> Transcript:
    """A job that was given nodes which have not come yet."""
    story = Transcript(spec({"min": 1, "max": len(names)}))
    story.submit()
    asked = story.one(RequestNodes).action_id
    story.tell(ActionSucceeded(action_id=asked, nodes=names))
    return story


def test_a_job_that_is_suspended_while_it_waits_gives_back_what_has_not_come() -> None:
    story = promised("a", "b", "c")
    story.tell(SuspendRequested())
    assert {release.node for release in story.of(ReleaseNode)} == {"a", "b", "c"}
    assert story.state.phase == "suspended" and not story.state.pending_nodes
    story.tell(ResumeRequested())
    assert story.one(RequestNodes).count == 3


def test_a_job_that_shrinks_while_it_waits_gives_back_the_newest_promises() -> None:
    story = promised("a", "b", "c")
    story.tell(ResizeRequested(nodes=1))
    assert [release.node for release in story.of(ReleaseNode)] == ["c", "b"]
    story.join("b")
    assert "b" not in story.state.nodes, "it was given back"
    story.join("a")
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a"]


def test_a_resize_that_splits_a_replica_group_is_refused_with_a_fix() -> None:
    story = Transcript(spec({"min": 2, "max": 4}, shard=4)).started("a", "b", "c", "d")
    problem = check_resize(story.state.job, 3)
    assert problem == (
        "nodes: got 3; expected whole replica groups at 2 workers per node; use 2 or 4"
    )
    assert not story.tell(ResizeRequested(nodes=3))
    assert story.state.notes[-1][1] == problem
    assert "at least 1" in check_resize(story.state.job, 0)


def test_a_resize_to_the_present_size_changes_nothing() -> None:
    story = Transcript().started()
    assert not story.tell(ResizeRequested(nodes=2))


def test_a_job_that_runs_past_its_deadline_fails() -> None:
    story = Transcript(spec(activeDeadlineSeconds=60)).started()
    story.wait(61)
    assert len(story.of(StopGroup)) == 2
    story.all_stopped(9)
    story.commit(9)
    finish = story.one(FinishJob)
    assert (finish.outcome, finish.reason.code) == ("failed", "deadline")


def test_the_deadline_does_not_run_while_the_job_is_suspended() -> None:
    story = Transcript(spec(activeDeadlineSeconds=60)).started()
    story.wait(20)
    story.tell(SuspendRequested())
    story.all_stopped(9)
    story.commit(9)
    assert story.state.phase == "suspended"
    story.wait(8 * 3600)
    story.tell(ResumeRequested())
    story.succeed(RequestNodes)
    story.join("c", "d")
    story.succeed(LaunchGroup)
    story.step(10)
    story.wait(39)
    assert story.state.intent == "run" and story.state.phase == "running"
    story.wait(2)
    assert story.state.intent == "deadline" and len(story.of(StopGroup)) == 2


def test_the_document_of_the_tests_is_a_valid_job() -> None:
    assert job_from_mapping(spec()).name == "tale"


def test_storage_by_time_is_asked_for_ahead_of_the_training() -> None:
    story = Transcript(spec(checkpoint={"storage": {"everySeconds": 10}})).started(step=None)
    story.step(0)
    story.step(50)
    assert all(launch.persist_every_steps == 0 for launch in story.state.launch_actions.values())
    story.wait(10.1)
    orders = story.of(PersistStep)
    assert [order.node for order in orders] == ["a", "b"]
    assert {order.step for order in orders} == {62}, "two steps and four seconds ahead"
    story.commit(62)
    assert [c.step for c in story.state.catalog.committed] == [62]
    assert not story.of(CommitManifest)


def test_a_size_with_fewer_workers_than_copies_is_refused_in_words() -> None:
    job = make_job(nodes=(2, 2), workers=1, parallelism={"replicate": 2})
    assert "nodes: got 1; expected whole replica groups" in check_resize(job, 1)
