"""Checkpoints that a script writes by itself are known to the next generation, on any node."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import LaunchGroup, RequestNodes, StopGroup
from holdfast.orchestrator.core.events import CollectivesBegun, FromNode, ResumeRequested
from holdfast.orchestrator.core.own_checkpoints import MAX_KNOWN
from holdfast.orchestrator.protocol.facts import OwnCheckpoint
from holdfast.orchestrator.protocol.messages import OwnCheckpointRead, OwnCheckpointSeen

from .harness import Transcript, spec


def written(path: str, generation: int = 1, times: int = 1, **more: bool) -> FromNode:
    return FromNode("a", OwnCheckpointSeen(generation=generation, path=path, times=times, **more))


def restarted() -> Transcript:
    """A script that reports no steps trains in generation 2."""
    job = Transcript(spec({"min": 1, "max": 1}, script=True)).started(step=None)
    job.apply(CollectivesBegun(generation=1))
    job.apply(written("/o/ckpt.pt", times=2))
    job.exits(0, signal=9)
    job.all_stopped(None)
    assert job.one_reason(LaunchGroup).endswith("; the script last wrote /o/ckpt.pt")
    job.succeed(LaunchGroup)
    return job


def notes(job: Transcript) -> str:
    return "\n".join(text for _at, text in job.state.notes)


def test_the_last_written_checkpoints_are_known_with_their_most_writes() -> None:
    job = Transcript().started()
    for number in range(MAX_KNOWN + 5):
        job.apply(written(f"/o/step-{number}"))
    job.apply(written("/o/ckpt.pt", times=2))
    job.apply(written("/o/step-60", generation=2))
    job.apply(written("/o/ckpt.pt", generation=2))
    known = list(job.state.own.written.values())
    assert len(known) == MAX_KNOWN
    assert known[-2] == OwnCheckpoint(path="/o/step-60", generation=2)
    assert known[-1] == OwnCheckpoint(path="/o/ckpt.pt", generation=2, times=2)


def test_a_script_that_would_overwrite_a_checkpoint_it_has_not_read_is_held() -> None:
    job = restarted()
    job.apply(CollectivesBegun(generation=2))
    job.apply(written("/o/ckpt.pt", 2, unread=True, waits=True))
    assert job.one(StopGroup).grace_s == 0, "it would save when it is asked to end"
    job.all_stopped(None)
    assert (job.state.phase, job.state.reason.code) == ("suspended", "checkpoint")
    text = job.state.reason.text
    assert "has not opened /o/ckpt.pt, and would write over it" in text
    assert "resume tale --start-over` trains from step 0" in text
    assert "began at step 0" in job.state.incidents[0].evidence
    job.apply(ResumeRequested())
    job.succeed(RequestNodes)
    job.join("c")
    job.succeed(LaunchGroup)
    job.apply(written("/o/ckpt.pt", 3, unread=True, waits=True))
    assert job.state.phase == "suspending", "it has not read it again"


def test_a_user_may_have_a_script_start_over() -> None:
    job = restarted()
    job.apply(written("/o/ckpt.pt", 2, unread=True, waits=True))
    job.all_stopped(None)
    job.apply(ResumeRequested(start_over=True))
    assert job.state.own.written == {} and not job.state.catalog.start_over
    job.succeed(RequestNodes)
    job.join("c")
    assert job.one(LaunchGroup).membership.generation == 3


def test_with_warn_the_job_goes_on_and_the_report_has_it() -> None:
    job = restarted()
    job.apply(CollectivesBegun(generation=2))
    job.apply(written("/o/ckpt.pt", 2, unread=True))
    assert not job.of(StopGroup) and job.state.phase == "running"
    assert "has not opened /o/ckpt.pt, and writes over it" in job.state.reason.text
    assert "began at step 0" in job.state.incidents[0].evidence


def test_an_old_generation_holds_nothing() -> None:
    job = restarted()
    job.apply(written("/o/ckpt.pt", 1, unread=True, waits=True))
    assert job.state.hold is None and not job.of(StopGroup)


def test_training_without_a_read_checkpoint_is_remarked_on() -> None:
    job = restarted()
    job.apply(CollectivesBegun(generation=2))
    assert "rank 0 trains, and has not opened a checkpoint such as /o/ckpt.pt" in notes(job)
    other = restarted()
    other.apply(FromNode("a", OwnCheckpointRead(generation=2, path="/o/ckpt.pt")))
    other.apply(CollectivesBegun(generation=2))
    assert "has not opened" not in notes(other)


def test_the_remark_names_what_earlier_generations_wrote_again_and_again() -> None:
    job = restarted()
    job.apply(written("/o/checkpoint-20"))
    job.apply(written("/o/new.pt", generation=2, times=3))
    job.apply(CollectivesBegun(generation=2))
    assert "has not opened a checkpoint such as /o/ckpt.pt" in notes(job)


ERROR = {"code": 1, "error_type": "EOFError", "error_message": "Ran out of input"}


def test_a_checkpoint_that_a_failed_start_had_read_is_not_the_first_choice_again() -> None:
    job = restarted()
    for path in ("/o/checkpoint-10", "/o/checkpoint-20"):
        job.apply(written(path))
    for generation, path in ((2, "/o/checkpoint-20"), (3, "/o/checkpoint-10")):
        read = FromNode("a", OwnCheckpointRead(generation=generation, path=f"{path}/state.json"))
        job.apply(read)
        assert job.state.incidents[-1].decision.endswith(f"; it read {path}")
        job.apply(written("/o/checkpoint-10"))  # reported again over a new connection
        job.exits(0, **ERROR)
        job.all_stopped(None)
        assert job.state.own.written[path].failed
        assert f"the start that read {path} failed" in notes(job)
        job.succeed(LaunchGroup)
    job.apply(FromNode("a", OwnCheckpointRead(generation=4, path="/o/ckpt.pt")))
    job.exits(0, **ERROR)
    job.all_stopped(None)
    assert (job.state.phase, job.state.reason.code) == ("failed", "user-error"), "none is left"


def test_an_error_after_the_training_began_is_not_the_checkpoints() -> None:
    job = restarted()
    job.apply(written("/o/checkpoint-20"))
    job.apply(FromNode("a", OwnCheckpointRead(generation=2, path="/o/checkpoint-20")))
    job.apply(CollectivesBegun(generation=2))
    job.exits(0, **ERROR)
    job.all_stopped(None)
    assert not job.state.own.written["/o/checkpoint-20"].failed
