"""Trackers of transformers and Lightning over two starts of a job: one run, and a note of the
incident. With the real packages, in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.orchestrator.protocol.environment import INCIDENTS
from holdfast.orchestrator.protocol.facts import LaunchIncident
from holdfast.workers import worker_transport
from holdfast.workers.integrations import tensorboard_runs
from holdfast.workers.session import agent_channel

KNOWN = LaunchIncident(
    number=1, at_ns=1_790_000_000 * 10**9, failure_class="infrastructure",
    title="worker 1 was killed", last_step=4, world_size_before=1, world_size_after=1,
)  # fmt: skip
COST = "3 steps trained again"


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Rank 0 of a script under Holdfast, whose messages go nowhere."""
    attached = SimpleNamespace(job=SimpleNamespace(name="tiny"))
    monkeypatch.setattr(worker_transport, "attached", attached)
    monkeypatch.setattr(agent_channel, "of_process", lambda: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("HOLDFAST_JOB_ID", "6f52e481")
    monkeypatch.setenv("WANDB_RUN_ID", "6f52e481")
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process after an incident, which counts its loggers from the beginning."""
    tensorboard_runs._num_loggers.clear()
    monkeypatch.setenv(INCIDENTS, msgspec.json.encode([KNOWN]).decode())


def texts_of(folder: Path) -> dict[int, str]:
    """Step -> the note there."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard"
    )
    events = accumulator.EventAccumulator(str(folder), {"tensors": 0})
    events.Reload()
    tag = "holdfast/incidents/text_summary"
    found = events.Tensors(tag) if tag in events.Tags()["tensors"] else []
    return {one.step: one.tensor_proto.string_val[0].decode() for one in found}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}


def train_transformers(out: Path, until: int, report_to: list[str], *callbacks: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="no transformers")
    data = [{"x": torch.ones(4), "labels": torch.ones(1)}] * 64
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=until, per_device_train_batch_size=2, logging_steps=1,
        save_steps=2, use_cpu=True, report_to=report_to, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=Regression(), args=arguments, train_dataset=data, callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")))
    return trainer


def test_transformers_logs_to_one_run_of_tensorboard_with_a_note(
    rank_0: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard")
    from holdfast.integrations import TransformersCallback

    for until in (2, 4):
        train_transformers(tmp_path / "out", until, ["tensorboard"], TransformersCallback())
        starts_again(rank_0)
    (run,) = (tmp_path / "out" / "runs").iterdir()
    assert run.name == "tiny-6f52e481"
    ((step, text),) = texts_of(run).items()
    assert step == 3 and KNOWN.title in text and COST in text
    rank_0.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "mine"))
    train_transformers(tmp_path / "out", 6, ["tensorboard"], TransformersCallback())
    assert list(texts_of(tmp_path / "mine")) == [5]


