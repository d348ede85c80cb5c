"""The planner's memory and step time beside those of the recipe, one process a configuration.

To stay within: memory 10 %; time 20 % cold, 10 % calibrated.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from bench.contestants.base import ROOT
from bench.plan_accuracy.cases import DEEP, FP32, GROUPED, MEDIUM, WIDE, Case, case
from bench.plan_step_time import HOLDFAST
from holdfast.orchestrator.api.v1alpha1 import load_job
from holdfast.orchestrator.protocol.mesh import Mesh

from .kit import Figures, Kit, Measurement, Skip

STEPS = 15
LARGE = {"dim": 2048, "numLayers": 18, "numHeads": 16, "vocabSize": 32000}
FULL = {"activationCheckpointing": {"full": {}}}
SELECTIVE = {"activationCheckpointing": {"selective": {}}}
FLOAT8 = {"precision": {"parameters": "bfloat16", "linear": "float8"}}


def _case(name: str, *rest: Any, **more: Any) -> Case:
    return case("gpu", name, Mesh(), *rest, **more)


CASES: tuple[tuple[Case, dict[str, Any]], ...] = (
    (_case("medium", MEDIUM, samples=8), {}),
    (_case("medium, long", MEDIUM, length=8192, samples=1), {}),
    (_case("wide", WIDE, samples=8), {}),
    (_case("grouped, short", GROUPED, length=256, samples=32), {}),
    (_case("large", LARGE, length=2048, samples=4), {}),
    (_case("large, blocks recomputed", LARGE, length=2048, samples=8, **FULL), {}),
    (_case("large, selective", LARGE, length=2048, samples=8, **SELECTIVE), {}),
    (_case("large, loss in chunks", LARGE, length=2048, samples=4, chunk=1024), {}),
    (_case("deep, compiled", DEEP, samples=8), {"compile": True}),
    (_case("large, 8-bit AdamW", LARGE, length=2048, samples=4, optimizer={"adamw8bit": {}}), {}),
    (_case("wide, float8, compiled", WIDE, samples=8, dtype=FLOAT8), {"compile": True}),
    (_case("medium, float32", MEDIUM, samples=8, dtype=FP32), {}),
    (_case("grouped, 4 passes", GROUPED, samples=4, passes=4), {}),
)
"""Jobs, and settings of the recipe that `case` has not."""
ABSENT = {
    "offload": "the recipe offloads sharded parameters only, which needs a second rank",
    "LoRA and QLoRA": "the recipe has no adapters, so the planner predicts none",
}


def measurements() -> list[Measurement]:
    rows = []
    for number, (one, _) in enumerate(CASES):
        needs = {
            "packages": ("torchao",) if "8" in one.name else (),
            "capability": (8, 9) if "float8" in one.name else (7, 0),
            "device_gb": 40.0 if "large" in one.name else 16.0,
            "on_cpu": number == 0,
        }
        run = partial(planned, number=number)
        rows.append(Measurement("plan", one.name, run, 25, 3, **needs))
        again = partial(planned, number=number, calibrate=True)
        rows.append(Measurement("plan", f"{one.name}, calibrated", again, 35, 6, **needs))
    for name, why in ABSENT.items():
        rows.append(Measurement("plan", name, partial(_absent, why=why), 5, 7))
    return rows


def _absent(kit: Kit, why: str) -> Figures:
    raise Skip(why)


def planned(kit: Kit, number: int, calibrate: bool = False) -> Figures:
    file = kit.scratch / "job.yaml"
    file.write_text(yaml.safe_dump(spec(kit, number)))
    measured = _in_a_process(file)
    words = ["spec", "plan", str(file), "--home", str(kit.scratch / "home")]
    command = [*HOLDFAST, *words, *(["--calibrate"] if calibrate else []), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:] + done.stderr)
    estimate = json.loads(done.stdout)["estimate"]
    figures: Figures = {"step_s": measured["step_s"], "planned step_s": estimate["time"]["seconds"]}
    figures["error of time"] = figures["planned step_s"] / figures["step_s"] - 1
    if measured["peak_bytes"]:
        context = sum(t["num_bytes"] for t in estimate["memory"] if t["category"] == "context")
        peak = estimate["peak_bytes"] - context
        figures |= {"peak_bytes": measured["peak_bytes"], "planned peak_bytes": math.ceil(peak)}
        figures["error of memory"] = peak / measured["peak_bytes"] - 1
        figures |= {"reserved_bytes": measured["reserved_bytes"], "context_bytes": context}
    return figures


def spec(kit: Kit, number: int) -> dict[str, Any]:
    one, more = CASES[number]
    config = {**one.recipe, "steps": STEPS, **more}
    if kit.rehearse:
        tiny = {"dim": 64, "numLayers": 2, "numHeads": 2}
        config |= {"model": tiny, "data": {"sequenceLength": 64}, "globalBatch": 2}
    parallelism = {**one.parallelism, **({"precision": {}} if kit.rehearse else {})}
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "planned"},
        "spec": {
            "entrypoint": {"recipe": {"name": "pretrain", "config": config}},
            "nodes": {"min": 1, "max": 1},
            "resources": {"gpu": 0 if kit.rehearse else 1, "cpu": 1},
            "parallelism": parallelism,
        },
    }


def _in_a_process(file: Path) -> dict[str, Any]:
    """The recipe's steps without a second process on the device."""
    words = [sys.executable, "-m", "bench.gpu.plan", str(file)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-1000:], done.stderr[-3000:])
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(file: str) -> None:
    from holdfast import session
    from holdfast.workers.training import loop
    from holdfast.workers.training.recipes import pretrain

    job = load_job(file)
    recipe = job.spec.entrypoint.recipe
    assert recipe is not None
    on_gpu = job.spec.resources.num_gpus > 0
    s = session.init()
    trainer = pretrain.build(job, recipe.config, s)
    seconds = []
    for step in range(STEPS):
        began = time.perf_counter()
        loop.train_step(trainer, step)  # waits for the loss
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    reserved = torch.cuda.max_memory_reserved() if on_gpu else 0
    found = {"step_s": median(seconds[5:]), "peak_bytes": peak, "reserved_bytes": reserved}
    print(json.dumps(found))
    session.leave()


if __name__ == "__main__":
    _measure(sys.argv[1])
