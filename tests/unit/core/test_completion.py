"""The end of a job: its last step reaches storage first."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import (
    CommitManifest,
    FinishJob,
    LaunchGroup,
    PersistStep,
    RequestNodes,
)
from holdfast.orchestrator.core.events import ControllerStarted
from holdfast.orchestrator.protocol.facts import StagedShard

from .harness import Transcript, spec


def test_the_last_step_is_committed_before_the_job_has_succeeded() -> None:
    job = Transcript().started()
    for rank in range(4):
        job.exits(rank, code=0, step=49)
    assert job.state.phase == "finishing"
    job.all_stopped(49)
    asked = job.of(PersistStep)
    assert [(p.node, p.step) for p in asked] == [("a", 49)], "one node holds all shards"
    job.persisted(49, 0)
    job.persisted(49, 1)
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