def test_a_second_trainer_of_a_script_has_a_run_of_its_own(
    rank_0: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard")
    import holdfast.workers.integrations.transformers  # noqa: F401

    tensorboard_runs._num_loggers.clear()
    for until in (2, 4):
        train_transformers(tmp_path / "out", until, ["tensorboard"])
    names = {one.name for one in (tmp_path / "out" / "runs").iterdir()}
    assert names == {"tiny-6f52e481", "tiny-6f52e481-2"}


def test_transformers_tags_its_run_of_mlflow(rank_0: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="no transformers")
    mlflow = pytest.importorskip("mlflow", reason="no mlflow")
    from holdfast.integrations import TransformersCallback, continue_mlflow_run

    rank_0.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    rank_0.setenv("MLFLOW_RUN_ID", "")
    for until in (2, 4):
        os.environ["MLFLOW_RUN_ID"] = ""
        run_id = continue_mlflow_run()
        assert run_id is not None
        tags = mlflow.MlflowClient().get_run(run_id).data.tags
        assert ("holdfast.incident.1" in tags) == (until == 4)
        train_transformers(tmp_path / "out", until, [], TransformersCallback(), in_mlflow(mlflow))
        mlflow.end_run()
        starts_again(rank_0)
    note = mlflow.MlflowClient().get_run(run_id).data.tags["holdfast.incident.1"]
    assert "the last step before it was 4" in tags["holdfast.incident.1"]
    assert KNOWN.title in note and COST in note


def in_mlflow(mlflow: Any) -> Any:
    """Begins the run, as transformers' own callback does, which needs the whole mlflow."""
    import transformers

    class Begin(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            mlflow.start_run()

    return Begin()


def test_a_run_of_wandb_has_the_incident(rank_0: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="no transformers")
    wandb = pytest.importorskip("wandb", reason="no wandb")
    from holdfast.integrations import TransformersCallback

    rank_0.setenv("WANDB_MODE", "offline")
    rank_0.setenv("WANDB_DIR", str(tmp_path))
    rank_0.setenv("WANDB_SILENT", "true")
    for until in (2, 4):
        run = wandb.init(project="p")
        train_transformers(tmp_path / "out", until, ["wandb"], TransformersCallback())
        summary = dict(run.summary)
        wandb.finish()
        assert ("holdfast/incident" in summary) == (until == 4)
        starts_again(rank_0)
    assert run.id == "6f52e481"
    assert summary["holdfast/incident"] == 1 and summary["holdfast/steps_lost"] == 3
    assert COST in summary["holdfast/incident_1"]


def train_lightning(out: Path, until: int, callback: Any, logger: Any = True) -> Any:
    lightning = pytest.importorskip("lightning", reason="no lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=until, default_root_dir=out, callbacks=[callback],
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False, logger=logger,
    )  # fmt: skip
    newest = max(out.glob("lightning_logs/version_*/checkpoints/*.ckpt"), default=None)
    data = DataLoader(TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), batch_size=2)
    trainer.fit(Module(), data, ckpt_path=newest and str(newest))
    return trainer


def test_lightning_logs_to_one_version_of_tensorboard_with_a_note(
    rank_0: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard")
    pytest.importorskip("lightning", reason="no lightning")
    from holdfast.integrations import LightningCallback

    (tmp_path / "lightning_logs" / "version_0").mkdir(parents=True)  # of another job
    for until in (2, 4):
        trainer = train_lightning(tmp_path, until, LightningCallback())
        assert trainer.logger.version == 1
        starts_again(rank_0)
    ((step, text),) = texts_of(tmp_path / "lightning_logs" / "version_1").items()
    assert step == 3 and KNOWN.title in text and COST in text


def test_each_logger_of_a_lightning_script_keeps_its_version(
    rank_0: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard")
    loggers = pytest.importorskip("lightning.pytorch.loggers", reason="no lightning")
    import holdfast.workers.integrations.lightning  # noqa: F401

    def versions(num: int) -> list[int]:
        starts_again(rank_0)
        found = []
        for _ in range(num):
            logger = loggers.TensorBoardLogger(str(tmp_path))
            logger.experiment.add_scalar("x", 1.0, 0)
            logger.finalize("success")
            found.append(logger.version)
        return found

    assert versions(2) == [0, 1]
    assert versions(3) == [0, 1, 2]
    rank_0.setenv("RANK", "1")
    assert versions(1) == [3]
    assert loggers.TensorBoardLogger(str(tmp_path), version=7).version == 7


def test_lightning_tags_its_run_of_mlflow(rank_0: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="no mlflow")
    loggers = pytest.importorskip("lightning.pytorch.loggers", reason="no lightning")
    from holdfast.integrations import LightningCallback

    rank_0.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    starts_again(rank_0)
    uri = (tmp_path / "mlruns").as_uri()
    logger = loggers.MLFlowLogger(tracking_uri=uri)
    train_lightning(tmp_path, 2, LightningCallback(), logger)
    run = mlflow.MlflowClient(uri).get_run(logger.run_id)
    assert "5 steps trained again" in run.data.tags["holdfast.incident.1"]


PLAIN = """
from holdfast.workers.agent.pool import framework_hooks
framework_hooks.install()  # as a worker of Holdfast has it
from transformers.integrations import TensorBoardCallback
from lightning.pytorch.loggers import TensorBoardLogger
assert TensorBoardCallback.on_train_begin.continues_one_run
assert TensorBoardLogger._get_next_version.continues_one_run
"""


def test_a_script_needs_no_line_for_one_run_of_tensorboard() -> None:
    for package in ("tensorboard", "transformers", "lightning"):
        pytest.importorskip(package, reason=f"no {package}")
    subprocess.run([sys.executable, "-c", PLAIN], check=True)
