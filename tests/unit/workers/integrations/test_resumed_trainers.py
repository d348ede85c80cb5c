"""Checkpoint from which a trainer resumes, a fake one here; tests/frameworks runs real ones."""

from __future__ import annotations

import os
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.orchestrator.protocol import environment
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.pool import framework_hooks
from holdfast.workers.integrations import patches

SINCE_S = 1_700_000_000
EARLIER, LATER = SINCE_S - 60, SINCE_S + 60


@pytest.fixture(autouse=True)
def started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.RESUME_SINCE, str(SINCE_S * 10**9))
    monkeypatch.setattr(patches, "_begun", set())
    monkeypatch.setattr(patches, "_left_alone", set())
    for name, version in (("transformers", "5.23.1"), ("lightning", "2.6.1")):
        package = ModuleType(name)
        package.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, package)


def trainer_of(**arguments: Any) -> Any:
    """Trainer whose `train` returns where it resumes."""

    class Trainer:
        def __init__(self) -> None:
            self.args = SimpleNamespace(save_only_model=False, **arguments)

        def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **more: Any) -> Any:
            return resume_from_checkpoint

    module = ModuleType("transformers.trainer")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    patches.apply(module, framework_hooks.PATCHES[module.__name__])
    return Trainer()


def checkpoint(path: Path, at_s: float = LATER) -> Path:
    path.mkdir(parents=True)
    for name in ("model.safetensors", "trainer_state.json"):
        (path / name).write_text("{}")
        os.utime(path / name, (at_s, at_s))
    os.utime(path, (at_s, at_s))
    return path


def test_it_passes_over_a_newer_checkpoint_that_the_agent_does_not_offer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10, 15):
        checkpoint(tmp_path / f"checkpoint-{step}")
    monkeypatch.setenv(environment.RESUME_FROM, str(tmp_path.resolve() / "checkpoint-10"))
    trainer = trainer_of(output_dir=str(tmp_path))
    assert trainer.train() == str(tmp_path / "checkpoint-10")


def test_it_goes_on_from_its_own_newest_complete_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "checkpoint-500", EARLIER)
    for number in (5, 20, 100):
        checkpoint(tmp_path / f"checkpoint-{number}")
    (tmp_path / "checkpoint-100" / "trainer_state.json").unlink()
    checkpoint(tmp_path / "other" / "checkpoint-900")
    found = trainer_of(output_dir=str(tmp_path)).train()
    assert found == str(tmp_path / "checkpoint-20")
    assert f"Trainer.train() continues from {found}" in capsys.readouterr().err


@pytest.mark.parametrize("given", [False, True, "elsewhere/checkpoint-1"])
def test_what_the_script_gives_is_left_alone(tmp_path: Path, given: object) -> None:
    checkpoint(tmp_path / "checkpoint-5")
    assert trainer_of(output_dir=str(tmp_path)).train(given) == given
    assert trainer_of(output_dir=str(tmp_path)).train(resume_from_checkpoint=given) == given


def test_checkpoints_of_an_earlier_job_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "checkpoint-500", EARLIER)
    assert trainer_of(output_dir=str(tmp_path)).train() is None
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(environment.RESUME_FROM, "/elsewhere/checkpoint-7")
    assert trainer_of(output_dir=str(tmp_path / "a")).train() is None
    assert "although checkpoint /elsewhere/checkpoint-7 is complete" in capsys.readouterr().err


def test_a_second_training_into_its_folder_begins_at_step_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer_of(output_dir=str(tmp_path)).train() is None
    checkpoint(tmp_path / "checkpoint-5")  # of the first one
    assert trainer_of(output_dir=str(tmp_path)).train() is None
    assert "the second training of this process" in capsys.readouterr().err


