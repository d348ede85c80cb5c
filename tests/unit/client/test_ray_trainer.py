"""What a Trainer makes of its parameters, and what it refuses by name."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.client.ray_trainer import workers_per_node
from holdfast.orchestrator.errors import UserError
from holdfast.ray import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    Trainer,
    get_context,
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
    keep = RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2))
    trainer = Trainer(train, train_loop_config={"lr": 0.1}, run_config=keep)
    script = trainer._script(tmp_path, tmp_path / "run", "mine")
    runpy.run_path(str(script), run_name="__main__")
    assert begun == [(str(tmp_path / "run"), "mine", 2)]
    assert capsys.readouterr().out == "{'lr': 0.1}\n"
