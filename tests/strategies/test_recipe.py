"""Options of the recipe's model and loss, on each kind of mesh."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import Shows
from .rig import CONFIG, DIGITS, MARK, alone, compare, document, output_of, several

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


EVALUATED: dict[str, dict[str, Any]] = {
    "DDP 2": {"shard": 1},
    "FSDP 2": {"shard": 2},
    "TP 2": {"tensor": 2},
    "CP 2": {"context": 2},
    "PP 2": {"pipeline": {"ranks": 2}},
    "PP 2, interleaved": {"pipeline": {"ranks": 2, "schedule": "interleaved1f1b"}},
    "PP 2, zero bubble in a V": {"pipeline": {"ranks": 2, "schedule": "zbvZeroBubble"}},
}


def test_an_evaluation_gives_the_loss_of_one_process_on_every_mesh(tmp_path: Path) -> None:
    """The samples are the same; their number the ranks do not divide, in several micro-batches."""
    validation = {"samples": 7, "share": 0.1}
    config = {
        "evaluateEverySteps": 1,
        "data": {**CONFIG["data"], "validation": validation},
        "microBatch": 1,
        "loss": {"zLoss": 0.01},  # of training only
    }
    expected = _validation_losses(tmp_path / "one", {"one": {"shard": 1}}, config, 1)["one"]
    assert len(expected) == 2 and expected[0] != expected[1]
    without = {**config, "loss": {}}
    found = _validation_losses(tmp_path / "two", EVALUATED, without, 2)
    for mesh, losses in found.items():
        assert losses == pytest.approx(expected, rel=DIGITS), mesh


def _validation_losses(
    place: Path, meshes: dict[str, dict[str, Any]], config: dict[str, Any], ranks: int
) -> dict[str, list[float]]:
    place.mkdir()
    jobs = [
        document(f"e{number}", 2, mesh, workers=ranks, config=config)
        for number, mesh in enumerate(meshes.values())
    ]
    parts = output_of(place, jobs, ranks).split(f"{MARK} ")[1:]
    line = re.compile(r"^step \d+ validation loss (\S+) over 7 samples$", re.M)
    losses = [[float(loss) for loss in line.findall(part)] for part in parts]
    return dict(zip(meshes, losses, strict=True))


def test_the_axes_train_in_16_bits_as_in_32(tmp_path: Path) -> None:
    """Activations between stages, and messages within an axis, have the format too: on GPUs it is
    the default."""
    axes: dict[str, dict[str, Any]] = {
        "TP 2": {"tensor": 2},
        "CP 2": {"context": 2},
        "PP 2": {"pipeline": {"ranks": 2}},
        "PP 2, zero bubble in a V": {"pipeline": {"ranks": 2, "schedule": "zbvZeroBubble"}},
    }
    jobs = [document("float32", 2, {"shard": 2}, workers=2)]
    for number, mesh in enumerate(axes.values()):
        precision = {"parameters": "bfloat16"}
        jobs.append(document(f"b{number}", 2, {**mesh, "precision": precision}, workers=2))
    jobs.append(
        document(
            "f", 2, {"pipeline": {"ranks": 2}, "precision": {"parameters": "float16"}}, workers=2
        )
    )
    found = several(tmp_path / "two", jobs, 2)
    exact = found.pop("float32")
    for name, numbers in found.items():
        compare(name, numbers, exact, digits=0.01)
    for number, axis in enumerate(axes):
        assert found[f"b{number}"] != exact, f"{axis}: nothing was rounded"


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
        "PP 2, compiled blocks": ({"pipeline": {"ranks": 2}}, {"microBatch": 1}),
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
