"""Every strategy computes what one process computes: losses and gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .rig import DIGITS, alone, document

pytestmark = pytest.mark.e2e

STEPS = 20
MESHES: dict[str, dict[str, Any]] = {
    "DDP": {"shard": 1},
    "HSDP": {"shard": 2},
    "tensor x FSDP, recomputed": {
        "tensor": 2, "shard": 2, "activationCheckpointing": {"mode": "full"}
    },
    "tensor x replicas": {"tensor": 2, "replicate": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    job = document("one", STEPS, {"shard": 1}, workers=1)
    return alone(tmp_path_factory.mktemp("one"), job, 1)


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_gradient_norms_are_those_of_one_process(
    mesh: str, one_process: list[tuple[float, float]], tmp_path: Path
) -> None:
    found = alone(tmp_path, document("many", STEPS, MESHES[mesh]), 4)
    assert len(found) == STEPS
    for step, (got, expected) in enumerate(zip(found, one_process, strict=True)):
        assert got == pytest.approx(expected, rel=DIGITS), f"step {step}"
