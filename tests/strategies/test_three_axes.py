"""Products of three axes compute what one process computes: losses and gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import Shows
from .rig import compare, document, several

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 5
MESHES: dict[str, dict[str, Any]] = {
    "TP 2 x CP 2 x FSDP 2": {"tensor": 2, "context": 2, "shard": 2},
    "PP 2 x TP 2 x FSDP 2": {"pipeline": {"ranks": 2}, "tensor": 2, "shard": 2},
    "PP 2 x CP 2 x FSDP 2": {"pipeline": {"ranks": 2}, "context": 2, "shard": 2},
    "TP 2 x HSDP 2 x 2": {"tensor": 2, "shard": 2, "replicate": 2},
    "CP 2 x HSDP 2 x 2": {"context": 2, "shard": 2, "replicate": 2},
    "PP 2 x HSDP 2 x 2": {"pipeline": {"ranks": 2}, "shard": 2, "replicate": 2},
}


def test_losses_and_gradient_norms_are_those_of_one_process(shows: Shows, tmp_path: Path) -> None:
    one = [document("one", STEPS, {"shard": 1}, workers=1)]
    many = [
        document(f"m{number}", STEPS, mesh, workers=8, config={"microBatch": 1})
        for number, mesh in enumerate(MESHES.values())
    ]
    expected, found = several(tmp_path / "one", one, 1), several(tmp_path / "many", many, 8)
    assert len(expected["one"]) == STEPS
    for number, mesh in enumerate(MESHES):
        compare(mesh, found[f"m{number}"], expected["one"])
        shows(mesh, "equal", f"{STEPS} losses and norms, 8 ranks")
