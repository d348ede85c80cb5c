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
    Reason,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    AdjustRequested,
    CancelRequested,
    FromNode,
    ResizeRequested,
    ResumeRequested,
    SuspendRequested,
)
from holdfast.orchestrator.core.progress_monitor import ProgressMonitor
from holdfast.orchestrator.core.rank_assignment import check_resize
from holdfast.orchestrator.protocol.facts import Exit
from holdfast.orchestrator.protocol.messages import Heartbeat, PreemptionNoticed

from ..planner.builders import make_job
from .harness import SECOND, Transcript, spec


def test_a_suspend_commits_the_newest_step_and_releases_all_nodes() -> None:
    job = Transcript().started()
    job.apply(SuspendRequested(by="ann"))
    assert job.state.phase == "suspending"
    assert "ann" in job.of(StopGroup)[0].reason.text
    job.all_stopped(33)
    assert job.one(PersistStep).step == 33
    job.commit(33)
    assert sorted(action.node for action in job.of(ReleaseNode)) == ["a", "b"]
    assert job.state.phase == "suspended"
    assert not job.wait(3600)
    job.apply(ResumeRequested())
    assert job.one(RequestNodes).count == 2
    job.succeed(RequestNodes)
    job.join("c", "d")
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.directory == "step-00000033.gen-1"
    assert job.state.ledger.restarts == {}


def test_a_resume_during_the_stop_restores_from_memory() -> None:
    job = Transcript().started()
    job.apply(SuspendRequested())
    job.stopped("a", 33)
    job.apply(ResumeRequested())
    job.stopped("b", 33)
    assert job.state.phase == "recovering"
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, restore.directory) == (33, "")


def test_a_resume_during_the_drain_restores_from_memory() -> None:
    job = Transcript().started()
    job.apply(SuspendRequested())
    job.all_stopped(33)
    job.apply(ResumeRequested())
    assert len(job.of(LaunchGroup)) == 2
    assert job.state.drain is None and job.state.phase == "recovering"


def test_a_job_submitted_suspended_requests_no_nodes() -> None:
    job = Transcript(spec(suspend=True))
    assert not job.submit()
    assert job.state.phase == "suspended"
    job.apply(ResumeRequested())
    assert job.one(RequestNodes).count == 2


def test_a_suspend_without_workers_is_immediate() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.join("a")
    job.apply(SuspendRequested())
    assert job.state.phase == "suspended"
    assert job.one(ReleaseNode).node == "a"
    assert job.join("b") and job.one(ReleaseNode).node == "b", "it joined too late"


def test_a_suspend_during_a_recovery_waits_for_the_stops() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    job.apply(SuspendRequested())
    assert not job.fresh
    job.all_stopped(8)
    assert job.one(PersistStep).step == 8
    assert job.state.phase == "suspending"


def test_a_script_gets_its_termination_grace_period() -> None:
    job = Transcript(spec(script=True, recovery={"terminationGraceSeconds": 7})).started(step=None)
    job.apply(SuspendRequested())
    assert {stop.grace_s for stop in job.of(StopGroup)} == {7}
    job.wait(12)
    assert job.state.phase == "suspending", "the grace period is added to the stop timeout"


@pytest.mark.parametrize("moment", ["pending", "running", "recovering", "suspended", "draining"])
def test_a_job_can_be_cancelled_in_any_phase(moment: str) -> None:
    job = Transcript()
    if moment == "pending":
        job.submit()
    else:
        job.started()
    if moment == "recovering":
        job.exits(0, signal=9)
    if moment in ("suspended", "draining"):
        job.apply(SuspendRequested())
        job.all_stopped(None if moment == "suspended" else 9)
    job.apply(CancelRequested(by="bob"))
    if job.state.stop is not None:
        job.all_stopped(9)
    if job.state.drain is not None:
        assert job.one(PersistStep).step == 9, "the trained steps are not lost with the job"
        job.commit(9)
    assert job.last(FinishJob).outcome == "cancelled"
    assert "bob" in job.last(FinishJob).reason.text
    assert job.state.phase == "cancelled"


def test_a_second_cancel_does_not_wait_for_storage() -> None:
    job = Transcript().started()
    job.apply(CancelRequested(by="bob"))
    job.all_stopped(3)
    assert job.state.phase == "finishing" and job.of(PersistStep)
    job.apply(CancelRequested(by="ann"))
    finish = job.one(FinishJob)
    assert finish.outcome == "cancelled"
    assert "bob" in finish.reason.text and "ann" in finish.reason.text


