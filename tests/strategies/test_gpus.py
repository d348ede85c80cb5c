"""Tests that need GPUs: strategies that exist only there, and the recipe's options on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import Shows
from .rig import DIGITS, GPUS, OPTIMIZERS, compare, document, several

pytestmark = [pytest.mark.e2e, pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS = 20
ROUNDED = 0.02
"""Tolerance of the losses of 8 and 16 bits, relative to float32."""
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "one GPU": ({}, {}, DIGITS),
    "one GPU, blocks recomputed": ({"activationCheckpointing": {"full": {}}}, {}, DIGITS),
    "one GPU, compiled blocks": ({}, {"compile": True}, DIGITS),
    "one GPU, bfloat16": ({"precision": {"parameters": "bfloat16"}}, {}, ROUNDED),
    **{f"one GPU, {name}": ({}, config, DIGITS) for name, config in OPTIMIZERS.items()},
}
FLOAT32 = {"precision": {"parameters": "float32"}}
"""The default on GPUs is bfloat16."""
WIDE = {"model": OPTIMIZERS["AdamW with moments of 8 bits"]["model"]}
"""Float8 divides matrices into multiples of 16."""
ONLY_ON_GPUS: dict[str, tuple[dict[str, Any], float]] = {
    "FULL_SHARD, parameters and optimizer in main memory": ({"shard": 4, "offload": "cpu"}, DIGITS),
    "FULL_SHARD, linear layers in float8": (
        {"shard": 4, "precision": {"parameters": "bfloat16", "linear": "float8"}},
        ROUNDED,
    ),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")
def test_one_gpu_computes_what_a_cpu_computes(shows: Shows, tmp_path: Path) -> None:
    on_cpu, on_gpu = [], []
    for number, (mesh, config, _) in enumerate(OPTIONS.values()):
        plain = {name: value for name, value in config.items() if name != "compile"}
        name = f"v{number}"
        on_cpu.append(document(name, STEPS, {"shard": 1}, workers=1, config=plain))
        mesh = {"shard": 1, **FLOAT32, **mesh}
        on_gpu.append(document(name, STEPS, mesh, workers=1, config=config))
        on_gpu[-1]["spec"]["resources"]["gpu"] = 1
    expected = several(tmp_path / "cpu", on_cpu, 1, on_gpus=False)
    found = several(tmp_path / "gpu", on_gpu, 1, on_gpus=True)
    for number, (option, (_, _, digits)) in enumerate(OPTIONS.items()):
        compare(option, found[f"v{number}"], expected[f"v{number}"], digits, norms=False)
        shows(option, "equal", f"{STEPS} losses of one CPU")


@pytest.mark.skipif(not GPUS, reason="needs four GPUs, one for each rank")
@pytest.mark.parametrize("strategy", ONLY_ON_GPUS)
def test_strategies_of_gpus_give_the_losses_of_one_process(
    strategy: str, shows: Shows, tmp_path: Path
) -> None:
    mesh, digits = ONLY_ON_GPUS[strategy]
    one = [document("one", STEPS, {"shard": 1}, workers=1, config=WIDE)]
    many = [document("many", STEPS, mesh, config=WIDE)]
    expected, found = several(tmp_path / "one", one, 1), several(tmp_path / "many", many, 4)
    compare(strategy, found["many"], expected["one"], digits, norms=False)
    shows(strategy, "equal", f"{STEPS} losses, to {digits:.1%} of one process, 4 GPUs")
