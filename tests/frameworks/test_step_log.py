"""The reader of step logs, which reports are judged by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .step_log import StepLog, productive_seconds, step_seconds, trained_twice


def log(place: Path, *rows: tuple[int, float, int]) -> StepLog:
    """Rows of (step, time, launch)."""
    path = place / "steps.jsonl"
    keys = ("step", "time", "launch")
    lines = [json.dumps({**dict(zip(keys, row, strict=True)), "world": 4}) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return StepLog(path)


def test_a_recovery_is_counted_from_the_fault_and_from_the_last_step(tmp_path: Path) -> None:
    steps = log(tmp_path, (1, 10.0, 7), (2, 11.0, 7), (3, 12.0, 7), (2, 20.0, 8), (3, 21.0, 8))
    found = steps.recovery(steps.lines()[:2], 12.5, 1.0)
    assert (found.seconds, found.gap_s) == (7.5, 8.0)
    assert (found.step, found.trained_twice) == (2, 2)


def test_a_launch_that_goes_on_at_the_next_step_trains_none_twice(tmp_path: Path) -> None:
    steps = log(tmp_path, (1, 10.0, 7), (2, 11.0, 7), (3, 20.0, 8))
    assert steps.recovery(steps.lines()[:1], 12.5, 1.0).trained_twice == 0


def test_without_a_next_launch_there_is_no_recovery(tmp_path: Path) -> None:
    steps = log(tmp_path, (1, 10.0, 7), (2, 11.0, 7))
    with pytest.raises(TimeoutError):
        steps.recovery(steps.lines(), 12.0, 0.1)


def test_only_new_steps_are_productive(tmp_path: Path) -> None:
    steps = log(tmp_path, (1, 10.0, 7), (2, 11.0, 7), (3, 12.0, 7), (3, 20.0, 8), (4, 21.0, 8))
    lines = steps.lines()
    assert trained_twice(lines) == 1
    assert step_seconds(lines) == 1.0
    # Steps 1 (as long as a usual one), 2, 3 and 4; step 3 of the second launch is not new.
    assert productive_seconds(lines, 30.0) == 4.0
    assert productive_seconds(lines, 11.5) == 2.0


def test_a_line_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    steps = log(tmp_path, (1, 10.0, 7))
    with steps.path.open("a") as file:
        file.write('{"step": 2, "ti')
    assert [line.step for line in steps.lines()] == [1]