def test_a_failed_job_ends_although_storage_does_not_answer() -> None:
    job = Transcript(spec(checkpoint={"storage": {"finalTimeoutSeconds": 30}})).started()
    for step in (4, 5, 6, 7):
        job.exits(1, code=3, step=step)
        job.all_stopped(step)
        job.succeed(LaunchGroup)
    assert job.state.phase == "finishing"
    job.wait(31)
    assert job.state.phase == "failed"
    assert "budget is used up" in job.state.reason.text
    assert "the state after 8 steps was not written" in job.state.reason.text


@pytest.mark.parametrize(("wanted", "reported"), [(CancelRequested(), 9), (SuspendRequested(), 8)])
def test_steps_finished_during_the_stop_count_also_where_ranks_did_not_report_them(
    wanted: CancelRequested | SuspendRequested, reported: int
) -> None:
    job = Transcript().started(step=5)
    job.apply(wanted)
    for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
        exits = tuple(Exit(rank=rank, signal=9, by_us=True, step=reported) for rank in ranks)
        job.stopped(node, 9, exits=exits)
    assert job.state.step == 9 == job.state.incidents[-1].step_before


def test_a_replay_keeps_the_reason_of_a_job_that_ends_early() -> None:
    job = Transcript().started()
    job.apply(CancelRequested(by="bob"))
    job.all_stopped(3)
    again = job.replayed()
    assert again.state == job.state and again.state.termination_reason is not None


def test_a_cancelled_job_is_finished_once() -> None:
    job = Transcript().started()
    job.apply(CancelRequested())
    job.all_stopped(3)
    job.apply(CancelRequested())
    job.wait(100)
    assert sum(isinstance(action, FinishJob) for action in job.actions) == 1


def test_a_resize_to_fewer_nodes_is_not_charged_and_releases_nodes() -> None:
    job = Transcript().started()
    job.apply(ResizeRequested(nodes=1))
    assert len(job.of(StopGroup)) == 2
    job.all_stopped(5)
    launch = job.one(LaunchGroup)
    assert launch.node == "a" and launch.membership.num_nodes == 1
    job.succeed(LaunchGroup)
    job.step(6)
    assert job.one(ReleaseNode).node == "b"
    assert job.state.ledger.restarts == {}
    assert job.state.incidents[0].failure_class is None


def test_a_resize_to_more_nodes_starts_when_all_have_joined() -> None:
    job = Transcript().started()
    job.apply(ResizeRequested(nodes=3))
    assert job.one(RequestNodes).count == 1
    job.succeed(RequestNodes)
    assert not job.of(StopGroup)
    job.join("c")
    job.all_stopped(5)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "b", "c"]


def adjusted(**more: Any) -> AdjustRequested:
    recovery = Recovery(**more).model_dump(mode="json", by_alias=True)
    return AdjustRequested(min_nodes=1, spares=1, recovery=recovery, by="ann")


def test_a_running_job_follows_changes_of_its_spec() -> None:
    job = Transcript().started()
    job.apply(adjusted(replacement_wait_s=40, bad_node_strikes=7))
    assert job.one(RequestNodes).count == 1, "the spare"
    assert job.state.job.spec.recovery.bad_node_strikes == 7
    job.succeed(RequestNodes)
    job.join("c")
    job.lose("b")
    job.all_stopped(5)
    assert [launch.node for launch in job.of(LaunchGroup)][-2:] == ["a", "c"]
    again = job.replayed()
    assert again.state == job.state


def test_the_heartbeat_timeout_follows_changes_of_the_spec() -> None:
    job = Transcript().started()
    monitor = ProgressMonitor(job.state.job, job.controller)
    monitor.observe(job.now_ns, FromNode("a", Heartbeat(generation=1)))
    before = monitor.next_deadline_ns()
    job.apply(adjusted(heartbeat_timeout_s=60))
    monitor.observe(job.now_ns, FromNode("a", Heartbeat(generation=1)))
    after = monitor.next_deadline_ns()
    assert before is not None and after is not None
    assert after - before == 57 * SECOND


def test_a_minimum_above_the_size_is_the_size() -> None:
    job = Transcript().started()
    recovery = Recovery().model_dump(mode="json", by_alias=True)
    job.apply(AdjustRequested(min_nodes=9, spares=0, recovery=recovery))
    assert job.state.job.spec.nodes.min == 2
    assert job.state.phase == "running"


def promised(*names: str) -> Transcript:
    """A job with promised nodes that have not joined."""
    job = Transcript(spec({"min": 1, "max": len(names)}))
    job.submit()
    asked = job.one(RequestNodes).action_id
    job.apply(ActionSucceeded(action_id=asked, nodes=names))
    return job


def test_a_suspend_releases_promised_nodes() -> None:
    job = promised("a", "b", "c")
    job.apply(SuspendRequested())
    assert {release.node for release in job.of(ReleaseNode)} == {"a", "b", "c"}
    assert job.state.phase == "suspended" and not job.state.supply.promised
    job.apply(ResumeRequested())
    assert job.one(RequestNodes).count == 3


