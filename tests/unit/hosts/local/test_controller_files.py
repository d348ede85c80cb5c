"""A starting controller and the files that it finds in the job directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.runtime.job_runtime import JobRuntime
from tests.unit.runtime.harness import World, drive, make_job


def test_a_controller_file_of_the_previous_controller_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old controller.json names a port that is closed, or that another process has."""
    prepare, seen = JobRuntime.prepare, list[object]()

    async def spied(self: JobRuntime, *, fresh: bool) -> None:
        seen.append(world.directory.controller())
        await prepare(self, fresh=fresh)

    async def scenario() -> None:
        monkeypatch.setattr(JobRuntime, "prepare", spied)
        world.start()
        await world.running()
        place = world.read_place()
        await world.kill_controller()
        world.directory.write_controller(place["address"], place["port"], 0)
        world.start()
        await world.until(lambda view: len(world.service.assembly.links) == 2)
        assert seen == [None, None]
        await world.finish()

    world = World(tmp_path, make_job())
    drive(scenario())


def test_a_removed_log_directory_is_created_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, make_job())
        shutil.rmtree(world.directory.logs)
        world.start()
        await world.running()
        await world.finish()
        assert (world.directory.logs / "controller.log").exists()

    drive(scenario())


def test_a_log_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, make_job())
        world.directory.logs.rmdir()
        world.directory.logs.write_text("")
        world.start()
        with pytest.raises(HoldfastError, match=r"controller\.log: cannot be written"):
            await world.task

    drive(scenario())
