"""The recipe at 1.0 G parameters: its rate beside a bare torch loop of the same model, and goodput
with a fault every minute beside what the report has."""

from __future__ import annotations

import re
import time
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from holdfast.orchestrator.api.v1alpha1 import Pretrain
from holdfast.workers.training.data import Dataset
from holdfast.workers.training.initial_values import fill
from holdfast.workers.training.models.transformer import Transformer, flops_per_token
from tests.e2e.local.local_rig import Job

from .kit import Figures, Folder, Kit, Measurement
from .plan import LARGE

PEAK_FLOPS = 989e12
"""Dense bfloat16 of the boards that SXM names. Source: NVIDIA's data sheet, without sparsity."""
SXM = re.compile(r"H100 80GB HBM3$|H200$")
FAULT_S = 60.0


def measurements() -> list[Measurement]:
    return [
        Measurement("train", "bare loop", bare, 45, 2, device_gb=60),
        Measurement("train", "recipe, undisturbed", undisturbed, 90, 2, device_gb=60),
        Measurement("train", "recipe, a fault every minute", disturbed, 200, 4, device_gb=60),
        Measurement("train", "seven minutes with faults", seven_minutes, 520, 9, device_gb=60,
                    on_cpu=False),
    ]  # fmt: skip


def config(kit: Kit, steps: int) -> dict[str, Any]:
    tiny = {"dim": 64, "numLayers": 2, "numHeads": 2}
    return {
        "steps": steps, "model": kit.size(LARGE, tiny), "globalBatch": kit.size(8, 2),
        "data": {"sequenceLength": kit.size(2048, 32)}, "compile": not kit.rehearse,
    }  # fmt: skip


def rates(kit: Kit, recipe: Pretrain, step_s: float) -> Figures:
    tokens = recipe.global_batch * recipe.data.sequence_length
    flops = tokens * flops_per_token(recipe.model, recipe.data.sequence_length)
    figures: Figures = {"tokens/s": tokens / step_s, "step_s": step_s}
    known = not kit.rehearse and SXM.search(torch.cuda.get_device_name())
    return {**figures, "mfu": flops / step_s / PEAK_FLOPS} if known else figures


def bare(kit: Kit) -> Figures:
    """torch alone: autocast, compiled blocks, fused AdamW, a clipped norm; the loss is read one
    step later, as careful loops do."""
    recipe = Pretrain(**config(kit, 1))
    device = torch.device(kit.device)
    with torch.device("meta"):
        model = Transformer(recipe.model)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        fill(parameter, 0, name, model.standard_deviation(name))
    if recipe.compile:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data, seconds, previous = Dataset(recipe, "."), [], torch.zeros(())
    for step in range(kit.size(60, 6)):
        began = time.perf_counter()
        ids = range(step * recipe.global_batch, (step + 1) * recipe.global_batch)
        inputs_bt, targets_bt = (
            each.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else each
            for each in data.batch(tuple(ids))
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits_btv = model(inputs_bt)
            loss = cross_entropy(logits_btv.flatten(0, 1).float(), targets_bt.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(previous)
        previous = loss.detach()
        seconds.append(time.perf_counter() - began)
    half = seconds[len(seconds) // 2 :]
    return rates(kit, recipe, sum(half) / len(half))


def undisturbed(kit: Kit) -> Figures:
    steps = kit.size(120, 12)
    figures = _run(kit, steps, until_s=1e9, fault_s=1e9)
    figures |= rates(kit, Pretrain(**config(kit, steps)), figures["step_s"])
    alone = Folder(kit.folder).records().get(("train", "bare loop"))
    if alone is not None and alone.figures:
        figures["tokens/s over the bare loop's"] = figures["tokens/s"] / alone.figures["tokens/s"]
    return figures


def disturbed(kit: Kit) -> Figures:
    return _run(kit, 10**6, until_s=kit.size(170, 40), fault_s=kit.size(FAULT_S, 15))


def seven_minutes(kit: Kit) -> Figures:
    """The longest run that one command allows beside the launch, which compiles."""
    return _run(kit, 10**6, until_s=420, fault_s=FAULT_S)


def _run(kit: Kit, steps: int, until_s: float, fault_s: float) -> Figures:
    """A job with the defaults of memory checkpoints. Goodput: the share of the time since the first
    step in which steps that counted were trained, at the pace of the median step."""
    place = kit.scratch / "job"
    place.mkdir()
    row = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "train"},
        "spec": {
            "entrypoint": {"recipe": {"name": "pretrain", "config": config(kit, steps)}},
            "nodes": {"min": 1, "max": 1},
            "resources": {"gpu": 0 if kit.rehearse else 1, "cpu": kit.size(8, 1)},
            "checkpoint": {"storage": {"everySteps": 100}},
        },
    }
    job = Job(place, row)
    job.run()
    try:
        view = job.until(lambda view: view.step >= 3)
        first, began = view.step, time.monotonic()
        faults, next_s = 0, fault_s
        for view in job.views():
            now_s = time.monotonic() - began
            if now_s > until_s or view.state in ("succeeded", "failed"):
                break
            if now_s > next_s and view.state == "running":
                job.kill(job.worker_pids()[0])
                faults, next_s = faults + 1, next_s + fault_s
        took_s = time.monotonic() - began
        if view.state == "failed":
            raise RuntimeError(job.output()[-3000:])
    finally:
        job.end()
    figures: Figures = {"step_s": view.step_s, "steps": view.step - first, "faults": faults}
    figures |= {"incidents": len(view.incidents), "goodput of the report": view.goodput}
    figures["goodput by steps"] = (view.step - first) * (view.step_s or 0.0) / took_s
    lost = [one.steps_lost for one in view.incidents if one.steps_lost is not None]
    return {**figures, "steps lost": sum(lost), "staging": view.staging, "seconds": took_s}