def test_a_resize_to_fewer_nodes_releases_the_newest_promised_nodes() -> None:
    job = promised("a", "b", "c")
    job.apply(ResizeRequested(nodes=1))
    assert [release.node for release in job.of(ReleaseNode)] == ["c", "b"]
    job.join("b")
    assert "b" not in job.state.nodes, "it was released"
    job.join("a")
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a"]


def test_a_resize_that_splits_a_replica_group_is_refused_with_a_fix() -> None:
    job = Transcript(spec({"min": 2, "max": 4}, shard=4)).started("a", "b", "c", "d")
    problem = check_resize(job.state.job, 3)
    assert problem == (
        "nodes: got 3; expected whole replica groups at 2 workers per node; use 2 or 4"
    )
    assert not job.apply(ResizeRequested(nodes=3))
    assert job.state.notes[-1][1] == problem
    assert "at least 1" in check_resize(job.state.job, 0)


def test_a_resize_to_the_present_size_changes_nothing() -> None:
    job = Transcript().started()
    assert not job.apply(ResizeRequested(nodes=2))


def test_a_job_that_runs_past_its_deadline_fails() -> None:
    job = Transcript(spec(activeDeadlineSeconds=60)).started()
    job.wait(61)
    assert len(job.of(StopGroup)) == 2
    job.all_stopped(9)
    job.commit(9)
    finish = job.one(FinishJob)
    assert (finish.outcome, finish.reason.code) == ("failed", "deadline")


def test_the_deadline_does_not_run_while_the_job_is_suspended() -> None:
    job = Transcript(spec(activeDeadlineSeconds=60)).started()
    job.wait(20)
    job.apply(SuspendRequested())
    job.all_stopped(9)
    job.commit(9)
    assert job.state.phase == "suspended"
    job.wait(8 * 3600)
    job.apply(ResumeRequested())
    job.succeed(RequestNodes)
    job.join("c", "d")
    job.succeed(LaunchGroup)
    job.step(10)
    job.wait(39)
    assert job.state.intent == "run" and job.state.phase == "running"
    job.wait(2)
    assert job.state.intent == "deadline" and len(job.of(StopGroup)) == 2


def test_the_document_of_the_tests_is_a_valid_job() -> None:
    assert job_from_mapping(spec()).name == "tale"


def test_storage_by_time_requests_a_step_ahead_of_the_training() -> None:
    job = Transcript(spec(checkpoint={"storage": {"everySeconds": 10}})).started(step=None)
    job.step(0)
    job.step(50)
    assert all(launch.persist_every_steps == 0 for launch in job.state.group.launches.values())
    job.wait(10.1)
    orders = job.of(PersistStep)
    assert [order.node for order in orders] == ["a", "b"]
    assert {order.step for order in orders} == {62}, "two steps and four seconds ahead"
    job.wait(5)
    job.commit(62)
    assert [c.step for c in job.state.catalog.committed] == [62]
    assert not job.of(CommitManifest)
    job.wait(4.8)
    assert not job.of(PersistStep)
    job.wait(0.1)
    text = "the last checkpoint is 5 s old; one is wanted every 10 s"
    assert job.one_reason(PersistStep) == text


def test_a_size_with_fewer_workers_than_replicas_is_refused() -> None:
    job = make_job(nodes=(2, 2), workers=1, parallelism={"replicate": 2})
    assert "nodes: got 1; expected whole replica groups" in check_resize(job, 1)


def test_a_resume_during_the_stop_waits_for_nodes_as_a_recovery() -> None:
    job = Transcript(spec({"min": 2, "max": 2})).started()
    job.apply(SuspendRequested())
    job.lose("b")
    job.apply(ResumeRequested())
    assert job.state.phase == "suspending" and not job.of(RequestNodes)
    job.stopped("a", 33)
    assert job.state.phase == "recovering"
    assert job.state.reason == Reason("resume", "resumed before it was suspended")
    assert job.one(RequestNodes).count == 1


def test_a_suspend_of_a_finishing_job_is_noted_only() -> None:
    job = Transcript().started()
    for rank in range(4):
        job.exits(rank, code=0, step=9)
    job.apply(SuspendRequested(by="ann"))
    assert job.state.intent == "run"
    assert job.state.notes[-1][1] == "suspend: the job is finishing already"


