"""The end of a job and its suspension: the newest state goes to storage first."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.core.actions import (
    CommitManifest,
    FinishJob,
    LaunchGroup,
    PersistStep,
    Reason,
    RequestNodes,
)
from holdfast.orchestrator.core.events import (
    ActionFailed,
    ActionSucceeded,
    CancelRequested,
    ControllerStarted,
    FromNode,
    ResumeRequested,
    SuspendRequested,
)
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.orchestrator.protocol.messages import PersistFailed, PreemptionNoticed

from .harness import SECOND, Transcript, spec


def test_the_last_step_is_committed_before_the_job_has_succeeded() -> None:
    job = Transcript().started()
    for rank in range(4):
        job.exits(rank, code=0, step=49)
    assert job.state.phase == "finishing"
    job.all_stopped(49)
    asked = job.of(PersistStep)
    assert [(p.node, p.step) for p in asked] == [("a", 49)], "one node holds all shards"
    job.written(49)
    assert not job.of(FinishJob)
    job.succeed(CommitManifest)
    assert job.one(FinishJob).outcome == "succeeded"


def test_a_script_without_a_session_ends_at_once() -> None:
    job = Transcript(spec(script=True)).started(step=None)
    assert job.state.phase == "running", "its progress is unknown"
    for rank in range(4):
        job.exits(rank, code=0)
    job.all_stopped(None)
    assert job.one(FinishJob).outcome == "succeeded"


def test_a_last_step_that_is_lost_with_a_node_is_trained_again() -> None:
    job = Transcript(spec({"min": 2, "max": 2}, workers=1, shard=2)).started(step=40)
    job.commit(39)
    for rank in range(2):
        job.exits(rank, code=0, step=49)
    job.stopped("a", 49)
    job.lose("b")
    assert job.state.phase == "recovering"
    job.succeed(RequestNodes)
    job.join("c")
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 39


def test_a_last_step_that_cannot_be_written_fails_the_job_after_a_timeout() -> None:
    job = Transcript().started()
    for rank in range(4):
        job.exits(rank, code=0, step=49)
    job.all_stopped(49)
    job.wait(601)
    assert job.one(FinishJob).outcome == "failed", "what was trained is not kept"
    assert "was not written" in job.state.reason.text


def test_the_next_controller_repeats_a_finish_without_a_result() -> None:
    job = Transcript(spec(script=True)).started(step=None)
    for rank in range(4):
        job.exits(rank, code=0)
    job.all_stopped(None)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    assert job.one(FinishJob).outcome == "succeeded"
    job.succeed(FinishJob)
    assert job.state.finish_action is None
    assert not job.join("late"), "after the end nothing happens"


def test_an_incomplete_set_of_shards_is_no_restore_point() -> None:
    job = Transcript(spec({"min": 2, "max": 2}, workers=1, shard=2)).started()
    job.exits(0, signal=9)
    old, new = StagedShard(5, 1, 0, 2, 1), StagedShard(6, 1, 0, 2, 1)
    job.stopped("a", staged=(old, new))
    job.stopped("b", staged=(StagedShard(5, 1, 1, 2, 1),))
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 5


PAIR: dict[str, Any] = {"nodes": {"min": 2, "max": 2}, "workers": 1, "shard": 2}
"""Each of two nodes has a part of the state that the other has not."""


def done(job: Transcript, step: int, ranks: int = 2) -> None:
    """All workers end with exit code 0 after `step`."""
    for rank in range(ranks):
        job.exits(rank, code=0, step=step)


def test_a_last_step_that_storage_has_is_not_written_again() -> None:
    job = Transcript(spec(**PAIR)).started()
    job.commit(49)
    done(job, 49)
    job.all_stopped(49)
    assert not job.of(PersistStep)
    assert job.state.reason.text == "all workers ended with exit code 0"
    assert job.state.phase == "succeeded"
    assert list(job.state.inflight.values()) == [job.one(FinishJob)]


def test_a_lost_node_whose_last_step_storage_has_does_not_matter() -> None:
    job = Transcript(spec(**PAIR)).started()
    job.commit(49)
    done(job, 49)
    job.stopped("a", None)
    job.lose("b")
    assert job.state.phase == "succeeded"


def test_a_lost_node_whose_last_step_another_node_has_does_not_matter() -> None:
    job = Transcript(spec({"min": 1, "max": 2})).started(step=48)
    done(job, 49, 4)
    job.stopped("a", 49)
    job.lose("b")
    assert job.state.phase == "finishing" and job.one(PersistStep).step == 49
    assert job.state.reason == Reason("finish", "writing the state after 50 steps to storage")


def test_a_script_without_any_state_ends_although_a_node_was_lost_with_the_last_step() -> None:
    job = Transcript(spec(script=True)).started(step=None)
    done(job, 7, 4)
    job.stopped("a")
    job.lose("b")
    assert job.state.phase == "succeeded"


@pytest.mark.parametrize("committed", [True, False])
def test_steps_lost_at_the_end_are_trained_again_if_there_is_a_state_to_start_from(
    committed: bool,
) -> None:
    job = Transcript(spec(**PAIR)).started(step=40)
    if committed:
        job.commit(39)
    done(job, 49)
    job.stopped("a", None if committed else 49)
    job.lose("b")
    assert job.state.phase == "recovering" and job.state.needs_placement
    assert job.state.reason.text == "the state after 50 steps was lost with b"
    assert (job.now_ns, job.state.reason.text) in job.state.notes


def test_a_last_step_lost_while_it_is_written_is_trained_again() -> None:
    job = Transcript(spec(**PAIR)).started(step=40)
    done(job, 49)
    job.all_stopped(49)
    assert {action.node for action in job.of(PersistStep)} == {"a", "b"}
    job.lose("b")
    assert job.state.phase == "pending" and job.state.drain is None
    notes = [text for at_ns, text in job.state.notes if at_ns == job.now_ns]
    assert "the state after 50 steps was lost before it was written" in notes
    assert "the state after 50 steps: shards [1] were lost before they were written" in notes


def test_a_suspend_whose_state_is_lost_falls_back_to_what_storage_has() -> None:
    job = Transcript(spec(**PAIR)).started(step=40)
    job.commit(39)
    job.apply(SuspendRequested())
    job.all_stopped(41)
    assert job.state.reason == Reason("suspend", "writing the state after 42 steps to storage")
    assert not job.state.needs_placement
    job.lose("b")
    assert job.state.phase == "suspended"
    assert job.state.reason.text == "nothing had to be written"


def test_a_suspend_without_anything_to_write_is_immediate() -> None:
    job = Transcript(spec(**PAIR)).started(step=40)
    job.commit(41)
    job.apply(SuspendRequested())
    job.all_stopped(41)
    assert not job.of(PersistStep)
    assert (job.state.phase, job.state.reason.text) == ("suspended", "nothing had to be written")
    assert job.state.group.members == ()


def test_after_a_resume_during_the_drain_the_state_may_still_be_at_risk() -> None:
    job = Transcript(spec(**PAIR)).started(step=40)
    job.apply(SuspendRequested())
    job.all_stopped(41)
    job.fail(job.of(PersistStep)[0])
    assert job.state.timers["drain"] == job.now_ns + SECOND
    assert "could not be asked for the state after 42 steps: no room" in job.state.notes[-1][1]
    job.apply(FromNode("b", PreemptionNoticed(detail="spot")))
    job.apply(ResumeRequested())
    assert job.state.phase == "pending"
    assert job.state.drain is not None and job.state.drain.kind == "at-risk"
    assert job.one(RequestNodes).count == 1


def test_after_the_end_no_other_action_is_decided() -> None:
    job = Transcript(spec(recovery={"badNodeStrikes": 1})).started()
    job.exits(2, signal=9)
    job.stopped("a")
    job.apply(CancelRequested())
    job.stopped("b")
    assert list(job.state.ledger.cordoned) == ["b"]
    assert job.fresh == [job.one(FinishJob)]


def test_the_reason_of_a_job_that_ends_early_stays_while_it_writes() -> None:
    job = Transcript().started(step=3)
    job.apply(CancelRequested(by="bob"))
    assert job.state.reason.text == "cancel requested by bob"
    job.all_stopped(3)
    assert job.state.phase == "finishing"
    assert job.state.reason == Reason(
        "cancel", "cancel requested by bob; writing the state after 4 steps to storage"
    )
    job.commit(3)
    text = "cancel requested by bob; the state after 4 steps is committed"
    assert job.state.reason == Reason("cancel", text)


def test_the_last_write_is_requested_from_another_holder_each_time() -> None:
    job = Transcript().started(step=3)
    job.apply(SuspendRequested())
    job.all_stopped(3)
    asked = [job.one(PersistStep).node]
    job.wait(9.9)
    assert not job.of(PersistStep)
    for _ in range(2):
        job.wait(10.0)
        asked.append(job.one(PersistStep).node)
    assert asked == ["a", "b", "a"]


def test_the_node_whose_seat_writes_a_shard_is_asked_first() -> None:
    job = Transcript(spec(workers=1, shard=1)).started("a", "b", step=3)
    job.lose("a")
    job.succeed(RequestNodes)
    job.stopped("b", 3)
    job.join("c")
    assert [launch.node for launch in job.of(LaunchGroup)] == ["c", "b"]
    job.succeed(LaunchGroup)
    job.step(4)
    job.apply(SuspendRequested())
    for node in ("c", "b"):
        job.stopped(node, staged=job.inventory(node, 5)[-1:])
    assert (job.one(PersistStep).node, job.one(PersistStep).step) == ("c", 5)


def test_a_failed_write_is_requested_again_soon_and_explains_a_failed_end() -> None:
    job = Transcript().started(step=3)
    done(job, 3, 4)
    job.all_stopped(3)
    job.apply(FromNode("a", PersistFailed(generation=1, step=3, shard=0, detail="no space left")))
    job.wait(1.0)
    assert job.one(PersistStep).node == "b"
    job.wait(600.0)
    assert job.state.phase == "failed"
    assert job.state.reason.text == (
        "all workers ended with exit code 0, but the state after 4 steps was not written to "
        "storage in 600 s (a could not write shard 0 of the state after 4 steps: no space left); "
        "storage holds no checkpoint"
    )
    assert job.state.notes[-1][1].startswith("the state after 4 steps was not written to storage")


def test_a_failed_commit_explains_a_failed_end() -> None:
    job = Transcript(spec(checkpoint={"storage": {"finalTimeoutSeconds": 30}})).started(step=3)
    job.commit(2)
    done(job, 3, 4)
    job.all_stopped(3)
    for _ in range(2):
        for shard in range(2):
            job.persisted(3, shard)
    job.fail(job.last(CommitManifest), "no space left")
    job.wait(2.0)
    job.fail(job.last(CommitManifest), "no space left")
    job.wait(30.0)
    assert job.state.reason.text.endswith(
        "(the manifest after 4 steps was not written (no space left); trying again); "
        "storage holds the state after 3 steps"
    )


def test_a_finish_that_fails_is_tried_again() -> None:
    job = Transcript(spec(script=True)).started(step=None)
    done(job, -1, 4)
    job.all_stopped(None)
    job.fail(job.one(FinishJob), "the backend is busy")
    assert job.state.notes[-1][1] == "finishing the job failed: the backend is busy; trying again"
    assert not job.wait(4.9)
    job.wait(0.2)
    again = job.one(FinishJob)
    assert again.reason.text == "all workers ended with exit code 0 (trying again)"
    assert not job.apply(ActionFailed(action_id=again.action_id - 1, detail="late"))
    assert not job.apply(ActionSucceeded(action_id=again.action_id - 1))
    assert job.state.finish_action == again.action_id
    assert not job.wait(60)
    job.apply(ActionSucceeded(action_id=again.action_id, detail="a pod is still there"))
    assert job.state.finish_action is None and job.state.inflight == {}
    assert job.state.notes[-1][1] == "a pod is still there"
    assert not job.apply(ControllerStarted(incarnation=3)) and job.state.incarnation == 3


def test_a_job_that_has_ended_awaits_no_other_result() -> None:
    job = Transcript()
    job.submit()
    request = job.one(RequestNodes)
    job.apply(CancelRequested())
    assert list(job.state.inflight.values()) == [job.one(FinishJob)]
    assert not job.apply(ActionSucceeded(action_id=request.action_id, nodes=("a", "b")))
    assert not job.state.supply.promised
