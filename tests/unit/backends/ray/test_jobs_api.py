"""The log of a Ray job, with and without the lines that Ray writes first."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.backends.ray.jobs_api import JobLog

SETTING_UP = "2026-11-22 23:32:08,596\tINFO job_manager.py:568 -- Runtime env is setting up.\n"
RUNNING = (
    "Running entrypoint for job holdfast-c1: python -m holdfast.orchestrator.cli.main status\n"
)
OUTPUT = "NAME   STATE\nsmall  running\n"


@pytest.mark.parametrize("preamble", ["", SETTING_UP, SETTING_UP + RUNNING, RUNNING])
@pytest.mark.parametrize("output", [OUTPUT, "one line\n", "no end", "\n", ""])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_programs_output_is_passed_on_once_without_rays_lines(
    preamble: str, output: str, size: int
) -> None:
    """Ray 2.51 writes only that it sets up; 2.60 also the entrypoint."""
    parts: list[str] = []
    log, whole = JobLog(parts.append, own=True), preamble + output
    for at in range(0, len(whole), size):
        log.read(whole[at : at + size])
    log.read_whole(whole)
    log.end()
    assert "".join(parts) == output


def test_the_whole_log_is_passed_on_where_it_is_wanted() -> None:
    parts: list[str] = []
    log = JobLog(parts.append, own=False)
    log.read_whole(SETTING_UP + RUNNING + OUTPUT)
    log.end()
    assert "".join(parts) == SETTING_UP + RUNNING + OUTPUT
