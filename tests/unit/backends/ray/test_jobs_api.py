"""What is told of a Ray job's log, which Ray itself begins."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.backends.ray.jobs_api import _Log

SETTING_UP = "2026-11-22 23:32:08,596\tINFO job_manager.py:568 -- Runtime env is setting up.\n"
RUNNING = (
    "Running entrypoint for job holdfast-c1: python -m holdfast.orchestrator.cli.main status\n"
)
SAID = "NAME   STATE\nsmall  running\n"


@pytest.mark.parametrize("preamble", ["", SETTING_UP, SETTING_UP + RUNNING, RUNNING])
@pytest.mark.parametrize("said", [SAID, "one line\n", "no end", "\n", ""])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_the_program_said_is_told_without_what_ray_put_before_it(
    preamble: str, said: str, size: int
) -> None:
    """Ray 2.51 tells only that it sets up; 2.60 also what it runs."""
    told: list[str] = []
    log, whole = _Log(told.append, own=True), preamble + said
    for at in range(0, len(whole), size):
        log.more(whole[at : at + size])
    log.whole(whole)  # fetched once more at the end: nothing is told twice
    log.end()
    assert "".join(told) == said


def test_all_of_it_is_told_where_it_is_asked_for() -> None:
    told: list[str] = []
    log = _Log(told.append, own=False)
    log.whole(SETTING_UP + RUNNING + SAID)
    log.end()
    assert "".join(told) == SETTING_UP + RUNNING + SAID
