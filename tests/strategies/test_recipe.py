"""Options of the recipe's model and loss, on each kind of mesh."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import Shows
from .rig import CONFIG, alone, compare, document, several

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
    expected = alone(tmp_path / "one", one, 1)
    found = alone(tmp_path, document("many", STEPS, mesh, config=divided), 4)
    assert len(expected) == STEPS
    compare("many", found, expected)


@pytest.mark.timeout(600)  # it compiles for four meshes
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="torch.compile on a CPU needs a C++ compiler: g++, clang++ or c++",
)
def test_compiled_blocks_give_the_losses_and_norms_of_one_process(
    shows: Shows, tmp_path: Path
) -> None:
    meshes = {
        "FULL_SHARD, compiled blocks": ({"shard": 2}, {}),
        "TP 2, compiled blocks": ({"tensor": 2}, {}),
        "CP 2, compiled blocks": ({"context": 2}, {}),
        "PP 2, compiled blocks": ({"pipeline": 2}, {"microBatch": 1}),
    }
    one = document("one", STEPS, {"shard": 1}, workers=1)
    jobs = [
        document(f"c{number}", STEPS, mesh, workers=2, config={"compile": True, **config})
        for number, (mesh, config) in enumerate(meshes.values())
    ]
    expected = several(tmp_path / "one", [one], 1)["one"]
    found = several(tmp_path / "two", jobs, 2)
    for number, name in enumerate(meshes):
        compare(name, found[f"c{number}"], expected)
        shows(name, "equal", f"{STEPS} losses and norms, 2 ranks")
