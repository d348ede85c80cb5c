"""Losses of each format on 20 steps beside float32, attention, and runs that were disturbed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.e2e.local.local_rig import Job
from tests.strategies.rig import CONFIG, document, losses_of, numbers_in, of_ranks, several

from .check import shared_backend
from .kit import Figures, Kit, Measurement
from .sharing import JOB_WORDS

STEPS = 20
FLOAT32 = {"precision": {"parameters": "float32"}}
BF16 = {"precision": {"parameters": "bfloat16"}}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "bfloat16": (BF16, {}, {}),
    "float16 with its scale": ({"precision": {"parameters": "float16"}}, {}, {}),
    "float8": (
        {"precision": {"parameters": "bfloat16", "linear": "float8"}}, {},
        {"packages": ("torchao",), "capability": (8, 9), "on_cpu": False},
    ),
    "compiled": (FLOAT32, {"compile": True}, {"on_cpu": False}),
    "blocks recomputed": ({**FLOAT32, "activationCheckpointing": {"full": {}}}, {}, {}),
    "8-bit AdamW": (
        FLOAT32, {"optimizer": {**CONFIG["optimizer"], "adamw8bit": {}}}, {"packages": ("torchao",)}
    ),
}  # fmt: skip


def measurements() -> list[Measurement]:
    return [
        *(
            Measurement("numbers", name, partial(variant, name=name), 40, 3, **needs)
            for name, (_, _, needs) in VARIANTS.items()
        ),
        Measurement("numbers", "attention", attention, 10, 3),
        Measurement("numbers", "ring attention over two ranks", ring, 60, 5),
        Measurement("numbers", "killed beside undisturbed", killed, 90, 2),
    ]


def config(kit: Kit) -> dict[str, Any]:
    real = {"dim": 1024, "numLayers": 8, "numHeads": 8, "numKvHeads": 4, "vocabSize": 8192}
    tiny = {"dim": 256, "ffnDim": 256, "numLayers": 1, "numHeads": 4}
    data = {"sequenceLength": kit.size(1024, 32)}
    return {"model": kit.size(real, tiny), "data": data, "globalBatch": 8}


def spec(kit: Kit, name: str, parallelism: dict[str, Any], more: Any = None) -> dict[str, Any]:
    settings = {**config(kit), **(more or {})}
    row = document(name, kit.size(STEPS, 4), parallelism, workers=1, config=settings)
    row["spec"]["resources"] = {"cpu": 1, "gpu": 0 if kit.rehearse else 1}
    return row


def variant(kit: Kit, name: str) -> Figures:
    """The largest difference of a loss, relative to that of float32."""
    parallelism, more, _ = VARIANTS[name]
    rows = [spec(kit, "plain", FLOAT32), spec(kit, "variant", parallelism, more)]
    losses = several(kit.scratch / "losses", rows, 1, on_gpus=not kit.rehearse)
    return compared(losses["variant"], losses["plain"])


def compared(losses: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> Figures:
    assert len(losses) == len(wanted) > 0
    pairs = [(got[0], each[0]) for got, each in zip(losses, wanted, strict=True)]
    worst = max(abs(got / each - 1) for got, each in pairs)
    return {"steps": len(pairs), "largest difference": worst, "last losses": list(pairs[-1])}


def attention(kit: Kit) -> Figures:
    """Errors of each kernel in bfloat16 beside float64, relative to the standard deviation."""
    torch.manual_seed(0)
    shape = (2, 8, kit.size(2048, 64), 64)
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16, device=kit.device) for _ in "qkv")
    wanted = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True
    )
    figures: Figures = {}
    kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    for kernel in [*kernels, *([] if kit.rehearse else [SDPBackend.CUDNN_ATTENTION])]:
        with sdpa_kernel(kernel):
            got = scaled_dot_product_attention(query, key, value, is_causal=True)
        figures[kernel.name.lower()] = float((got - wanted).abs().max() / wanted.std())
    return figures


def ring(kit: Kit) -> Figures:
    """Losses over a context axis of two ranks, which share the GPU, beside one rank's."""
    kind = shared_backend(kit)
    place = kit.scratch / "ring"
    losses = several(kit.scratch / "one", [spec(kit, "one", BF16)], 1, on_gpus=not kit.rehearse)
    row = spec(kit, "ring", {**BF16, "context": 2})
    row["spec"] |= {"workersPerNode": 2, "resources": {"cpu": 1, "gpu": 0}}
    job = Job(_made(place), row)
    text = of_ranks(place, [*JOB_WORDS, str(job.file)], 2, BENCH_SHARE_GPU=kind)
    return {"backend": kind, **compared(numbers_in(text), losses["one"])}


def killed(kit: Kit) -> Figures:
    """Steps whose loss is not, to the printed digit, that of a run that was not disturbed. Another
    undisturbed run shows what the kernels themselves change."""
    runs = []
    for name in ("undisturbed", "again", "killed"):
        more = {"steps": kit.size(60, 30), "minStepSeconds": kit.size(0.1, 0.2)}
        job = Job(_made(kit.scratch / name), spec(kit, name, BF16, more))
        job.run()
        if name == "killed":
            job.until(lambda view: view.step >= 10)
            job.kill(job.worker_pids()[0])
        view = job.wait()
        job.end()
        if view.state != "succeeded":
            raise RuntimeError(job.output()[-3000:])
        runs.append(losses_of(job))
    again, killed = (
        sum(run.get(step) != loss for step, loss in runs[0].items()) for run in runs[1:]
    )
    figures: Figures = {"steps": len(runs[0]), "incidents": len(view.incidents)}
    return {**figures, "differ without a fault": again, "that differ": killed}


def _made(place: Any) -> Any:
    place.mkdir()
    return place
