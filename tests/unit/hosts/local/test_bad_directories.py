"""Unusable ports, paths and names: a user error, and nothing is left behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_to_mapping
from holdfast.orchestrator.core.events import JobSubmitted
from holdfast.orchestrator.core.journal import Record
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.hosts.local.job_records import create_job
from holdfast.orchestrator.hosts.local.service import LocalJobHost, run_job
from holdfast.orchestrator.runtime.job_directory import Home
from tests.unit.journal import files
from tests.unit.runtime.harness import make_job

from .harness import JobHarness


def test_a_metrics_port_in_use_is_a_user_error_that_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = make_job(metrics={"port": port})
        with pytest.raises(UserError, match=rf"spec.metrics.port: got {port}, which is in use"):
            run_job(Home(tmp_path / "home").create(job, tmp_path), is_new=True)
    assert list((tmp_path / "home/jobs").iterdir()) == []


async def test_a_checkpoint_path_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = make_job(checkpoint={"path": str(tmp_path / "file/checkpoints")})
    harness = JobHarness(tmp_path / "home", job)
    harness.start()
    with pytest.raises(
        UserError, match=r"spec\.checkpoint\.path: got .*a directory or URL that can be"
    ):
        await harness.task
    assert not harness.directory.journal.exists()


async def test_an_unknown_kind_of_storage_is_a_user_error(tmp_path: Path) -> None:
    harness = JobHarness(tmp_path, make_job(checkpoint={"path": "nonsense://here"}))
    with pytest.raises(UserError, match=r"spec\.checkpoint\.path: got nonsense://here"):
        await LocalJobHost(
            harness.directory, harness.job, make_backend=lambda job, directory: harness.backend
        ).run()


async def test_a_checkpoint_path_of_another_job_is_a_user_error(tmp_path: Path) -> None:
    path = str(tmp_path / "shared")
    first = JobHarness(tmp_path, make_job(checkpoint={"path": path}))
    first.start()
    await first.running()
    assert (await first.finish()).checkpoints
    second = JobHarness(tmp_path, make_job("other", checkpoint={"path": path}))
    second.start()
    with pytest.raises(UserError, match="which holds checkpoints of job tiny"):
        await second.task


async def test_a_running_job_keeps_its_controller_when_another_job_writes_to_its_path(
    tmp_path: Path,
) -> None:
    """Two jobs that start before either has committed cannot detect each other."""
    path = str(tmp_path / "shared")
    first = JobHarness(tmp_path, make_job(checkpoint={"path": path}))
    second = JobHarness(tmp_path, make_job("other", checkpoint={"path": path}))
    for harness in (first, second):
        harness.start()
        await harness.running()
    await second.kill_controller()
    assert (await first.finish()).checkpoints
    second.start()
    await second.until(lambda view: len(second.service.runtime.links) == 2)
    assert (await second.finish()).state == "succeeded"


def test_a_taken_name_is_reported_with_the_state_of_the_job_and_the_fix(tmp_path: Path) -> None:
    home = Home(tmp_path)
    directory = home.create(make_job(), tmp_path)
    submitted = JobSubmitted(job_id="x", spec=job_to_mapping(make_job()), spec_directory="/")
    files.write(directory.journal, Record(1, submitted))
    with pytest.raises(UserError) as raised:
        create_job(home, make_job(), tmp_path)
    assert "metadata.name: got tiny" in str(raised.value)
    assert "(pending)" in str(raised.value)
    assert "holdfast attach tiny" in str(raised.value)
    assert raised.value.exit_code == 2
    with directory.locked(), pytest.raises(UserError, match="holdfast status tiny"):
        create_job(home, make_job(), tmp_path)
    assert [path.name for path in home.jobs.iterdir()] == ["tiny"]


def test_a_name_taken_by_a_damaged_job_is_reported_with_the_damage(tmp_path: Path) -> None:
    home = Home(tmp_path)
    directory = home.create(make_job(), tmp_path)
    directory.journal.mkdir()
    (directory.journal / "00000001").write_bytes(b"no journal at all, but long enough")
    with pytest.raises(UserError, match=r"unreadable .*damaged: byte 0.*`holdfast delete tiny`"):
        create_job(home, make_job(), tmp_path)


def test_a_name_taken_by_an_unreadable_job_comes_without_advice_to_delete_it(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path)
    directory = home.create(make_job(), tmp_path)
    directory.journal.symlink_to("journal")  # a loop
    with pytest.raises(UserError, match=r"unreadable .*journal: cannot be read .*readable") as it:
        create_job(home, make_job(), tmp_path)
    assert "holdfast delete" not in str(it.value)
