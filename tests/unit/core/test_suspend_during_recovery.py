"""Found by seed 1000654: a job was suspended while it recovered from an error that would end it.

The same error at the same step for the second time ends a job. If the user has requested a suspend
(or cancel) before all nodes have stopped, that request wins: the job is suspended, no restart is
charged, and a resume tries once more. The simulation counted a restart that never happened, and
the job kept the traceback of an error that had not ended it.
"""

from __future__ import annotations

from holdfast.orchestrator.core.actions import FinishJob, LaunchGroup
from holdfast.orchestrator.core.events import ResumeRequested, SuspendRequested
from tests.unit.core.harness import Transcript


def _fails(transcript: Transcript) -> None:
    transcript.exits(
        1, code=1, step=41, error_type="ValueError", error_message="bad", traceback="Traceback: bad"
    )


def _suspended_with_the_second_error() -> Transcript:
    transcript = Transcript().started(step=41)
    _fails(transcript)
    transcript.all_stopped(41)
    transcript.succeed(LaunchGroup)
    _fails(transcript)
    transcript.tell(SuspendRequested(by="user"))
    assert transcript.state.phase == "recovering"
    transcript.all_stopped()
    return transcript


def test_a_suspend_during_recovery_wins_over_the_error_that_would_end_the_job() -> None:
    transcript = _suspended_with_the_second_error()
    state = transcript.state
    assert state.phase == "suspended" and not transcript.of(FinishJob)
    assert [one.failure_class for one in state.incidents] == ["user", "user"]
    assert state.restarts == {"user": 1}, "no restart follows the second error"
    assert state.incidents[-1].traceback == "Traceback: bad"
    assert state.traceback == "", "no error has ended the job"


def test_after_a_resume_the_error_ends_the_job() -> None:
    transcript = _suspended_with_the_second_error()
    transcript.tell(ResumeRequested(by="user"))
    transcript.join("c", "d")
    transcript.succeed(LaunchGroup)
    _fails(transcript)
    transcript.all_stopped()
    assert transcript.state.phase == "failed"
    assert "twice" in transcript.state.reason.text
    assert transcript.state.restarts == {"user": 1}
    assert transcript.state.traceback == "Traceback: bad"
