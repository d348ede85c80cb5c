"""Every way to shard, to keep activations and to step computes what one process computes: losses
and gradient norms. Each is one row of the page, by torch's name where it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import Shows
from .rig import DIGITS, document, several

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 20
TWO_PASSES = {"microBatch": 1}
"""With four ranks: two micro-batches of each."""
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FULL_SHARD": ({"shard": 4}, {}),
    "FULL_SHARD, one block gathered ahead": ({"shard": 4, "prefetchBlocks": 1}, {}),
    "SHARD_GRAD_OP (ZeRO-2)": ({"shard": 4, "reshardAfterForward": False}, TWO_PASSES),
    "HYBRID_SHARD": ({"shard": 2}, TWO_PASSES),
    "HYBRID_SHARD_ZERO2": ({"shard": 2, "reshardAfterForward": False}, TWO_PASSES),
    "FULL_SHARD, backward from groups of 2": ({"shard": 4, "reshardAfterForward": 2}, {}),
    "ZeRO-1": (
        {"shard": 4, "reshardAfterForward": False, "accumulateGradients": "whole"},
        TWO_PASSES,
    ),
    "ZeRO-1 in two replicas": (
        {"shard": 2, "reshardAfterForward": False, "accumulateGradients": "whole"},
        TWO_PASSES,
    ),
    "NO_SHARD (DDP), static graph, buckets of 1 MiB": (
        {"shard": 1, "ddp": {"staticGraph": True, "bucketMib": 1, "gradientAsBucketView": False}},
        {},
    ),
    "NO_SHARD (DDP), two micro-batches": ({"shard": 1}, TWO_PASSES),
    "blocks recomputed except matmuls and attention": (
        {"shard": 4, "activationCheckpointing": {"mode": "selective"}},
        {},
    ),
}


def test_losses_and_gradient_norms_are_those_of_one_process(shows: Shows, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    alone = several(one, [document("one", STEPS, {"shard": 1}, workers=1)], 1)["one"]
    assert len(alone) == STEPS
    jobs = [
        document(f"v{number}", STEPS, parallelism, config=config)
        for number, (parallelism, config) in enumerate(VARIANTS.values())
    ]
    found = several(many, jobs, 4)
    for number, name in enumerate(VARIANTS):
        for step, (got, expected) in enumerate(zip(found[f"v{number}"], alone, strict=True)):
            assert got == pytest.approx(expected, rel=DIGITS), f"{name}: step {step}"
        shows(name, "equal", f"{STEPS} losses and norms, 4 ranks")