def test_the_first_suspend_gives_the_reason_and_a_cancel_overrides_it() -> None:
    job = Transcript().started()
    job.apply(SuspendRequested(by="ann"))
    job.apply(SuspendRequested(by="bob"))
    assert job.state.intent_reason == "suspend requested by ann"
    assert job.state.reason.text == "suspend requested by ann"
    job.apply(CancelRequested())
    assert (job.state.intent, job.state.intent_reason) == ("cancel", "cancel requested")
    job.apply(SuspendRequested(by="ann"))
    job.apply(ResumeRequested(by="ann"))
    assert job.state.intent == "cancel"
    job.all_stopped(3)
    job.commit(3)
    assert job.state.phase == "cancelled"


def test_a_resize_to_the_present_size_is_not_pending() -> None:
    job = Transcript().started()
    job.apply(ResizeRequested(nodes=2))
    assert not job.state.resize_pending
    job.apply(ResizeRequested(nodes=3))
    assert job.state.resize_pending and job.state.target_nodes == 3


def test_some_workers_that_are_done_do_not_finish_the_job() -> None:
    job = Transcript().started()
    for rank in range(3):
        job.exits(rank, code=0, step=9)
    assert job.state.phase == "running"
    job.exits(3, code=1, step=9)
    assert job.state.phase == "recovering"


def test_all_workers_that_are_done_finish_the_job_with_the_reason() -> None:
    job = Transcript().started()
    for rank in range(4):
        job.exits(rank, code=0, step=9)
    assert job.one_reason(StopGroup) == "all 4 workers ended with exit code 0"
    assert job.state.incidents == [] and job.state.reason.code == "finish"


def test_a_job_that_grows_gathers_nodes_and_drops_them_when_they_leave() -> None:
    job = Transcript(spec({"min": 1, "max": 4}, shard="auto")).started("a", "b", step=None)
    job.wait(5)
    job.succeed(LaunchGroup)
    job.step(0)
    job.join("c")
    assert "grow" in job.state.timers
    job.lose("c")
    assert "grow" not in job.state.timers
    job.wait(20)
    job.join("d")
    job.wait(4.9)
    assert not job.of(StopGroup)
    job.wait(0.1)
    assert job.one_reason(StopGroup) == "3 nodes are usable, 2 are used"


def test_no_size_is_changed_before_the_first_step() -> None:
    job = Transcript(spec({"min": 1, "max": 3}, shard="auto")).started("a", "b", step=None)
    job.wait(5)
    job.join("c")
    job.apply(ResizeRequested(nodes=1))
    assert not job.of(StopGroup) and job.state.phase == "starting"
    job.succeed(LaunchGroup)
    job.step(0)
    assert job.one_reason(StopGroup) == "from 2 to 1 nodes, as requested"


def test_a_deadline_gives_its_length_as_the_reason() -> None:
    job = Transcript(spec(activeDeadlineSeconds=60)).started()
    job.wait(60)
    reason = "the job has run for its activeDeadlineSeconds of 60 s"
    assert job.state.reason == Reason("deadline", reason)
    job.all_stopped(None)
    assert job.state.phase == "failed" and job.state.reason.text == reason


def test_a_deadline_that_passes_during_a_suspend_counts_after_a_resume() -> None:
    job = Transcript(spec(activeDeadlineSeconds=60)).started()
    job.wait(59)
    job.apply(SuspendRequested())
    job.wait(2)
    assert job.state.intent == "suspend"
    job.apply(ResumeRequested())
    assert job.state.intent == "deadline"


def test_a_deadline_between_two_generations_ends_the_job_at_once() -> None:
    document = spec({"min": 2, "max": 2}, activeDeadlineSeconds=60)
    job = Transcript(document).started()
    job.wait(55)
    job.lose("b")
    job.fail(job.one(RequestNodes))
    job.stopped("a", None)
    assert job.state.phase == "pending"
    job.wait(5)
    assert job.state.phase == "failed" and job.state.reason.code == "deadline"


def test_a_third_of_a_leaving_nodes_time_is_for_training() -> None:
    job = Transcript(spec({"min": 2, "max": 2}, 2, 4)).started()
    job.apply(FromNode("b", PreemptionNoticed(detail="spot", grace_s=30.0)))
    assert job.state.timers["preempt"] == job.now_ns + 10 * SECOND
    unknown = Transcript(spec({"min": 2, "max": 2}, 2, 4)).started()
    unknown.apply(FromNode("b", PreemptionNoticed(detail="spot")))
    assert unknown.state.timers["preempt"] == unknown.now_ns + 2 * SECOND


def test_starting_over_is_a_decision_about_a_job_that_holds_only() -> None:
    job = Transcript().started()
    job.commit(9)
    job.apply(SuspendRequested())
    job.all_stopped(9)
    assert job.state.phase == "suspended"
    job.apply(ResumeRequested(start_over=True))
    assert not job.state.catalog.start_over
    job.succeed(RequestNodes)
    job.join("c", "d")
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 9
