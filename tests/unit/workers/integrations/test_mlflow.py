"""One MLflow run over the starts of a job, with MLflow's own client. Needs mlflow."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.workers import worker_transport

mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")

from holdfast.integrations import continue_mlflow_run  # noqa: E402


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Rank 0 of a script under Holdfast, with a store of its own."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    monkeypatch.setattr(worker_transport, "attached", SimpleNamespace())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("HOLDFAST_JOB_ID", "job-1")
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-user")  # one for all jobs, from spec.env
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.setenv("MLFLOW_RUN_ID", "")  # so that what the code sets is undone
    return monkeypatch


def start() -> str:
    """A start of the script: what a worker of a new generation does."""
    os.environ["MLFLOW_RUN_ID"] = ""
    mlflow.end_run()
    found = continue_mlflow_run("training")
    with mlflow.start_run() as run:
        mlflow.log_metric("loss", 1.0)
    assert run.info.run_id == found
    return str(found)


def test_each_start_of_a_job_continues_its_run(rank_0: pytest.MonkeyPatch) -> None:
    first = start()
    assert [start(), start()] == [first, first]
    history = mlflow.MlflowClient().get_metric_history(first, "loss")
    assert len(history) == 3
    rank_0.setenv("HOLDFAST_JOB_ID", "job-2")
    assert start() != first


def test_other_ranks_and_other_launchers_get_no_run(rank_0: pytest.MonkeyPatch) -> None:
    rank_0.setenv("RANK", "1")
    assert continue_mlflow_run() is None
    rank_0.setenv("RANK", "0")
    rank_0.setattr(worker_transport, "attached", None)
    assert continue_mlflow_run() is None
    assert os.environ["MLFLOW_RUN_ID"] == ""


def test_a_run_that_the_user_chose_is_left_alone(rank_0: pytest.MonkeyPatch) -> None:
    rank_0.setenv("MLFLOW_RUN_ID", "mine")
    assert continue_mlflow_run() == "mine"
