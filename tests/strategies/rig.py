"""Runs of the recipe on a mesh, and their losses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from holdfast.orchestrator.runtime.observe.view import JobView
from holdfast.workers.agent.pool import preload
from tests.e2e.local.local_rig import Job
from tests.e2e.ports import free_port

Numbers = list[tuple[float, float]]
"""(loss, gradient norm) of each step."""
MARK = "== job"
"""Mark before the name of a job that runs in the same processes as others."""
CONFIG: dict[str, Any] = {
    "globalBatch": 8,
    "model": {"dim": 32, "numLayers": 4, "numHeads": 4, "numKvHeads": 2},
    "data": {"sequenceLength": 32},
    # A rate that does not depend on the number of steps: runs are continued with more.
    "optimizer": {"warmupSteps": 5, "learningRateSchedule": {"constant": {}}},
}
PACED = {"minStepSeconds": 0.3}
"""A job that is disturbed while it trains: few steps last long enough."""
FSDP, HSDP, DDP = "FULL_SHARD (FSDP 4)", "HYBRID_SHARD (HSDP 2 x 2)", "NO_SHARD (DDP 4)"
WORLD = "FSDP over all ranks (shard: world)"
"""Names of strategies, as the page has them."""
TWO_PASSES = {"microBatch": 1}
"""Four ranks: two micro-batches of each."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Muon": {"optimizer": {**CONFIG["optimizer"], "muon": {}}},
    "Dion": {"optimizer": {**CONFIG["optimizer"], "dion": {}}},
    "AdamW with moments of 8 bits": {
        "optimizer": {**CONFIG["optimizer"], "adamw8bit": {}},
        "model": {**CONFIG["model"], "dim": 256, "ffnDim": 256},
    },
    "AdamW within backward": {
        "optimizer": {**CONFIG["optimizer"], "gradientClip": 0, "adamw": {"inBackward": True}}
    },
}
"""Name -> settings of the recipe, which one process has as well."""
ON_CPUS = {"CUDA_VISIBLE_DEVICES": ""}
GPUS = torch.cuda.device_count() >= 4
"""One GPU for each rank of these meshes: they train on GPUs, else on CPUs, also beside one GPU."""
DIGITS = 2e-3
"""Tolerance of losses, of 4 to 6, and norms: other orders of summation in float32."""


def document(
    name: str, steps: int, parallelism: dict[str, Any], *, nodes: int = 1, workers: int = 4,
    config: dict[str, Any] | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    recipe = {"name": "pretrain", "config": {**CONFIG, "steps": steps, **(config or {})}}
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": {"recipe": recipe},
            "nodes": {"min": 1, "max": nodes},
            "workersPerNode": workers,
            "resources": {"cpu": 1, "gpu": "auto" if GPUS else 0},
            "parallelism": parallelism,
            **more,
        },
    }


def settings_of(strategy: str) -> dict[str, Any]:
    """Settings of a strategy in the recipe: `ZeRO-1`, or `Muon, ...` of an optimizer."""
    return ({"ZeRO-1": TWO_PASSES} | OPTIMIZERS).get(strategy.split(", ")[0], {})


def alone(place: Path, job: dict[str, Any], world_size: int) -> Numbers:
    """(loss, gradient norm) of each step without Holdfast, as under torchrun."""
    return several(place, [job], world_size)[job["metadata"]["name"]]


def several(
    place: Path, jobs: list[dict[str, Any]], world_size: int, on_gpus: bool = GPUS
) -> dict[str, Numbers]:
    """The same as `alone`, for each job by name, in the same processes."""
    place.mkdir(exist_ok=True)
    return losses_by_job(output_of(place, jobs, world_size, on_gpus))


def losses_by_job(text: str) -> dict[str, Numbers]:
    """Losses that rank 0 of several jobs printed."""
    return {part.split("\n", 1)[0]: numbers_in(part) for part in text.split(f"{MARK} ")[1:]}


def numbers_in(text: str) -> Numbers:
    """(loss, gradient norm) of each step in a rank's output."""
    lines = re.findall(r"^step \d+ loss (\S+) norm (\S+)", text, re.M)
    return [(float(loss), float(norm)) for loss, norm in lines]


def compare(
    name: str, found: Numbers, expected: Numbers, digits: float = DIGITS, norms: bool = True
) -> None:
    """Losses, and gradient norms, of as many steps as `expected` has; relative."""
    assert len(found) == len(expected) > 0
    for step, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        last = 2 if norms else 1
        assert got[:last] == pytest.approx(wanted[:last], rel=digits), f"{name}: step {step}"


def output_of(
    place: Path, jobs: list[dict[str, Any]], world_size: int, on_gpus: bool = GPUS
) -> str:
    """Output of rank 0."""
    words = [sys.executable, "-m", "tests.strategies.several"]
    for number, job in enumerate(jobs):
        file = place / f"job-{number}.yaml"
        file.write_text(yaml.safe_dump(job))
        words.append(str(file))
    return of_ranks(place, words, world_size, **({} if on_gpus else ON_CPUS))


def of_ranks(place: Path, words: Sequence[str], world_size: int, **variables: str) -> str:
    """Output of rank 0 of a program that runs as under torchrun."""
    port, ranks = free_port(), []
    for rank in range(world_size):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        environment |= {"MASTER_PORT": str(port), **preload.SINGLE_THREADED, **variables}
        with (place / f"rank-{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
    try:
        while any(process.poll() is None for process in ranks):
            failed = [rank for rank, process in enumerate(ranks) if process.returncode]
            if failed:
                # Of the last job: from its first error on, without what follows at exit.
                log_text = (place / f"rank-{failed[0]}.log").read_text().rpartition(MARK)[2]
                errors = re.search(
                    r"^(?!step |parameters).*(Error|Fatal|corrupt|free|what)", log_text, re.M
                )
                shown = log_text[errors.start() if errors else -3000 :][:4000]
                raise AssertionError(f"ranks {failed} failed: {shown}")
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    text = (place / "rank-0.log").read_text()
    assert [process.returncode for process in ranks] == [0] * world_size, text[-3000:]
    return text


def lose_a_worker_and_a_node(job: Job) -> JobView:
    """Kill a worker and, when the job trains again, a node; each costs no restart from storage.
    Returns the view after the second recovery; the job then trains to its end."""
    job.until(lambda view: view.copied_step >= 3 or view.step >= 10)
    job.kill(job.worker_pids()[1])
    view = job.running(incidents=1)
    assert view.incidents[-1].restored_from == "memory" and view.incidents[-1].steps_lost == 0
    step, node = view.step, view.nodes[-1].name
    job.until(lambda view: view.step >= step + 10)
    job.kill(job.agent_pid(node))
    view = job.running(incidents=2)
    assert view.incidents[-1].restored_from == "memory", job.output()
    assert job.wait().state == "succeeded", job.output()
    return view


def losses_of(job: Job) -> dict[int, float]:
    """Losses of every step as rank 0 printed them under Holdfast; the last of repeated ones."""
    found: dict[int, float] = {}
    logs = job.directory.path.glob("logs/gen-*/rank-00000.log")
    for log in sorted(logs, key=lambda path: int(path.parent.name.removeprefix("gen-"))):
        for step, loss in re.findall(r"^step (\d+) loss (\S+)", log.read_text(), re.M):
            found[int(step)] = float(loss)
    return found
