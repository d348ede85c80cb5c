"""Every strategy computes what one process computes: losses and gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import Shows
from .rig import DIGITS, alone, document

pytestmark = pytest.mark.e2e

STEPS = 20
MESHES: dict[str, dict[str, Any]] = {
    "DDP 4": {"shard": 1},
    "HSDP 2 x 2": {"shard": 2},
    "TP 2 x FSDP 2, blocks recomputed": {
        "tensor": 2, "shard": 2, "activationCheckpointing": {"mode": "full"}
    },
    "TP 2 x DDP 2": {"tensor": 2, "replicate": 2},
    "CP 4": {"context": 4, "shard": 1},
    "CP 2 x FSDP 2": {"context": 2, "shard": 2},
    "CP 2 x DDP 2, blocks recomputed except matmuls and attention": {
        "context": 2, "replicate": 2, "activationCheckpointing": {"mode": "selective"}
    },
    "CP 2 x TP 2, blocks recomputed": {
        "context": 2, "tensor": 2, "activationCheckpointing": {"mode": "full"}
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    job = document("one", STEPS, {"shard": 1}, workers=1)
    return alone(tmp_path_factory.mktemp("one"), job, 1)


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_gradient_norms_are_those_of_one_process(
    mesh: str, one_process: list[tuple[float, float]], shows: Shows, tmp_path: Path
) -> None:
    found = alone(tmp_path, document("many", STEPS, MESHES[mesh]), 4)
    assert len(found) == STEPS
    for step, (got, expected) in enumerate(zip(found, one_process, strict=True)):
        assert got == pytest.approx(expected, rel=DIGITS), f"step {step}"
    shows(mesh, "equal", f"{STEPS} losses and norms, 4 ranks")
