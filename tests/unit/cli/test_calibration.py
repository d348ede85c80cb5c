"""The user's file of measurements, and `holdfast spec plan --calibrate`."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.catalogue.measurements import FILE
from holdfast.orchestrator.cli import calibration
from holdfast.orchestrator.protocol.hardware import INSTRUCTIONS, processor

from .conftest import Holdfast

Write = Callable[[str], Path]

JOB = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: tiny}
spec:
  entrypoint:
    recipe:
      name: pretrain
      config:
        globalBatch: 4
        model: {dim: 64, numLayers: 2, numHeads: 2, vocabSize: 256}
        data: {sequenceLength: 16}
  nodes: {max: 1}
  workersPerNode: 2
  resources: {gpu: 0}
"""
MEASURED = {
    "block_s": 0.002, "head_s": 0.001, "optimizer_s": 1e-5, "parameters": 1000,
    "link_latency_s": 2e-4, "link_bandwidth": 5e8,
}  # fmt: skip


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The measuring process is replaced by its answer; returns the commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, json.dumps(MEASURED) + "\n", "")

    monkeypatch.setattr(calibration.subprocess, "run", run)  # type: ignore[attr-defined]
    return commands


def time_of(result: Any) -> Any:
    assert result.code == 0, result.err
    return json.loads(result.out)["estimate"]["time"]


def test_a_job_on_processors_has_a_step_time_without_a_measurement(
    write: Write, holdfast: Holdfast
) -> None:
    time = time_of(holdfast("spec plan", write(JOB), "--json"))
    assert time["seconds"] > 0
    assert time["calibration"] is None
    assert "core" in time["device"]


def test_what_was_measured_holds_for_later_plans_and_is_named(
    write: Write, holdfast: Holdfast, measuring: list[list[str]]
) -> None:
    file = write(JOB)
    cold = time_of(holdfast("spec plan", file, "--json"))["seconds"]
    now = time_of(holdfast("spec plan", file, "--calibrate", "--json"))
    assert now["calibration"]["block"] > 1
    assert now["calibration"]["link"]["bandwidth"] == 5e8
    # Two blocks and the head as they were measured, and more.
    assert now["seconds"] > 2 * 0.002 + 0.001 > cold
    assert time_of(holdfast("spec plan", file, "--json")) == now
    assert len(measuring) == 1
    text = holdfast("spec plan", file).out
    assert f"calibrated on {now['calibration']['date']}: blocks x" in text
    assert "link 0.50 GB/s, 200 us" in text


def test_the_measuring_process_gets_the_workers_and_the_micro_batch_of_the_plan(
    write: Write, holdfast: Holdfast, measuring: list[list[str]]
) -> None:
    assert holdfast("spec plan", write(JOB), "--calibrate").code == 0
    (command,) = measuring
    given = dict(itertools.pairwise(command))
    assert (given["--workers"], given["--micro-batch"], given["--steps"]) == ("2", "2", "20")
    assert "--sharded" in command


def test_measurements_are_kept_where_home_says(
    write: Write, holdfast: Holdfast, measuring: list[list[str]], tmp_path: Path
) -> None:
    home = tmp_path / "elsewhere"
    assert holdfast("spec plan", write(JOB), "--calibrate", "--home", home).code == 0
    assert (home / FILE).is_file()
    assert time_of(holdfast("spec plan", write(JOB), "--json"))["calibration"] is None


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff\xfe",
        b'{"version": 1, "entries": [{}]}',
        b'{"version": 1, "entries": 3}',
        b"[]",
        None,
    ],
)
def test_a_damaged_file_is_reported_once_and_the_plan_is_made_without_it(
    content: bytes | None, write: Write, holdfast: Holdfast, tmp_path: Path
) -> None:
    path = tmp_path / "home" / FILE
    path.parent.mkdir()
    if content is None:
        path.mkdir()  # cannot be read
    else:
        path.write_bytes(content)
    result = holdfast("spec plan", write(JOB), "--json")
    assert time_of(result)["calibration"] is None
    assert result.err.count("calibration: got") == 1
    assert str(path) in result.err and "delete the file" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e9])
def test_a_factor_that_cannot_be_is_reported(
    factor: float, write: Write, holdfast: Holdfast, measuring: list[list[str]], tmp_path: Path
) -> None:
    assert holdfast("spec plan", write(JOB), "--calibrate").code == 0
    path = tmp_path / "home" / FILE
    document = json.loads(path.read_text())
    document["entries"][0]["calibration"]["block"] = factor
    path.write_text(json.dumps(document))
    result = holdfast("spec plan", write(JOB), "--json")
    assert time_of(result)["calibration"] is None
    assert "is not between 0.01 and 1000" in result.err


@pytest.mark.parametrize(
    ("code", "printed", "parts"),
    [
        (1, "warning\nout of memory: 20 GiB\n",
         ("--calibrate: got out of memory: 20 GiB", "microBatch")),
        (-9, "", ("signal 9", "out of memory")),
    ],
)  # fmt: skip
def test_a_measurement_that_fails_is_one_message_and_exit_code_two(
    code: int, printed: str, parts: tuple[str, ...], write: Write, holdfast: Holdfast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, "", printed)

    monkeypatch.setattr(calibration.subprocess, "run", run)  # type: ignore[attr-defined]
    result = holdfast("spec plan", write(JOB), "--calibrate")
    assert (result.code, result.out) == (2, "")
    assert all(part in result.err for part in parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--devices", "8xH100-80"), ("8xH100-80 and --calibrate", "leave --devices out")),
        (("--model", "llama3-8b"), ("got a job and --model",)),
    ],
)
def test_only_a_job_on_this_machine_is_measured(
    arguments: tuple[str, ...], parts: tuple[str, ...], write: Write, holdfast: Holdfast
) -> None:
    result = holdfast("spec plan", write(JOB), "--calibrate", *arguments)
    assert (result.code, result.out) == (2, "")
    for part in parts:
        assert part in result.err


def test_a_model_without_a_job_is_not_measured(holdfast: Holdfast) -> None:
    result = holdfast("spec plan", "--model", "llama3-8b", "--devices", "8xH100-80", "--calibrate")
    assert result.code == 2
    assert "--calibrate: got it with --model" in result.err


def test_a_script_is_not_measured(write: Write, holdfast: Holdfast) -> None:
    start = JOB.index("    recipe:")
    end = JOB.index("  nodes:")
    script = JOB[:start] + "    script: train.py\n" + JOB[end:]
    result = holdfast("spec plan", write(script), "--calibrate")
    assert result.code == 2
    assert "--calibrate: got a script or a module" in result.err


def test_measurements_that_cannot_be_kept_are_a_message(
    write: Write, holdfast: Holdfast, measuring: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("a file, where a directory must be")
    result = holdfast("spec plan", write(JOB), "--calibrate")
    assert result.code == 2
    assert "a file that can be written" in result.err and "Traceback" not in result.err


def test_this_machine_has_a_processor_with_a_name() -> None:
    here = processor()
    assert here.name and set(here.flags) <= set(INSTRUCTIONS)
