"""Jobs that a Trainer makes of its parameters, and parameters that it rejects by name."""

from __future__ import annotations

import importlib.util
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import ray as holdfast_ray
from holdfast.orchestrator.client.ray_trainer import _result, workers_per_node
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.runtime.observe.view import JobView
from holdfast.ray import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TorchConfig,
    TorchTrainer,
    Trainer,
    get_context,
    report,
)


def train(config: dict[str, Any]) -> None:
    print(config)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Trainer(train, datasets={"train": []}), "datasets: got {'train'"),
        (lambda: Trainer(train, resume_from_checkpoint="x"), "resume_from_checkpoint: got 'x'"),
        (lambda: ScalingConfig(use_tpu=True), "use_tpu: got True"),
        (lambda: ScalingConfig(num_workers=0), "num_workers: got 0"),
        (lambda: ScalingConfig(num_workers=(3, 2)), r"num_workers: got \(3, 2\)"),
        (lambda: ScalingConfig(placement_strategy="SPREAD"), "placement_strategy: got 'SPREAD'"),
        (lambda: ScalingConfig(resources_per_worker={"GPU": 0.5}), r"\['GPU'\]: got 0.5"),
        (lambda: ScalingConfig(resources_per_worker={"TPU": 1}), "resources_per_worker: got 'TPU'"),
        (lambda: RunConfig(storage_path="s3://bucket/runs"), "storage_path: got 's3://bucket"),
        (lambda: RunConfig(callbacks=[1]), r"callbacks: got \[1\]"),
        (lambda: FailureConfig(max_failures=-1), "max_failures: got -1"),
        (lambda: CheckpointConfig(num_to_keep=0), "num_to_keep: got 0"),
        (lambda: ScalingConfig(num_workers=[2, 4]), r"num_workers: got \[2, 4\]"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(num_workers=(2, 4, 8)), "num_workers: got"),  # type: ignore[arg-type]
        (
            lambda: ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0}),
            r"\['GPU'\]: got 0; expected 1 or more with use_gpu=True",
        ),
        (lambda: ScalingConfig(resources_per_worker={"GPU": -1}), r"\['GPU'\]: got -1"),
        (
            lambda: ScalingConfig(elastic_resize_monitor_interval_s=30),
            "elastic_resize_monitor_interval_s: got 30",
        ),
        (lambda: RunConfig(storage_path=Path("/runs"), verbose=1), "verbose: got 1"),
        (lambda: RunConfig(log_to_file=True), "log_to_file: got True"),
        (lambda: FailureConfig(fail_fast=True), "fail_fast: got True"),
        (lambda: FailureConfig(controller_failure_limit=2), "controller_failure_limit: got 2"),
        (lambda: FailureConfig(preemption_grace_s=5.0), "preemption_grace_s: got 5.0"),
        (lambda: CheckpointConfig(checkpoint_at_end=True), "checkpoint_at_end: got True"),
        (lambda: TorchConfig(backend="mpi"), "backend: got 'mpi'"),
        (lambda: TorchConfig(init_method="tcp"), "init_method: got 'tcp'"),
        (lambda: TorchConfig(timeout_s=0), "timeout_s: got 0"),
        (
            lambda: Trainer(train, torch_config=TorchConfig(backend="nccl")),
            "backend: got 'nccl'; expected gloo without GPUs",
        ),
        (
            lambda: Trainer(train, run_config=FailureConfig()),  # type: ignore[arg-type]
            r"run_config: got .*FailureConfig'; expected holdfast\.ray\.RunConfig",
        ),
        (lambda: Checkpoint("here", filesystem="s3"), r"Checkpoint\.filesystem: got 's3'"),
        (lambda: Checkpoint("s3://here"), r"Checkpoint\.path: got 's3://here'"),
        (lambda: Checkpoint("here").filesystem, r"Checkpoint\.filesystem: got 'a use'"),
        (lambda: holdfast_ray.get_dataset_shard, r"holdfast\.ray: got get_dataset_shard; expected"),
        (get_context, r"holdfast\.ray\.get_context: got a call"),
    ],
)
def test_what_a_trainer_does_not_do_is_refused_by_name(make: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        make()


LARGE = {"CPU": 8.0, "GPU": 4.0, "memory": 8.0 * (1 << 30)}
NODES = [LARGE, LARGE, {"CPU": 2.0}]


@pytest.mark.parametrize(
    ("workers", "gpu", "expected"),
    [(8, True, 4), (4, True, 4), (6, True, 3), (5, True, 1), (16, False, 8), (64, False, 1)],
)
def test_workers_are_packed_onto_as_few_nodes_as_hold_them(
    workers: int, gpu: bool, expected: int
) -> None:
    assert workers_per_node(ScalingConfig(num_workers=workers, use_gpu=gpu), NODES) == expected


def test_a_spec_has_the_sizes_resources_and_budgets_of_the_parameters() -> None:
    trainer = Trainer(
        train,
        scaling_config=ScalingConfig(
            num_workers=(2, 8), resources_per_worker={"CPU": 2, "GPU": 1, "memory": 1 << 30}
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    spec = trainer._document("demo", "run_train.py", NODES)["spec"]
    assert (spec["nodes"], spec["workersPerNode"]) == ({"min": 1, "max": 2}, 4)
    assert spec["resources"] == {"cpu": 2, "gpu": 1, "memory": 1 << 30}
    assert spec["recovery"]["budgets"]["user"] == {"restarts": 3}


def test_the_script_makes_the_worker_a_part_of_the_run_before_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from holdfast.workers.integrations import ray_train

    begun = []
    monkeypatch.setattr(ray_train, "begin", lambda *arguments: begun.append(arguments))
    monkeypatch.setattr(ray_train, "keep_result", lambda function: function)
    keep = RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2))
    torch_config = TorchConfig(backend="gloo", timeout_s=60)
    config = {"lr": 0.1}
    trainer = TorchTrainer(
        train, train_loop_config=config, torch_config=torch_config, run_config=keep
    )
    script = trainer._script(tmp_path, tmp_path / "run", "mine")
    runpy.run_path(str(script), run_name="__main__")
    assert begun == [(str(tmp_path / "run"), "mine", 2, "gloo", 60)]
    assert capsys.readouterr().out == "{'lr': 0.1}\n"


def trained(config: dict[str, Any]) -> Any:
    for epoch, loss in enumerate((0.5, 0.25, 0.75)):
        place = Path(config["place"])
        place.mkdir(exist_ok=True)
        checkpoint = Checkpoint.from_directory(place)
        checkpoint.set_metadata({"of": "me"})
        checkpoint.update_metadata({"epoch": epoch})
        report({"loss": loss}, checkpoint=checkpoint)
    report({"loss": 0.125})
    return config["returns"] if config["plain"] else Path()


def result(tmp_path: Path, *, plain: bool) -> holdfast_ray.Result:
    """Result of a script that one worker has run, without an agent."""
    config = {"place": str(tmp_path / "mine"), "returns": {1: ("a", None)}, "plain": plain}
    trainer = Trainer(trained, train_loop_config=config)
    script = trainer._script(tmp_path, tmp_path / "run", "mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    environment = {name: str(value) for name, value in values.items()}
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return _result(tmp_path / "run", JobView(name="mine"))


def test_a_result_has_what_was_reported_and_returned(tmp_path: Path) -> None:
    found = result(tmp_path, plain=True)
    assert found.metrics == {"loss": 0.125} and found.return_value == {1: ("a", None)}
    assert [metrics["loss"] for _one, metrics in found.best_checkpoints] == [0.5, 0.25, 0.75]
    best, worst = (found.get_best_checkpoint("loss", mode) for mode in ("min", "max"))
    assert best is not None and best.get_metadata() == {"of": "me", "epoch": 1}
    assert worst is not None and worst.get_metadata()["epoch"] == 2
    with pytest.raises(UserError, match="metric: got 'accuracy'; expected one of loss"):
        found.get_best_checkpoint("accuracy", "max")
    if importlib.util.find_spec("pandas") is None:
        with pytest.raises(UserError, match="metrics_dataframe: got no pandas"):
            _ = found.metrics_dataframe
    else:
        assert list(found.metrics_dataframe["loss"]) == [0.5, 0.25, 0.75]


def test_a_returned_object_and_a_directory_that_is_not_shared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"return_value: got PosixPath\('\.'\)"):
        _ = result(tmp_path, plain=False).return_value
    with pytest.raises(UserError, match=r"storage_path: got .*this process sees nothing"):
        _result(tmp_path / "elsewhere", JobView(name="mine"))
