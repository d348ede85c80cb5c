"""A starting controller and the files that it finds in the job directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.runtime.job_runtime import JobRuntime
from tests.unit.runtime.harness import drive, make_job

from .harness import JobHarness


def test_a_controller_file_of_the_previous_controller_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old controller.json names a port that is closed, or that another process has."""
    prepare, seen = JobRuntime.prepare, list[object]()

    async def spied(self: JobRuntime, *, fresh: bool) -> None:
        seen.append(harness.directory.controller())
        await prepare(self, fresh=fresh)

    async def scenario() -> None:
        monkeypatch.setattr(JobRuntime, "prepare", spied)
        harness.start()
        await harness.running()
        place = harness.read_place()
        await harness.kill_controller()
        harness.directory.write_controller(place["address"], place["port"], 0)
        harness.start()
        await harness.until(lambda view: len(harness.service.runtime.links) == 2)
        assert seen == [None, None]
        await harness.finish()

    harness = JobHarness(tmp_path, make_job())
    drive(scenario())


async def test_a_removed_log_directory_is_created_again(tmp_path: Path) -> None:
    harness = JobHarness(tmp_path, make_job())
    shutil.rmtree(harness.directory.logs)
    harness.start()
    await harness.running()
    await harness.finish()
    assert (harness.directory.logs / "controller.log").exists()


async def test_a_log_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    harness = JobHarness(tmp_path, make_job())
    harness.directory.logs.rmdir()
    harness.directory.logs.write_text("")
    harness.start()
    with pytest.raises(HoldfastError, match=r"controller\.log: cannot be written"):
        await harness.task
