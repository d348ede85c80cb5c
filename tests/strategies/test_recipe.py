"""Options of the recipe's model and loss, on each kind of mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .rig import CONFIG, DIGITS, alone, document

pytestmark = pytest.mark.e2e

STEPS = 5
QK_NORM = {"model": {**CONFIG["model"], "qkNorm": True}}  # type: ignore[dict-item]
CHUNKS = {"loss": {"zLoss": 1e-3, "chunkTokens": 20}}


@pytest.mark.parametrize(
    ("mesh", "whole", "divided"),
    [
        ({"shard": 2}, QK_NORM | {"loss": {"zLoss": 1e-3}}, QK_NORM | CHUNKS),
        ({"tensor": 2, "shard": 2}, QK_NORM, QK_NORM),
    ],
    ids=["qkNorm, zLoss and chunks in HSDP 2 x 2", "qkNorm in TP 2 x FSDP 2"],
)
def test_losses_and_norms_are_those_of_one_process(
    mesh: dict[str, Any], whole: dict[str, Any], divided: dict[str, Any], tmp_path: Path
) -> None:
    one = document("one", STEPS, {"shard": 1}, workers=1, config=whole)
    (tmp_path / "one").mkdir()
    expected = alone(tmp_path / "one", one, 1)
    found = alone(tmp_path, document("many", STEPS, mesh, config=divided), 4)
    assert len(found) == STEPS
    for step, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        assert got == pytest.approx(wanted, rel=DIGITS), f"step {step}"
