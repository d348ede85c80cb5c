"""Strategies shrink and grow from memory, with the losses of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import Shows, Start
from .rig import (
    DDP,
    DIGITS,
    HSDP,
    OPTIMIZERS,
    PACED,
    WORLD,
    alone,
    document,
    losses_of,
    settings_of,
)

pytestmark = pytest.mark.e2e

STEPS = 30
MESHES: dict[str, dict[str, Any]] = {
    WORLD: {"shard": "world"},
    HSDP: {"shard": 2},
    DDP: {"shard": 1},
    "TP 2 x DDP 2": {"tensor": 2, "shard": 1},
    "CP 2 x DDP 2": {"context": 2, "shard": 1},
    "PP 2 x DDP 2": {"pipeline": {"ranks": 2}, "shard": 1},
    "TP 2 x FSDP over all ranks": {"tensor": 2, "shard": "world"},
    "CP 2 x FSDP over all ranks": {"context": 2, "shard": "world"},
    "PP 2 x FSDP over all ranks": {"pipeline": {"ranks": 2}, "shard": "world"},
    **{f"{name}, {WORLD}": {"shard": "world"} for name in OPTIMIZERS},
}
"""Name -> mesh of 2 nodes x 2 workers; one node is enough for each."""


@pytest.mark.parametrize("mesh", MESHES)
def test_a_job_shrinks_and_grows_from_memory(
    mesh: str, start: Start, shows: Shows, tmp_path: Path
) -> None:
    tiers = {"storage": {"everySteps": 10_000}, "memory": {"everySteps": 1}}
    spec = document(
        "sizes", STEPS, MESHES[mesh], nodes=2, workers=2, checkpoint=tiers,
        config={**settings_of(mesh), **PACED},
    )  # fmt: skip
    job = start(spec)
    job.until(lambda view: view.step >= 3)
    for number, nodes in ((1, 1), (2, 2)):
        assert job.request("resize", nodes=nodes).ok
        incident = job.running(incidents=number).incidents[-1]
        assert incident.world_size_after == nodes * 2
        assert (incident.restored_from, incident.steps_lost) == ("memory", 0)
    assert job.wait().state == "succeeded", job.output()
    single = document("alone", STEPS, {"shard": 1}, workers=1, config=settings_of(mesh))
    expected = alone(tmp_path / "alone", single, 1)
    found = losses_of(job)
    assert sorted(found) == list(range(STEPS))
    for step, (loss, _norm) in enumerate(expected):
        assert found[step] == pytest.approx(loss, rel=DIGITS), f"step {step}"
    shows(mesh, "equal", f"{STEPS} losses, at both sizes")
    shows(mesh, "resized", "from memory, 0 steps lost")
