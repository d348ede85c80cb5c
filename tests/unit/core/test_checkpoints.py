"""The checkpoint catalog: commits, retention, and the choice of what to restore."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.core.actions import (
    CleanStorage,
    CommitManifest,
    FinishJob,
    LaunchGroup,
    Retained,
    StopGroup,
)
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    CancelRequested,
    CheckpointRefused,
    ControllerStarted,
    FromNode,
    SuspendRequested,
)
from holdfast.orchestrator.core.launching import MESHES_KEPT
from holdfast.orchestrator.protocol.facts import ShardFile, StagedShard
from holdfast.orchestrator.protocol.manifest import MAX_NUMBER
from holdfast.orchestrator.protocol.messages import PersistFailed, ShardPersisted

from .harness import Transcript, spec


def _files(step: int, generation: int = 1) -> tuple[ShardFile, ...]:
    return tuple(ShardFile(step, generation, shard, 2, f"s{shard}", 1, "c") for shard in range(2))


def test_a_checkpoint_is_committed_when_all_its_shards_are_durable() -> None:
    job = Transcript().started()
    assert not job.persisted(9, 0)
    assert not job.persisted(9, 0), "the same shard once more"
    job.persisted(9, 1)
    commit = job.one(CommitManifest)
    assert (commit.step, commit.generation) == (9, 1)
    assert [file.shard for file in commit.files] == [0, 1]
    assert not job.state.catalog.committed
    job.succeed(CommitManifest)
    assert [c.key for c in job.state.catalog.committed] == [(9, 1)]


def test_a_shard_of_an_old_generation_is_refused() -> None:
    job = Transcript().started()
    job.persisted(9, 0)
    job.exits(0, signal=9)
    job.all_stopped(12)
    assert not job.persisted(9, 1, generation=1)
    assert "rejected shard 1 of the state after 10 steps" in job.state.notes[-1][1]


@pytest.mark.parametrize(("shard", "num_shards"), [(3, 4), (2, 2)])
def test_a_shard_of_another_mesh_is_refused(shard: int, num_shards: int) -> None:
    job = Transcript().started()
    assert not job.persisted(9, shard, num_shards=num_shards)
    assert not job.state.catalog.pending
    text = f"of the state after 10 steps from n: of {num_shards}, and generation 1 has 2 shards"
    assert job.state.notes[-1][1] == f"rejected shard {shard} {text}"


def test_a_shard_before_the_first_launch_is_refused() -> None:
    job = Transcript()
    job.submit()
    file = _files(9, generation=0)[0]
    assert not job.apply(FromNode("n", ShardPersisted(generation=0, shard=file)))
    assert "of 2, and generation 0 has no shards" in job.state.notes[-1][1]


def test_a_committed_checkpoint_whose_shard_is_reported_late_is_not_deleted() -> None:
    job = Transcript().started(step=9)
    job.commit(9)
    job.exits(0, signal=9)
    job.all_stopped(12)
    job.succeed(LaunchGroup)
    job.persisted(9, 0, generation=1)
    job.commit(19)
    assert job.one(CleanStorage).retained.keep == ((9, 1), (19, 2))


@pytest.mark.parametrize(("memory", "directory"), [(8, "step-00000009.gen-1"), (9, "")])
def test_the_newer_of_memory_and_storage_is_restored_and_memory_at_the_same_step(
    memory: int, directory: str
) -> None:
    job = Transcript().started()
    job.commit(9)
    job.exits(0, signal=9)
    job.all_stopped(memory)
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, restore.directory) == (9, directory)


def test_retention_keeps_the_newest_and_every_nth() -> None:
    keep = {"keepLast": 2, "keepEverySteps": 20}
    job = Transcript(spec(checkpoint={"retention": keep})).started()
    for step in (9, 19, 29, 39, 49):
        job.commit(step)
    assert job.one(CleanStorage).retained == Retained(
        ((19, 1), (39, 1), (49, 1)), newest=(49, 1), abandoned=(49, 1), generation=1
    )
    assert [c.step for c in job.state.catalog.committed] == [19, 39, 49]


def test_the_checkpoint_that_a_generation_restores_is_not_deleted_before_the_job_ends() -> None:
    job = Transcript(spec(checkpoint={"retention": {"keepLast": 1}})).started()
    job.commit(9)
    job.exits(0, signal=9)
    job.all_stopped(None)
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 9
    job.succeed(LaunchGroup)
    job.commit(19)
    assert job.one(CleanStorage).retained.keep == ((9, 1), (19, 2))
    for rank in range(4):
        job.exits(rank)
    job.all_stopped(None)
    assert job.last(FinishJob).retained == Retained(
        ((19, 2),), newest=(19, 2), abandoned=(MAX_NUMBER, MAX_NUMBER), generation=2
    )


def test_an_incomplete_checkpoint_older_than_the_newest_commit_is_deleted() -> None:
    job = Transcript().started()
    job.persisted(9, 0)
    job.commit(19)
    clean = job.one(CleanStorage)
    assert clean.retained.keep == ((19, 1),) and not job.state.catalog.pending
    assert clean.reason.text == "nothing that agents have left is kept"


def test_a_late_write_of_an_old_generation_is_deleted_at_the_next_commit() -> None:
    job = Transcript().started(step=9)
    job.exits(0, signal=9)
    job.all_stopped(12)
    job.succeed(LaunchGroup)
    for shard in range(2):
        job.persisted(9, shard, generation=1)
    assert not job.of(CleanStorage), "no newer checkpoint is committed yet"
    job.commit(19)
    assert job.one(CleanStorage).retained.keep == ((19, 2),)


def test_a_late_write_can_become_the_last_checkpoint_of_a_suspended_job() -> None:
    job = Transcript().started(step=9)
    job.exits(0, signal=9)
    job.all_stopped(9)
    job.succeed(LaunchGroup)
    job.persisted(9, 0, generation=1)
    job.apply(SuspendRequested())
    for node in ("a", "b"):
        job.stopped(node, staged=tuple(StagedShard(9, 1, shard, 2, 100) for shard in range(2)))
    for shard in range(2):
        job.persisted(9, shard, generation=1)
    job.succeed(CommitManifest)
    assert [c.key for c in job.state.catalog.committed] == [(9, 1)]
    assert job.state.phase == "suspended"


def test_a_state_staged_many_generations_ago_can_still_be_written() -> None:
    job = Transcript(spec(recovery={"badNodeStrikes": 100})).started(step=50)
    held = tuple(StagedShard(50, 1, shard, 2, 100) for shard in range(2))

    def interrupted() -> None:
        assert job.state.stop is not None
        for node in list(job.state.stop.waiting):
            job.stopped(node, staged=held)

    for _ in range(MESHES_KEPT + 1):
        job.exits(0, signal=9)
        interrupted()
        job.succeed(LaunchGroup)
        job.wait(10)
    job.apply(CancelRequested())
    interrupted()
    for shard in range(2):
        job.persisted(50, shard, generation=1)
    job.succeed(CommitManifest)
    assert job.state.outcome == "cancelled"
    assert "the state after 51 steps is committed" in job.state.reason.text


def test_a_damaged_checkpoint_falls_back_to_the_one_before() -> None:
    job = Transcript().started()
    job.commit(9)
    job.commit(19)
    job.exits(0, signal=9)
    job.all_stopped(None)
    job.succeed(LaunchGroup)
    job.apply(CheckpointRefused(step=19, generation=1, detail="a checksum differs"))
    assert len(job.of(StopGroup)) == 2
    job.all_stopped(None)
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 9
    assert job.state.incidents[-1].rule == "checkpoint-refused"


def test_a_worker_that_finds_damage_has_the_same_effect() -> None:
    job = Transcript().started()
    job.commit(9)
    job.commit(19)
    job.exits(0, signal=9)
    job.all_stopped(None)
    job.exits(1, code=1, error_type="DamagedCheckpoint", error_message="shard 1: checksum")
    job.all_stopped(None)
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 9
    assert job.state.ledger.restarts == {"infrastructure": 2}


def test_a_state_in_memory_that_no_generation_starts_from_is_replaced_by_storage() -> None:
    job = Transcript().started(step=12)
    job.commit(9)
    job.exits(0, signal=9)
    job.all_stopped(12)
    for _ in range(2):
        job.exits(1, code=1, error_type="UnreadableCheckpoint", error_message="no source")
        staged = job.inventory("a", 12)
        job.stopped("a", staged=tuple(s.__class__(12, 1, s.shard, 2, 1) for s in staged))
        job.stopped("b")
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.directory == "step-00000009.gen-1"


def test_a_failed_commit_is_tried_again() -> None:
    job = Transcript().started()
    job.written(9)
    job.fail(job.one(CommitManifest), "no space left")
    assert job.state.notes[-1][1] == (
        "the manifest after 10 steps was not written (no space left); trying again"
    )
    job.wait(2.1)
    assert job.one(CommitManifest).step == 9


def test_a_damaged_checkpoint_is_noted_and_deleted_with_the_reason() -> None:
    job = Transcript().started()
    job.commit(9)
    job.commit(19)
    job.apply(CheckpointRefused(step=9, generation=1, detail="a checksum differs"))
    assert job.state.notes[-1][1] == "checkpoint after 10 steps is damaged: a checksum differs"
    assert [known.refused for known in job.state.catalog.committed] == [True, False]
    assert not job.of(StopGroup), "the generation did not start from it"
    job.commit(29)
    assert job.one(CleanStorage).reason.text == "checkpoint after 10 steps: found damaged"


def test_a_new_controller_finds_commits_whose_results_were_lost() -> None:
    job = Transcript().started()
    job.written(9)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, committed=_files(9)))
    assert [c.step for c in job.state.catalog.committed] == [9]
    assert not job.of(CommitManifest)


def test_a_new_controller_repeats_a_commit_that_did_not_happen() -> None:
    job = Transcript().started()
    job.written(9)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    again = job.one(CommitManifest)
    job.apply(ActionSucceeded(action_id=again.action_id))
    assert [c.step for c in job.state.catalog.committed] == [9]


def test_a_failed_commit_of_a_generation_that_has_ended_is_tried_again() -> None:
    job = Transcript().started()
    job.written(9)
    job.fail(job.one(CommitManifest), "no space left")
    job.exits(0, signal=9)
    job.all_stopped(5)
    job.wait(2.1)
    assert job.state.generation == 2 and job.last(CommitManifest).generation == 1


def test_directories_of_an_earlier_job_are_restored_and_never_written() -> None:
    job = Transcript()
    job.submit()
    job.apply(ControllerStarted(incarnation=1, committed=_files(99, generation=7)))
    job.succeed()
    job.join("a", "b")
    membership = job.of(LaunchGroup)[0].membership
    assert membership.generation == 8 and membership.restart_count == 0
    assert membership.restore is not None and membership.restore.step == 99


def test_a_failed_write_is_noted() -> None:
    job = Transcript().started()
    job.apply(FromNode("a", PersistFailed(generation=1, step=9, shard=0, detail="no space left")))
    assert "no space left" in job.state.notes[-1][1]


def test_an_incomplete_checkpoint_newer_than_the_commit_is_kept() -> None:
    job = Transcript().started()
    job.persisted(29, 0)
    job.commit(19)
    assert (29, 1) in job.one(CleanStorage).retained.keep
    assert list(job.state.catalog.pending) == [(29, 1)]


@pytest.mark.parametrize("step", [8, 9])
def test_a_shard_that_is_not_newer_than_the_newest_commit_is_not_collected(step: int) -> None:
    job = Transcript().started()
    job.commit(9)
    job.persisted(step, 0)
    assert job.state.catalog.pending == {}


def test_a_new_controller_applies_retention_to_what_it_finds() -> None:
    job = Transcript(spec(checkpoint={"retention": {"keepLast": 1}})).started()
    job.controller = job.replayed()
    files = _files(9) + _files(19)
    job.apply(ControllerStarted(incarnation=2, committed=files, listed=True))
    clean = job.one(CleanStorage)
    assert clean.retained.keep == ((19, 1),)
    assert clean.reason.text == "checkpoint after 10 steps: the newest 1 are kept"


def test_a_new_controller_deletes_nothing_while_storage_has_not_answered() -> None:
    job = Transcript().started()
    job.commit(9)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    assert not job.of(CleanStorage)


def test_a_new_controller_counts_no_checkpoint_whose_deletion_is_under_way() -> None:
    job = Transcript(spec(checkpoint={"retention": {"keepLast": 2}})).started()
    job.commit(9)
    job.commit(19)
    job.apply(CheckpointRefused(step=19, generation=1, detail="a checksum differs"))
    job.commit(29)
    files = _files(9) + _files(19) + _files(29)  # seed 2601922
    job.apply(ControllerStarted(incarnation=2, committed=files, listed=True))
    assert job.one(CleanStorage).retained.keep == ((9, 1), (29, 1)), "not the damaged one"


def test_a_new_controller_commits_nothing_that_an_earlier_one_has_deleted() -> None:
    """The new controller's journal lacks the last decisions."""
    job = Transcript().started()
    for shard in range(2):
        job.persisted(9, shard)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, committed=_files(19) + _files(29), listed=True))
    assert not job.of(CommitManifest) and not job.state.catalog.pending


