"""Checkpoints that are damaged, missing or unreadable, and a job with nothing to restore."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.core.actions import (
    CleanStorage,
    CommitManifest,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
)
from holdfast.orchestrator.core.checkpoints import why_nothing_usable
from holdfast.orchestrator.core.events import (
    ActionFailed,
    CheckpointsListed,
    ControllerStarted,
    FromNode,
    ResumeRequested,
    SuspendRequested,
)
from holdfast.orchestrator.core.state import CommittedCheckpoint, Refusal
from holdfast.orchestrator.protocol.facts import Restore, ShardFile
from holdfast.orchestrator.protocol.messages import PreemptionNoticed

from .harness import Transcript, spec

PROBLEM = "step-00000019.gen-1/shard-0: model.weight: damaged checkpoint: a checksum differs"


def shard_files(*keys: tuple[int, int]) -> tuple[ShardFile, ...]:
    return tuple(
        ShardFile(step, generation, shard, 2, f"s{shard}", 1, "c")
        for step, generation in keys
        for shard in range(2)
    )


def _restore(job: Transcript) -> Restore | None:
    membership = job.state.group.membership
    assert membership is not None
    return membership.restore


def _after_the_loss_of_all_memory(*steps: int) -> Transcript:
    """Checkpoints of these steps; a generation restores the newest."""
    job = Transcript().started()
    for step in steps:
        job.commit(step)
    job.exits(0, signal=9)
    job.all_stopped(None)
    job.succeed(LaunchGroup)
    return job


def _reader_fails(job: Transcript, error: str, message: str = PROBLEM) -> None:
    job.exits(0, code=1, step=-1, error_type=error, error_message=message)
    job.all_stopped(None)


def held(*steps: int) -> Transcript:
    job = _after_the_loss_of_all_memory(*steps)
    for _ in steps:
        job.succeed(LaunchGroup)
        _reader_fails(job, "DamagedCheckpoint")
    return job


@pytest.mark.parametrize(
    ("error", "refusal"), [("DamagedCheckpoint", "damaged"), ("MissingCheckpoint", "missing")]
)
def test_a_damaged_or_missing_checkpoint_is_refused_and_the_one_before_used(
    error: str, refusal: Refusal
) -> None:
    job = _after_the_loss_of_all_memory(9, 19)
    _reader_fails(job, error)
    assert len(job.of(LaunchGroup)) == 2
    restore = _restore(job)
    assert restore is not None and restore.step == 9
    newest = job.state.catalog.committed[-1]
    assert (newest.refused, newest.refusal, newest.problem) == (True, refusal, PROBLEM)


def test_a_store_that_cannot_be_read_is_tried_again_with_pauses_and_charges_nothing() -> None:
    job = _after_the_loss_of_all_memory(9, 19)
    charged = dict(job.state.ledger.restarts)
    pauses = []
    for _ in range(7):
        _reader_fails(job, "UnreadableCheckpoint", "the store has no checkpoint; is it mounted?")
        assert not job.of(LaunchGroup)
        assert "is it mounted" in job.state.reason.text
        begin = job.now_ns
        due = job.controller.next_deadline_ns()
        assert due is not None
        job.wait((due - begin) / 1e9)
        assert job.of(LaunchGroup), "memory is lost, so the store is read again"
        pauses.append((due - begin) / 1e9)
        job.succeed(LaunchGroup)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert job.state.ledger.restarts == charged
    restore = _restore(job)
    assert restore is not None and restore.step == 19, "no checkpoint is given up"
    job.step(20)
    job.exits(0, code=1, step=20)
    job.all_stopped(None)
    assert job.state.ledger.num_store_failures == 0


def test_a_job_that_waits_for_its_store_can_be_suspended() -> None:
    job = _after_the_loss_of_all_memory(9)
    _reader_fails(job, "UnreadableCheckpoint", "not mounted")
    job.apply(SuspendRequested())
    assert job.state.phase == "suspended" and "storage" not in job.state.timers


def test_a_new_controller_refuses_what_is_not_in_storage_any_more() -> None:
    job = Transcript().started()
    job.commit(9)
    job.commit(19)
    job.apply(ControllerStarted(incarnation=2, committed=shard_files((9, 1)), listed=True))
    assert [known.refusal for known in job.state.catalog.committed] == ["", "missing"]
    job.apply(ControllerStarted(incarnation=3, committed=shard_files((9, 1), (19, 1)), listed=True))
    assert [known.refusal for known in job.state.catalog.committed] == ["", ""], "it is back"


@pytest.mark.parametrize("listed", [True, False], ids=["not-mounted", "no-answer"])
def test_a_new_controller_refuses_nothing_if_storage_shows_no_checkpoint(listed: bool) -> None:
    job = Transcript().started()
    job.commit(9)
    job.apply(ControllerStarted(incarnation=2, committed=(), listed=listed))
    assert not job.state.catalog.committed[0].refused
    text = "storage has none of the committed checkpoints; it may not be mounted"
    assert ((job.now_ns, text) in job.state.notes) == listed


def test_a_job_whose_checkpoints_are_all_damaged_holds_and_says_which() -> None:
    job = held(9, 19)
    state = job.state
    assert (state.phase, state.reason.code) == ("suspended", "checkpoint")
    assert not job.of(LaunchGroup) and len(job.all(LaunchGroup)) == 6
    for part in ("20 steps is damaged (", "10 steps is damaged (", "model.weight", "--start-over"):
        assert part in state.reason.text
    assert len(job.of(ReleaseNode)) == 2
    assert (job.now_ns, state.hold.text if state.hold else "") in state.notes
    assert [c.step for c in state.catalog.committed] == [9, 19], "refused checkpoints are kept"


def test_a_job_that_holds_holds_again_when_it_is_resumed_without_a_decision() -> None:
    job = held(9)
    job.apply(ResumeRequested())
    job.succeed(RequestNodes)
    job.join("c", "d")
    assert job.state.phase == "suspended" and job.state.hold is not None


def test_a_repaired_checkpoint_lets_a_job_go_on() -> None:
    job = held(9, 19)
    job.apply(CheckpointsListed(files=shard_files((9, 1), (19, 1), (19, 7))))
    job.apply(ResumeRequested())
    job.succeed(RequestNodes)
    job.join("c", "d")
    restore = _restore(job)
    assert restore is not None and restore.directory == "step-00000019.gen-7"
    assert job.state.generation == 8, "the directory of the repaired checkpoint is not written"
    assert job.state.hold is None


def test_a_user_may_start_over_and_refused_checkpoints_stay_until_a_later_one_is_good() -> None:
    job = held(9, 19)
    job.apply(ResumeRequested(start_over=True))
    job.succeed(RequestNodes)
    job.join("c", "d")
    job.succeed(LaunchGroup)
    assert _restore(job) is None
    job.step(0)
    assert job.state.catalog.start_over
    job.commit(9)
    assert not job.state.catalog.start_over, "later losses hold the job again"
    newer = job.state.generation
    kept = [c.key for c in job.state.catalog.committed]
    assert kept == [(19, 1), (9, newer)], "the old one of that step goes"
    job.commit(19)
    assert [c.key for c in job.state.catalog.committed] == [(9, newer), (19, newer)]
    assert job.all(CommitManifest)[-1].generation == job.state.generation


def test_a_job_that_never_committed_a_checkpoint_begins_at_step_0() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    job.all_stopped(None)
    assert len(job.of(LaunchGroup)) == 2 and _restore(job) is None


def test_steps_that_only_heartbeats_reported_count_when_all_nodes_are_lost() -> None:
    job = Transcript().started()
    job.commit(9)
    job.lose("a")
    job.lose("b")
    job.step(20)  # what the last heartbeats say
    incident = job.state.incidents[-1]
    assert incident.step_before == 20 and incident.at_least


def test_a_checkpoint_without_every_value_is_deleted_and_not_committed_again() -> None:
    job = Transcript().started()
    for shard in range(2):
        job.persisted(9, shard)
    job.apply(_not_covered(job))
    assert job.one(CleanStorage).retained.abandoned == (9, 1)
    assert not job.state.catalog.pending and not job.state.catalog.committed
    job.wait(60)
    assert len(job.all(CommitManifest)) == 1


def test_a_finished_job_whose_state_is_not_whole_ends_at_once_and_says_why() -> None:
    job = Transcript().started(step=9)
    for rank in range(4):
        job.exits(rank, code=0, step=9)
    job.all_stopped(9)
    for shard in range(2):
        job.persisted(9, shard)
    job.apply(_not_covered(job))
    assert job.state.phase == "failed" and "model.a lacks 12 values" in job.state.reason.text
    text = "the state after 10 steps was not written to storage (after 10 steps: the 2 shards"
    assert text in job.state.reason.text


def test_a_state_at_risk_whose_shards_are_not_whole_is_not_requested_again() -> None:
    job = Transcript(spec({"min": 2, "max": 2}, workers=1)).started(step=40)
    job.apply(SuspendRequested())
    job.all_stopped(41)
    job.apply(FromNode("b", PreemptionNoticed(detail="spot")))
    job.apply(ResumeRequested())
    assert job.state.drain is not None and job.state.drain.kind == "at-risk"
    for shard in range(2):
        job.persisted(41, shard)
    asked = len(job.all(PersistStep))
    failed = _not_covered(job)
    job.apply(failed)
    assert (job.now_ns, f"not committed: {failed.detail}") in job.state.notes
    job.wait(60)
    assert len(job.all(PersistStep)) == asked


def test_a_reason_to_hold_names_the_newest_checkpoints_and_counts_the_others() -> None:
    job = Transcript().started()
    catalog = job.state.catalog
    catalog.committed = [
        CommittedCheckpoint(step, 1, 2, 1, 0, refused=True, refusal=refusal, problem=problem)
        for step, refusal, problem in ((19, "missing", ""), (29, "", "old"), (9, "damaged", ""))
    ]
    begin = "no committed checkpoint can be used: "
    begin += "that after 30 steps is damaged (old); that after 20 steps is missing; "
    text = begin + "that after 10 steps is damaged. "
    assert why_nothing_usable(job.state).startswith(text)
    catalog.committed.append(CommittedCheckpoint(5, 1, 2, 1, 0, refused=True))
    text = begin + "that after 10 steps is damaged; and 1 more. "
    assert why_nothing_usable(job.state).startswith(text)


def test_a_damaged_checkpoint_stays_refused_although_storage_lists_it() -> None:
    job = _after_the_loss_of_all_memory(9, 19)
    _reader_fails(job, "DamagedCheckpoint")
    files = shard_files((9, 1), (19, 1))
    job.apply(ControllerStarted(incarnation=2, committed=files, listed=True))
    assert [known.refusal for known in job.state.catalog.committed] == ["", "damaged"]


def test_a_missing_checkpoint_older_than_a_good_one_is_given_up() -> None:
    job = Transcript().started()
    job.commit(9)
    job.commit(19)
    job.apply(ControllerStarted(incarnation=2, committed=shard_files((19, 1)), listed=True))
    assert job.one_reason(CleanStorage) == "checkpoint after 10 steps: found missing"


def test_a_missing_checkpoint_that_is_back_lets_a_job_go_on_that_holds() -> None:
    job = _after_the_loss_of_all_memory(9)
    _reader_fails(job, "MissingCheckpoint")
    assert job.state.hold is not None
    job.apply(CheckpointsListed(files=shard_files((9, 1))))
    job.apply(ResumeRequested())
    job.succeed(RequestNodes)
    job.join("c", "d")
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.directory == "step-00000009.gen-1"


def test_a_list_of_checkpoints_changes_nothing_while_workers_run() -> None:
    job = Transcript().started()
    job.commit(9)
    job.apply(CheckpointsListed(files=shard_files((19, 7))))
    assert [known.key for known in job.state.catalog.committed] == [(9, 1)]
    assert job.state.generation == 1 and not job.state.catalog.committed[0].refused


def _not_covered(job: Transcript) -> ActionFailed:
    commit = job.last(CommitManifest)
    detail = "after 10 steps: the 2 shards do not hold every value: model.a lacks 12 values"
    return ActionFailed(action_id=commit.action_id, detail=detail, final=True)
