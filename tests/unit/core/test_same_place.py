"""Failures at one place of the script: a crash of native code on two nodes, a hang three times."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.core.actions import FinishJob, LaunchGroup
from holdfast.orchestrator.core.events import HangDetected
from holdfast.orchestrator.protocol.facts import Stack

from .harness import SECOND, Transcript, spec

ABORT = {
    "signal": 6,
    "error_message": "terminate called after throwing an instance of 'c10::Error'",
    "traceback": 'Traceback\n  File "train.py", line 7, in step\nFatal Python error: Aborted',
}
IDLE = "step (train.py:9)"


def crash(job: Transcript, rank: int, **changed: Any) -> None:
    job.exits(rank, **(ABORT | {"step": 41} | changed))
    job.all_stopped(None)
    job.succeed(LaunchGroup)


def hang(job: Transcript, rank: int, activity: Any = "nothing", place: str = IDLE) -> None:
    job.apply(
        HangDetected(
            generation=job.state.generation, ranks=(rank,), evidence="quiet", basis="behind"
        )
    )
    idle = Stack(rank, "a stack", in_collective=False, activity=activity, place=place)
    job.stopped("a", 0, stacks=(idle,))
    job.stopped("b", 0)
    job.succeed(LaunchGroup)


def ended(job: Transcript) -> FinishJob | None:
    ends = [action for action in job.actions if isinstance(action, FinishJob)]
    return ends[0] if ends else None


def test_a_crash_at_one_place_on_two_nodes_is_the_scripts() -> None:
    job = Transcript().started()
    crash(job, 1)
    assert job.state.incidents[0].failure_class == "infrastructure" and job.state.ledger.strikes
    crash(job, 3)
    end = ended(job)
    assert end is not None and end.outcome == "failed" and end.reason.code == "user-error"
    assert "the script crashed at one place on a and b" in end.reason.text
    assert 'File "train.py", line 7, in step' in end.reason.text
    assert "terminate called" in end.reason.text
    assert job.state.incidents[-1].failure_class == "user"
    assert list(job.state.ledger.strikes) == ["a"]


def test_crashes_of_one_node_are_the_machines() -> None:
    job = Transcript(spec(recovery={"badNodeStrikes": 9})).started()
    for _ in range(4):
        crash(job, 1)
    assert ended(job) is None and len(job.state.ledger.strikes["a"]) == 4


def test_crashes_at_other_places_are_not_compared() -> None:
    job = Transcript().started()
    crash(job, 1)
    crash(job, 3, step=42)
    crash(job, 3, signal=11)
    crash(job, 3, traceback=ABORT["traceback"].replace("line 7", "line 8"))  # type: ignore[attr-defined]
    crash(job, 1, traceback="", error_message="")
    crash(job, 3, traceback="", error_message="")
    assert ended(job) is None


def test_a_crash_long_after_another_is_not_compared() -> None:
    job = Transcript().started()
    crash(job, 1)
    job.now_ns += 3_700 * SECOND
    crash(job, 3)
    assert ended(job) is None


def test_a_third_hang_at_one_line_is_the_scripts_and_names_the_remedy() -> None:
    job = Transcript().started()
    hang(job, 0)
    assert "session.phase() around the wait" in job.state.incidents[0].evidence
    hang(job, 0)
    assert ended(job) is None
    hang(job, 0)
    reason = job.state.reason
    assert job.state.phase == "finishing" and reason.code == "user-error"
    assert "3 times at one place" in reason.text and IDLE in reason.text
    assert "recovery.hangTimeoutSeconds" in reason.text
    assert job.state.ledger.cordoned == {}


def test_hangs_in_reads_or_at_other_lines_are_not_the_scripts() -> None:
    job = Transcript().started()
    for _ in range(3):
        hang(job, 0, activity="reads")
    assert ended(job) is None
    job = Transcript().started()
    for number in range(3):
        hang(job, 0, place=f"step (train.py:{number})")
    assert ended(job) is None