def test_a_new_controller_does_not_commit_incomplete_sets() -> None:
    job = Transcript().started()
    job.persisted(9, 0)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    assert not job.of(CommitManifest)
    job.persisted(9, 1)
    assert job.one(CommitManifest).step == 9
    job.persisted(9, 1)
    assert not job.of(CommitManifest), "one is under way"


def test_a_checkpoint_that_is_refused_before_the_first_launch_interrupts_nothing() -> None:
    job = Transcript()
    job.submit()
    job.apply(ControllerStarted(incarnation=1, committed=_files(9, generation=3)))
    job.apply(CheckpointRefused(step=9, generation=3, detail="a checksum differs"))
    assert job.state.catalog.committed[0].refused and not job.of(StopGroup)


def test_a_refused_checkpoint_interrupts_only_before_the_first_step() -> None:
    job = Transcript().started()
    job.commit(9)
    job.exits(0, signal=9)
    job.all_stopped(None)
    job.succeed(LaunchGroup)
    job.step(10)
    job.apply(CheckpointRefused(step=9, generation=1, detail="a checksum differs"))
    assert job.state.catalog.committed[0].refused and not job.of(StopGroup)


def test_a_commit_gives_its_size_and_time() -> None:
    job = Transcript().started()
    job.wait(3)
    job.written(9)
    assert job.one_reason(CommitManifest) == "all 2 shards of the state after 10 steps, 200 B"
    job.wait(2)
    job.succeed(CommitManifest)
    (known,) = job.state.catalog.committed
    assert (known.num_bytes, known.num_shards, known.committed_ns) == (200, 2, job.now_ns)
    assert job.state.catalog.last_commit_ns == job.now_ns


def _with_a_late_shard_that_is_drained() -> tuple[Transcript, CommitManifest]:
    """A shard of (9, 1) came late; (9, 1) is drained while the commit of (19, 2) is under way."""
    job = Transcript().started(step=9)
    job.exits(0, signal=9)
    job.all_stopped(9)
    job.succeed(LaunchGroup)
    job.persisted(9, 0, generation=1)
    for shard in range(2):
        job.persisted(19, shard)
    newer = job.one(CommitManifest)
    job.apply(SuspendRequested())
    for node in ("a", "b"):
        job.stopped(node, staged=tuple(StagedShard(9, 1, shard, 2, 100) for shard in range(2)))
    return job, newer


def test_a_state_whose_commit_is_under_way_is_not_deleted_as_a_late_write() -> None:
    job, newer = _with_a_late_shard_that_is_drained()
    for shard in range(2):
        job.persisted(9, shard, generation=1)
    older = job.one(CommitManifest)
    job.apply(ActionSucceeded(action_id=newer.action_id))
    assert job.one(CleanStorage).retained.keep == ((19, 2), (9, 1))
    job.apply(ActionSucceeded(action_id=older.action_id))
    assert [c.key for c in job.state.catalog.committed] == [(19, 2), (9, 1)]
