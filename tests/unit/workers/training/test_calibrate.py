"""The process that measures a block and the head of a job."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from holdfast.orchestrator.api.v1alpha1 import load_job
from holdfast.orchestrator.catalogue.calibration import Measured
from holdfast.orchestrator.protocol import python_command
from holdfast.workers.training import calibrate
from tests.documents import job_document

CPU = torch.device("cpu")


def job_file(directory: Path, parallelism: Any = None, **config: Any) -> Path:
    model = {"dim": 32, "numLayers": 2, "numHeads": 2, "vocabSize": 256}
    config = {"globalBatch": 4, "data": {"sequenceLength": 16}, "model": model} | config
    document = job_document(
        "tiny",
        {
            "entrypoint": {"recipe": {"name": "pretrain", "config": config}},
            "workersPerNode": 2,
            "resources": {"gpu": 0},
            "parallelism": parallelism or {},
        },
    )
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def settings(**fields: Any) -> calibrate.Settings:
    some = calibrate.Settings("", 2, 1, 1, micro_batch=2, sharded=False, port=0)
    return some._replace(**fields)


@pytest.mark.timeout(600)
def test_two_workers_measure_their_parts_and_the_link_between_them(tmp_path: Path) -> None:
    import msgspec

    command = python_command.start("holdfast.workers.training.calibrate")
    done = subprocess.run(
        [*command, str(job_file(tmp_path)), "--steps", "3"],
        env={**os.environ, "PYTHONPATH": python_command.import_path()},
        capture_output=True,
        text=True,
        timeout=560,  # thirteen seconds on two idle cores
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout, type=Measured)
    assert found.block_s > 0 and found.head_s > 0 and found.optimizer_s
    # Of both blocks of the model.
    assert found.parameters == 2 * (4 * 32 * 32 + 3 * 32 * _ffn(tmp_path) + 2 * 32)
    assert found.link_bandwidth is not None and found.link_bandwidth > 0
    assert found.link_latency_s is not None and found.link_latency_s >= 0


def _ffn(directory: Path) -> int:
    recipe = load_job(directory / "job.yaml").spec.entrypoint.recipe
    assert recipe is not None
    return recipe.config.model.ffn


@pytest.mark.parametrize(
    ("parallelism", "config"),
    [
        ({"activationCheckpointing": {"full": {}}}, {}),
        ({"activationCheckpointing": {"selective": {"everyNthBlock": 2}}}, {}),
        ({"precision": {"parameters": "bfloat16"}}, {}),
        ({}, {"loss": {"chunkTokens": 8, "zLoss": 0.1}}),
    ],
    ids=["AC full", "AC of every second block", "bfloat16", "loss in chunks"],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_every_setting_of_the_recipe_can_be_measured(
    parallelism: Any, config: Any, sharded: bool, tmp_path: Path
) -> None:
    job = load_job(job_file(tmp_path, parallelism, **config))
    found = calibrate.measure(job, settings(sharded=sharded), CPU)
    assert 0 < found["block_s"] < 60 and 0 < found["head_s"] < 60


def test_an_optimizer_that_computes_products_is_not_measured(tmp_path: Path) -> None:
    job = load_job(job_file(tmp_path, optimizer={"muon": {}}))
    assert calibrate.measure(job, settings(), CPU)["optimizer_s"] is None


def test_the_slowest_worker_and_the_narrowest_link_count() -> None:
    one = {"block_s": 1.0, "optimizer_s": None, "link_bandwidth": 5.0, "link_latency_s": 1.0}
    other = {"block_s": 2.0, "optimizer_s": None, "link_bandwidth": 4.0, "link_latency_s": 0.5}
    assert calibrate._slowest([one, other]) == one | {"block_s": 2.0, "link_bandwidth": 4.0}


@pytest.mark.parametrize("workers", [2, 4])
def test_latency_and_bandwidth_are_found_from_two_times(workers: int) -> None:
    hops = 2 * (workers - 1)
    seconds = [hops * (1e-4 + size / workers / 2e9) for size in calibrate.MESSAGES]
    found = calibrate.link_of(seconds, workers)
    assert found["link_latency_s"] == pytest.approx(1e-4)
    assert found["link_bandwidth"] == pytest.approx(2e9)


def test_times_that_do_not_grow_with_the_size_give_no_endless_bandwidth() -> None:
    found = calibrate.link_of([1.0, 1.0], 2)
    assert 0 < found["link_bandwidth"] < 1e9 and found["link_latency_s"] >= 0


def test_a_model_that_does_not_fit_ends_with_one_message_and_exit_code_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_settings: calibrate.Settings) -> list[dict[str, Any]]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore.")

    monkeypatch.setattr(calibrate, "_measure_in_processes", fail)
    assert calibrate.main([str(job_file(tmp_path))]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "out of memory" in printed.err and "Tried to allocate 20.00 GiB" in printed.err
    assert "Traceback" not in printed.err and len(printed.err.splitlines()) == 1


def test_a_job_without_the_recipe_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file(tmp_path)
    document = yaml.safe_load(path.read_text())
    document["spec"]["entrypoint"] = {"module": "train"}
    path.write_text(yaml.safe_dump(document))
    assert calibrate.main([str(path)]) == 2
    assert "got another recipe; expected pretrain" in capsys.readouterr().err


def test_json_on_standard_output_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"block_s": 1.0, "head_s": 2.0, "optimizer_s": None, "parameters": 3}
    monkeypatch.setattr(calibrate, "_measure_in_processes", lambda _: [parts])
    assert calibrate.main([str(job_file(tmp_path))]) == 0
    assert json.loads(capsys.readouterr().out) == parts
