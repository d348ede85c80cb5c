"""The Python client and holdfast.ray.Trainer on the test cluster."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import Client
from holdfast.orchestrator.client import JobHandle
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.runtime.observe.view import JobView
from holdfast.ray import (
    Checkpoint,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    get_checkpoint,
    get_context,
    report,
)

from ..local.local_rig import ENDLESS, spec
from . import cluster_rig
from .jobs import BOUND_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
EPOCHS = 6


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def test_a_spec_is_submitted_watched_and_deleted(tmp_path: Path) -> None:
    client = Client(ray=cluster_rig.connected().address)
    changes = {"checkpoint": {"path": str(tmp_path / "by-client")}}
    job = client.submit(spec("ray-by-client", 12, **changes))
    view = job.wait(BOUND_S)
    assert (view.state, view.step) == ("succeeded", 11)
    assert any("parameters" in line for line in job.logs(rank=0))
    events = [one["event"]["type"] for one in job.events() if "event" in one]
    assert "job-submitted" in events and "step-completed" in events
    assert "ray-by-client" in [one.name for one in client.jobs()]
    with pytest.raises(UserError, match=r"metadata\.name: got ray-by-client"):
        client.submit(spec("ray-by-client", 12, **changes))
    job.delete()
    assert not list(tmp_path.glob(".holdfast*"))


def seen(job: JobHandle, true_of: Callable[[JobView], bool]) -> JobView:
    """The first view of which this is true."""
    give_up = time.monotonic() + BOUND_S
    while not true_of(view := job.view()):
        assert time.monotonic() < give_up and view.finished_ns is None, view
    return view


@contextmanager
def cancelled_at_the_end(job: JobHandle) -> Iterator[JobHandle]:
    try:
        yield job
    finally:
        if job.view().finished_ns is None:
            job.cancel()
            job.wait(BOUND_S)


def test_a_job_is_resized_suspended_and_reported(tmp_path: Path) -> None:
    client = Client(ray=cluster_rig.connected().address)
    name = "ray-resized"
    changes = {"checkpoint": {"path": str(tmp_path / name), "memory": {"everySteps": 1}}}
    with cancelled_at_the_end(client.submit(spec(name, ENDLESS, **changes))) as job:
        before = seen(job, lambda view: view.world_size == 4 and view.step >= 1)
        lines = job.logs(rank=0, follow=True)
        assert "parameters" in next(iter(lines))
        assert "from 2 to 1 nodes" in job.resize(1)
        smaller = seen(job, lambda view: view.world_size == 2 and view.step > before.step)
        with pytest.raises(UserError, match="Invalid value for 'N'"):
            job.resize(0)
        assert job.suspend()
        stopped = seen(job, lambda view: view.state == "suspended")
        with pytest.raises(TimeoutError, match=f"job {name}: has not ended after 3 s"):
            job.wait(timeout_s=3)
        assert job.resume()
        seen(job, lambda view: view.world_size == 2 and view.step > stopped.step)
        report = job.view()
        assert stopped.step >= smaller.step and 0 < report.goodput < 1
        assert report.num_incidents == 2, "the two planned stops"
        assert report.steps_lost == 0
        assert job.cancel()
        assert job.wait(BOUND_S).state == "cancelled"
        assert any(line.startswith("step ") for line in lines), "the iterator ends with the job"


def train(config: dict[str, Any]) -> None:
    """Training whose worker of rank 1 waits in epoch 3 of its first life, to be killed."""
    start, checkpoint = 0, get_checkpoint()
    place = Path(config["place"])
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start = int(Path(directory, "epoch").read_text()) + 1
    rank = get_context().get_world_rank()
    with (place / f"starts-{rank}").open("a") as starts:
        starts.write(f"{start}\n")
    for epoch in range(start, config["epochs"]):
        if epoch == 3 and start == 0 and rank == 1:
            (place / "pid").write_text(str(os.getpid()))
            time.sleep(1000)
        mine = place / f"state-{rank}"
        mine.mkdir(exist_ok=True)
        (mine / ("epoch" if rank == 0 else f"rank-{rank}")).write_text(str(epoch))
        report(
            {"loss": 1 / (epoch + 1), "epoch": epoch}, checkpoint=Checkpoint.from_directory(mine)
        )


def kill_when_it_waits(place: Path) -> None:
    file = place / "pid"
    give_up = time.monotonic() + BOUND_S
    while not (file.exists() and file.read_text()) and time.monotonic() < give_up:
        time.sleep(0.1)
    psutil.Process(int(file.read_text())).send_signal(signal.SIGKILL)


def test_a_trainer_goes_on_from_its_checkpoint_when_a_worker_is_killed(tmp_path: Path) -> None:
    cluster_rig.connected()
    killer = threading.Thread(target=kill_when_it_waits, args=(tmp_path,))
    killer.start()
    result = Trainer(
        train,
        train_loop_config={"epochs": EPOCHS, "place": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="Killed_Once", storage_path=str(tmp_path / "runs")),
    ).fit()
    killer.join()
    assert result.metrics == {"loss": 1 / EPOCHS, "epoch": EPOCHS - 1}
    assert result.path == str(tmp_path / "runs" / "Killed_Once")
    assert result.checkpoint is not None and result.error is None
    with result.checkpoint.as_directory() as directory:  # of both ranks
        assert {path.name for path in Path(directory).iterdir()} == {"epoch", "rank-1"}
    assert (tmp_path / "starts-0").read_text() == "0\n3\n"
    assert len(result.view.incidents) == 1 and result.view.step == EPOCHS - 1


def broken() -> None:
    raise ValueError("no such data")


def test_a_trainer_raises_the_error_of_a_function_that_fails(tmp_path: Path) -> None:
    cluster_rig.connected()
    with pytest.raises(TrainingFailedError, match="ValueError: no such data"):
        Trainer(broken, run_config=RunConfig(storage_path=str(tmp_path))).fit()
