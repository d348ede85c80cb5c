"""Unusable ports and paths: a user error, and nothing is left behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.hosts.local.service import LocalJobHost, run_job
from holdfast.orchestrator.runtime.job_directory import Home
from tests.unit.runtime.harness import JobHarness, make_job


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
