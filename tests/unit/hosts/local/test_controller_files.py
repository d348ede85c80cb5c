"""What a controller finds in its job's directory when it begins, and what it needs there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.runtime.job_runtime import JobRuntime
from tests.unit.runtime.harness import World, drive, make_job


def test_a_controller_that_takes_over_is_not_taken_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that one has left says where nobody listens, or somebody else by now."""
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


def test_logs_that_were_removed_to_make_room_are_no_hindrance(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, make_job())
        shutil.rmtree(world.directory.logs)
        world.start()
        await world.running()
        await world.finish()
        assert (world.directory.logs / "controller.log").exists()

    drive(scenario())


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, make_job())
        world.directory.logs.rmdir()
        world.directory.logs.write_text("")
        world.start()
        with pytest.raises(HoldfastError, match=r"controller\.log: cannot be written"):
            await world.task

    drive(scenario())
