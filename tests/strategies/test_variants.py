"""Every way to shard, to keep activations and to step computes what one process computes: losses
and gradient norms. Each is one row of the page, by torch's name where it has one."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import Shows
from .rig import (
    DDP,
    FSDP,
    HSDP,
    OPTIMIZERS,
    TWO_PASSES,
    compare,
    document,
    losses_by_job,
    output_of,
    several,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 20
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    FSDP: ({"shard": 4}, {}),
    "FULL_SHARD, one block gathered ahead": ({"shard": 4, "fsdp": {"prefetchBlocks": 1}}, {}),
    "SHARD_GRAD_OP (ZeRO-2)": ({"shard": 4, "fsdp": {"reshardAfterForward": False}}, TWO_PASSES),
    f"{HSDP}, two micro-batches": ({"shard": 2}, TWO_PASSES),
    "HYBRID_SHARD_ZERO2": ({"shard": 2, "fsdp": {"reshardAfterForward": False}}, TWO_PASSES),
    "FULL_SHARD, backward from groups of 2": ({"shard": 4, "fsdp": {"reshardAfterForward": 2}}, {}),
    "ZeRO-1": (
        {"shard": 4, "fsdp": {"reshardAfterForward": False, "accumulateGradients": "whole"}},
        TWO_PASSES,
    ),
    "ZeRO-1 in two replicas": (
        {"shard": 2, "fsdp": {"reshardAfterForward": False, "accumulateGradients": "whole"}},
        TWO_PASSES,
    ),
    f"{DDP}, static graph, buckets of 1 MiB": (
        {"shard": 1, "ddp": {"staticGraph": True, "bucketMib": 1, "gradientAsBucketView": False}},
        {},
    ),
    f"{DDP}, two micro-batches": ({"shard": 1}, TWO_PASSES),
    "blocks recomputed except matmuls and attention": (
        {"shard": 4, "activationCheckpointing": {"selective": {}}},
        {},
    ),
}

NOT_WITH_DDP = ("AdamW within backward",)
MESHES = {FSDP: {"shard": 4}, HSDP: {"shard": 2}, DDP: {"shard": 1}}


def test_ways_to_shard_give_the_losses_and_norms_of_one_process(
    shows: Shows, tmp_path: Path
) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    alone = several(one, [document("one", STEPS, {"shard": 1}, workers=1)], 1)["one"]
    jobs = [
        document(f"v{number}", STEPS, parallelism, config=config)
        for number, (parallelism, config) in enumerate(VARIANTS.values())
    ]
    found = several(many, jobs, 4)
    for number, name in enumerate(VARIANTS):
        compare(name, found[f"v{number}"], alone)
        shows(name, "equal", f"{STEPS} losses and norms, 4 ranks")


def test_optimizers_give_the_losses_and_norms_of_one_process(shows: Shows, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    single, jobs = [], []
    for name, config in OPTIMIZERS.items():
        after = {"adamw": {}} if "adamw" in config["optimizer"] else {}
        plain = {**config, "optimizer": {**config["optimizer"], **after}}
        label = _label(name, "one")
        single.append(document(label, STEPS, {"shard": 1}, workers=1, config=plain))
        for mesh, parallelism in _meshes(name).items():
            jobs.append(document(_label(name, mesh), STEPS, parallelism, config=config))
    alone, found = several(one, single, 1), several(many, jobs, 4)
    for name in OPTIMIZERS:
        for mesh in _meshes(name):
            compare(f"{name}, {mesh}", found[_label(name, mesh)], alone[_label(name, "one")])
            shows(f"{name}, {mesh}", "equal", f"{STEPS} losses and norms, 4 ranks")


def _meshes(name: str) -> dict[str, Any]:
    return {m: axes for m, axes in MESHES.items() if m != DDP or name not in NOT_WITH_DDP}


def _label(name: str, mesh: str) -> str:
    return re.sub(r"\W+", "-", f"{name}-{mesh}".lower().replace("_", "-")).strip("-")


def test_16_bit_training_follows_float32_and_all_ranks_skip_what_overflows(
    shows: Shows, tmp_path: Path
) -> None:
    formats = {
        "float32": {},
        "float16": {"parameters": "float16"},
        "bfloat16": {"parameters": "bfloat16"},
        "bfloat16-sent": {"parameters": "bfloat16", "reduce": "bfloat16"},
    }
    jobs = [
        document(_label(name, mesh), STEPS, {**parallelism, "precision": precision})
        for name, precision in formats.items()
        for mesh, parallelism in MESHES.items()
    ]
    output = output_of(tmp_path, jobs, 4)
    found = losses_by_job(output)
    # The number of ranks does not decide how soon the scaled gradients overflow.
    assert output.count("changes nothing") == sum(
        math.isinf(norm) for steps in found.values() for _, norm in steps
    )
    for name in formats:
        for mesh in MESHES:
            expected = found[_label("float32", mesh)]
            got = found[_label(name, mesh)]
            assert len(got) == STEPS
            for step in range(STEPS):
                close = pytest.approx(expected[step][0], rel=0.02)
                assert got[step][0] == close, f"{name}, {mesh}: step {step}"
            if name != "float32":
                shows(f"{name}, {mesh}", "equal", "20 losses, to 2 % of float32")