def test_searches_and_checkpoints_without_the_optimizer_begin_at_step_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "checkpoint-5")
    trainer = trainer_of(output_dir=str(tmp_path))
    assert trainer.train(trial={"lr": 1}) is None
    trainer.args.save_only_model = True
    assert trainer.train() is None
    assert "save_only_model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("5.23.9", "it is not as expected: train has no resume_from_checkpoint=None"),
        ("5.25.0", "tried with 5.23.0, 5.24.0"),
        (None, "tried with 5.23.0, 5.24.0"),
    ],
)
def test_an_unknown_trainer_is_left_alone_and_named_once(
    version: str | None, why: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(environment.RESUME_FROM, "/out/checkpoint-7")
    monkeypatch.setattr(patches, "_version", lambda package: version or "of an unknown version")
    parameter = "resume_from_checkpoint" if why.startswith("tried") else "resume"
    kind: Any = type("Trainer", (), {"train": eval(f"lambda self, {parameter}=None: {parameter}")})
    module = ModuleType("transformers.trainer")
    module.Trainer = kind  # type: ignore[attr-defined]
    train = kind.train
    for _again in range(2):
        patches.apply(module, "resumed_transformers")
    assert kind.train is train
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and f" is not patched ({why}): Trainer.train() begins" in shown
    assert "although checkpoint /out/checkpoint-7 is complete" in shown


@pytest.mark.parametrize("other_python", [False, True])
def test_the_event_reaches_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_python: bool
) -> None:
    agent, worker = worker_transport.pair()
    if other_python:
        monkeypatch.delitem(vars(worker_transport), "attached", raising=False)
        monkeypatch.setenv(worker_transport.INHERITED, f"{worker.fileno()} 1 2")
    else:
        monkeypatch.setitem(vars(worker_transport), "attached", SimpleNamespace(link=worker))
    checkpoint(tmp_path / "checkpoint-5")
    assert trainer_of(output_dir=str(tmp_path)).train() == str(tmp_path / "checkpoint-5")
    message, _fd = worker_transport.receive(agent)
    assert isinstance(message, worker_protocol.Noted) and "checkpoint-5" in message.text
    assert (worker_transport.INHERITED in os.environ) == other_python, "its pulse goes on"
    agent.close()
    worker.close()


# -- Lightning --------------------------------------------------------------------------------
def connector_of(*folders: Path, phase: str = "fit") -> Any:
    class _CheckpointConnector:
        def __init__(self) -> None:
            writers = [
                SimpleNamespace(dirpath=str(one), save_weights_only=False) for one in folders
            ]
            loop = SimpleNamespace(on_run_start=None)
            self.trainer = SimpleNamespace(
                state=SimpleNamespace(fn=phase),
                checkpoint_callbacks=writers,
                fit_loop=SimpleNamespace(epoch_loop=loop),
            )
            self._loaded_checkpoint: dict[str, Any] = {}

        def dump_checkpoint(self) -> Any:
            return {}

        def resume_start(self, checkpoint_path: Any = None, weights_only: Any = None) -> Any:
            return checkpoint_path

    module = ModuleType("lightning.pytorch.trainer.connectors.checkpoint_connector")
    module._CheckpointConnector = _CheckpointConnector  # type: ignore[attr-defined]
    patches.apply(module, framework_hooks.PATCHES[module.__name__])
    return _CheckpointConnector()


def lightning_file(path: Path, at_s: float) -> None:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x")
    os.utime(path, (at_s, at_s))


def test_lightning_goes_on_from_the_newest_file_of_its_own_folder(tmp_path: Path) -> None:
    own = tmp_path / "own"
    lightning_file(own / "epoch=9.ckpt", EARLIER)
    lightning_file(own / "epoch=1.ckpt", LATER)
    lightning_file(own / "epoch=2.ckpt", LATER + 10)
    (own / "torn.ckpt").write_bytes(b"PK\x03\x04 the beginning")
    lightning_file(tmp_path / "other" / "epoch=3.ckpt", time.time())
    assert connector_of(own).resume_start(None, weights_only=True) == str(own / "epoch=2.ckpt")
    assert connector_of(own).resume_start("given.ckpt") == "given.ckpt"
    assert connector_of(own).resume_start() is None, "the second training"
    assert connector_of(tmp_path / "other", phase="validate").resume_start() is None
