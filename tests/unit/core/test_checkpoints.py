"""The ledger: what counts as committed, what is kept, what is restored."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.core.actions import (
    CommitManifest,
    DeleteCheckpoint,
    LaunchGroup,
    StopGroup,
)
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    CancelRequested,
    CheckpointRefused,
    ControllerStarted,
    PersistFailed,
    SuspendRequested,
)
from holdfast.orchestrator.core.launching import MESHES_KEPT
from holdfast.orchestrator.protocol.facts import ShardFile, StagedShard

from .harness import Transcript, spec


def _files(step: int, generation: int = 1) -> tuple[ShardFile, ...]:
    return tuple(ShardFile(step, generation, shard, 2, f"s{shard}", 1, "c") for shard in range(2))


def test_a_checkpoint_is_committed_when_all_its_shards_are_durable() -> None:
    story = Transcript().started()
    assert not story.persisted(9, 0)
    assert not story.persisted(9, 0), "told again"
    story.persisted(9, 1)
    commit = story.one(CommitManifest)
    assert (commit.step, commit.generation) == (9, 1)
    assert [file.shard for file in commit.files] == [0, 1]
    assert not story.state.catalog.committed
    story.succeed(CommitManifest)
    assert [c.key for c in story.state.catalog.committed] == [(9, 1)]


def test_a_shard_of_an_old_generation_is_refused() -> None:
    story = Transcript().started()
    story.persisted(9, 0)
    story.exits(0, signal=9)
    story.all_stopped(12)
    assert not story.persisted(9, 1, generation=1)
    assert "refused shard 1 of step 9" in story.state.notes[-1][1]


def test_a_shard_of_another_mesh_is_refused() -> None:
    story = Transcript().started()
    assert not story.persisted(9, 3, num_shards=4)
    assert not story.state.catalog.pending


def test_retention_keeps_the_newest_and_every_nth() -> None:
    keep = {"keepLast": 2, "keepEverySteps": 20}
    story = Transcript(spec(checkpoint={"retention": keep})).started()
    gone: list[int] = []
    for step in (9, 19, 29, 39, 49):
        story.commit(step)
        gone += [action.step for action in story.of(DeleteCheckpoint)]
        story.succeed(DeleteCheckpoint)
    assert gone == [9, 29]
    assert [c.step for c in story.state.catalog.committed] == [19, 39, 49]


def test_what_is_restored_from_is_not_deleted_meanwhile() -> None:
    story = Transcript(spec(checkpoint={"retention": {"keepLast": 1}})).started()
    story.commit(9)
    story.exits(0, signal=9)
    story.all_stopped(None)
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 9
    story.succeed(LaunchGroup)
    story.commit(19)
    assert not story.of(DeleteCheckpoint)


def test_an_attempt_that_a_newer_commit_has_overtaken_is_deleted() -> None:
    story = Transcript().started()
    story.persisted(9, 0)
    story.commit(19)
    delete = story.one(DeleteCheckpoint)
    assert (delete.step, delete.written_by) == (9, 1)
    assert "abandoned" in delete.reason.text


def test_an_upload_that_outlived_its_generation_is_deleted_once_a_newer_one_is_committed() -> None:
    story = Transcript().started(step=9)
    story.exits(0, signal=9)
    story.all_stopped(12)
    story.succeed(LaunchGroup)
    for shard in range(2):
        story.persisted(9, shard, generation=1)
    assert not story.of(DeleteCheckpoint), "no newer one is there yet"
    story.commit(19)
    delete = story.one(DeleteCheckpoint)
    assert (delete.step, delete.written_by) == (9, 1)
    story.succeed(DeleteCheckpoint)
    story.commit(29)
    assert not story.of(DeleteCheckpoint)


def test_what_was_written_too_late_may_still_be_the_last_checkpoint_of_a_suspended_job() -> None:
    story = Transcript().started(step=9)
    story.exits(0, signal=9)
    story.all_stopped(9)
    story.succeed(LaunchGroup)
    story.persisted(9, 0, generation=1)
    story.tell(SuspendRequested())
    for node in ("a", "b"):
        story.stopped(node, staged=tuple(StagedShard(9, 1, shard, 2, 100) for shard in range(2)))
    for shard in range(2):
        story.persisted(9, shard, generation=1)
    story.succeed(CommitManifest)
    assert [c.key for c in story.state.catalog.committed] == [(9, 1)]
    assert story.state.phase == "suspended" and not story.state.catalog.late_writes


def test_what_memory_holds_can_be_written_however_many_generations_ago_it_was_staged() -> None:
    story = Transcript(spec(recovery={"badNodeStrikes": 100})).started(step=50)
    held = tuple(StagedShard(50, 1, shard, 2, 100) for shard in range(2))

    def interrupted() -> None:
        assert story.state.stop is not None
        for node in list(story.state.stop.waiting):
            story.stopped(node, staged=held)

    for _ in range(MESHES_KEPT + 1):
        story.exits(0, signal=9)
        interrupted()
        story.succeed(LaunchGroup)
        story.wait(10)
    story.tell(CancelRequested())
    interrupted()
    for shard in range(2):
        story.persisted(50, shard, generation=1)
    story.succeed(CommitManifest)
    assert story.state.outcome == "cancelled" and "step 50 is committed" in story.state.reason.text


def test_a_damaged_checkpoint_falls_back_to_the_one_before() -> None:
    story = Transcript().started()
    story.commit(9)
    story.commit(19)
    story.exits(0, signal=9)
    story.all_stopped(None)
    story.succeed(LaunchGroup)
    story.tell(CheckpointRefused(step=19, generation=1, detail="a checksum differs"))
    assert len(story.of(StopGroup)) == 2
    story.all_stopped(None)
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 9
    assert story.state.incidents[-1].rule == "checkpoint-refused"


def test_a_worker_that_finds_damage_has_the_same_effect() -> None:
    story = Transcript().started()
    story.commit(9)
    story.commit(19)
    story.exits(0, signal=9)
    story.all_stopped(None)
    story.exits(1, code=1, error_type="DamagedCheckpoint", error_message="shard 1: checksum")
    story.all_stopped(None)
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 9
    assert story.state.restarts == {"infrastructure": 2}


def test_memory_from_which_nothing_starts_is_given_up_for_storage() -> None:
    story = Transcript().started(step=12)
    story.commit(9)
    story.exits(0, signal=9)
    story.all_stopped(12)
    for _ in range(2):
        story.exits(1, code=1, error_type="UnreadableCheckpoint", error_message="no source")
        staged = story.inventory("a", 12)
        story.stopped("a", staged=tuple(s.__class__(12, 1, s.shard, 2, 1) for s in staged))
        story.stopped("b")
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.directory == "step-00000009.gen-1"


def test_a_commit_that_failed_is_tried_again() -> None:
    story = Transcript().started()
    story.persisted(9, 0)
    story.persisted(9, 1)
    story.fail(story.one(CommitManifest), "no space left")
    story.wait(2.1)
    assert story.one(CommitManifest).step == 9


def test_a_new_controller_learns_commits_whose_results_it_missed() -> None:
    story = Transcript().started()
    story.persisted(9, 0)
    story.persisted(9, 1)
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2, committed=_files(9)))
    assert [c.step for c in story.state.catalog.committed] == [9]
    assert not story.of(CommitManifest)


def test_a_new_controller_repeats_a_commit_that_did_not_happen() -> None:
    story = Transcript().started()
    story.persisted(9, 0)
    story.persisted(9, 1)
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    again = story.one(CommitManifest)
    story.tell(ActionSucceeded(action_id=again.action_id))
    assert [c.step for c in story.state.catalog.committed] == [9]


@pytest.mark.parametrize("manifest_gone", [False, True])
def test_a_new_controller_repeats_a_deletion(manifest_gone: bool) -> None:
    story = Transcript().started()
    for step in (9, 19, 29):
        story.commit(step)
    assert story.last(DeleteCheckpoint).step == 9
    story.controller = story.replayed()
    files = _files(9) + _files(19) + _files(29)
    # Its manifest goes first; other files may be left.
    story.tell(ControllerStarted(incarnation=2, committed=files[2 * manifest_gone :]))
    assert story.one(DeleteCheckpoint).step == 9
    story.succeed(DeleteCheckpoint)
    assert [c.step for c in story.state.catalog.committed] == [19, 29]


def test_directories_of_an_earlier_job_are_restored_from_and_never_written_into() -> None:
    story = Transcript()
    story.submit()
    story.tell(ControllerStarted(incarnation=1, committed=_files(99, generation=7)))
    story.succeed()
    story.join("a", "b")
    membership = story.of(LaunchGroup)[0].membership
    assert membership.generation == 8 and membership.restart_count == 0
    assert membership.restore is not None and membership.restore.step == 99


def test_a_failed_write_is_noted() -> None:
    story = Transcript().started()
    story.tell(PersistFailed(node="a", generation=1, step=9, shard=0, detail="no space left"))
    assert "no space left" in story.state.notes[-1][1]
