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


def test_at_the_end_the_last_step_reaches_storage_before_the_job_is_over() -> None:
    story = Transcript().started()
    for rank in range(4):
        story.exits(rank, code=0, step=49)
    assert story.state.phase == "finishing"
    story.all_stopped(49)
    asked = story.of(PersistStep)
    assert [(p.node, p.step) for p in asked] == [("a", 49)], "one node holds all shards"
    story.persisted(49, 0)
    story.persisted(49, 1)
    assert not story.of(FinishJob)
    story.succeed(CommitManifest)
    assert story.one(FinishJob).outcome == "succeeded"


def test_a_script_without_a_session_ends_at_once() -> None:
    story = Transcript(spec(script=True)).started(step=None)
    assert story.state.phase == "running", "its progress is unknown"
    for rank in range(4):
        story.exits(rank, code=0)
    story.all_stopped(None)
    assert story.one(FinishJob).outcome == "succeeded"


def test_a_node_lost_with_the_last_step_has_it_computed_again() -> None:
    story = Transcript(spec({"min": 2, "max": 2}, workers=1, shard=2)).started(step=40)
    story.commit(39)
    for rank in range(2):
        story.exits(rank, code=0, step=49)
    story.stopped("a", 49)
    story.lose("b")
    assert story.state.phase == "recovering"
    story.succeed(RequestNodes)
    story.join("c")
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 39


def test_a_last_step_that_cannot_be_written_does_not_hold_the_job_for_ever() -> None:
    story = Transcript().started()
    for rank in range(4):
        story.exits(rank, code=0, step=49)
    story.all_stopped(49)
    story.wait(601)
    assert story.one(FinishJob).outcome == "failed", "what was trained is not kept"
    assert "was not written" in story.state.reason.text


def test_the_finish_is_carried_out_by_the_next_controller_if_need_be() -> None:
    story = Transcript(spec(script=True)).started(step=None)
    for rank in range(4):
        story.exits(rank, code=0)
    story.all_stopped(None)
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    assert story.one(FinishJob).outcome == "succeeded"
    story.succeed(FinishJob)
    assert story.state.finish_action is None
    assert not story.join("late"), "after the end nothing happens"


def test_an_unfinished_pair_of_shards_is_no_restore_point() -> None:
    story = Transcript(spec({"min": 2, "max": 2}, workers=1, shard=2)).started()
    story.exits(0, signal=9)
    old, new = StagedShard(5, 1, 0, 2, 1), StagedShard(6, 1, 0, 2, 1)
    story.stopped("a", staged=(old, new))
    story.stopped("b", staged=(StagedShard(5, 1, 1, 2, 1),))
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 5
