"""Strategies survive the loss of a worker and of a node, and continue checkpoints of the others."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.local.local_rig import last_state

from .conftest import Shows, Start
from .rig import (
    DDP,
    DIGITS,
    FSDP,
    HSDP,
    OPTIMIZERS,
    PACED,
    TWO_PASSES,
    WORLD,
    alone,
    document,
    lose_a_worker_and_a_node,
    losses_of,
    numbers_in,
    output_of,
    settings_of,
)

pytestmark = pytest.mark.e2e

MESHES: dict[str, dict[str, Any]] = {
    WORLD: {"shard": "world"},
    HSDP: {"shard": 2},
    DDP: {"shard": 1},
    "SHARD_GRAD_OP (ZeRO-2)": {"shard": 4, "fsdp": {"reshardAfterForward": False}},
    "ZeRO-1": {"shard": 4, "fsdp": {"reshardAfterForward": False, "accumulateGradients": "whole"}},
    "TP 2 x FSDP 2": {"tensor": 2, "shard": 2},
    "TP 2 x DDP 2": {"tensor": 2, "replicate": 2},
    "TP 2 x FSDP over all ranks": {"tensor": 2, "shard": "world"},
    "CP 2 x TP 2": {"context": 2, "tensor": 2},
    "CP 2 x FSDP 2": {"context": 2, "shard": 2},
    "CP 2 x FSDP over all ranks": {"context": 2, "shard": "world"},
    "PP 2 x FSDP 2": {"pipeline": {"ranks": 2}, "shard": 2},
    "PP 2 x FSDP over all ranks": {"pipeline": {"ranks": 2}, "shard": "world"},
    "PP 2 x DDP 2": {"pipeline": {"ranks": 2}, "replicate": 2},
    "PP 2 x CP 2": {"pipeline": {"ranks": 2}, "context": 2},
    "PP 2 x TP 2": {"pipeline": {"ranks": 2}, "tensor": 2},
    "PP 2 x DDP 2, interleaved": {
        "pipeline": {"ranks": 2, "schedule": "interleaved1f1b"}, "replicate": 2
    },
    "PP 2 x DDP 2, zero bubble in a V": {
        "pipeline": {"ranks": 2, "schedule": "zbvZeroBubble"}, "replicate": 2
    },
    **{f"{name}, {WORLD}": {"shard": "world"} for name in OPTIMIZERS},
}  # fmt: skip
STEPS = 45
SKIPPED = "changes nothing: the gradients overflow"
HOLDFAST = (sys.executable, "-m", "holdfast.orchestrator.cli.main")
PIECE = 6
"""Steps of each run of a chain."""


@pytest.mark.parametrize("mesh", MESHES)
def test_a_killed_worker_and_a_lost_node_change_no_bit(
    mesh: str, start: Start, shows: Shows
) -> None:
    """Bits of weights and optimizer after an undisturbed job on the same mesh, nor a loss."""
    tiers = {"storage": {"everySteps": 10_000}, "memory": {"everySteps": 1}}
    spec = document(
        "faults", STEPS, MESHES[mesh], nodes=2, workers=2, checkpoint=tiers,
        config={**settings_of(mesh), **PACED},
    )  # fmt: skip
    if "replicate" not in MESHES[mesh]:
        spec["spec"]["nodes"]["min"] = 2  # one replica on both nodes
    job = start(spec)
    view = lose_a_worker_and_a_node(job)
    spec["metadata"]["name"] = "undisturbed"
    del spec["spec"]["entrypoint"]["recipe"]["config"]["minStepSeconds"]
    undisturbed = start(spec)
    assert undisturbed.wait().state == "succeeded", undisturbed.output()
    found, expected = losses_of(job), losses_of(undisturbed)
    assert sorted(expected) == list(range(STEPS))
    # A step that a replica of rank 0 finished is not repeated, if rank 0 was stopped before it
    # printed it: the job went on after that step.
    resumed = {incident.resumed_after_step for incident in view.incidents}
    assert expected.keys() - found.keys() <= resumed
    assert found.items() <= expected.items()
    assert last_state(job, STEPS - 1) == last_state(undisturbed, STEPS - 1)
    shows(mesh, "worker", "0 steps lost, memory, bits equal")
    lost = view.incidents[-1].steps_lost
    shows(mesh, "node", f"{lost} steps lost, memory, bits equal")


def test_the_loss_scale_of_float16_survives_a_killed_worker(
    start: Start, shows: Shows, tmp_path: Path
) -> None:
    """The first scale again: the next gradients would overflow once more."""
    mesh = {"shard": 2, "precision": {"parameters": "float16"}}
    large = {"loss": {"zLoss": 1000.0}}  # its gradients overflow with the first scale
    spec = document("scaled", STEPS, mesh, nodes=2, workers=2, config={**large, **PACED})
    spec["spec"]["nodes"]["min"] = 2
    job = start(spec)
    job.until(lambda view: view.step >= 15)
    job.kill(job.worker_pids()[1])
    view = job.running(incidents=1)
    assert view.incidents[-1].restored_from == "memory" and view.incidents[-1].steps_lost == 0
    assert job.wait().state == "succeeded", job.output()
    logs = [path.read_text() for path in job.directory.path.glob("logs/gen-*/rank-00000.log")]
    undisturbed = output_of(tmp_path, [document("alone", STEPS, mesh, config=large)], 4)
    skipped = undisturbed.count(SKIPPED)
    assert skipped > 0 and sum(log.count(SKIPPED) for log in logs) == skipped
    expected = numbers_in(undisturbed)
    assert losses_of(job) == {step: loss for step, (loss, _norm) in enumerate(expected)}
    shows("float16, HYBRID_SHARD", "worker", "0 steps lost, memory, the loss scale too")


CHAIN: dict[str, dict[str, Any]] = {
    "TP 2 x FSDP 2": {"tensor": 2, "shard": 2},
    "ZeRO-1": {"shard": 4, "fsdp": {"reshardAfterForward": False, "accumulateGradients": "whole"}},
    "TP 2 x DDP 2": {"tensor": 2, "replicate": 2},
    FSDP: {"shard": 4},
    HSDP: {"shard": 2},
    "PP 2 x TP 2": {"pipeline": {"ranks": 2}, "tensor": 2},
    "CP 2 x FSDP 2": {"context": 2, "shard": 2},
    DDP: {"shard": 1},
}
STAGES: dict[str, dict[str, Any]] = {
    "TP 2 x FSDP 2": {"tensor": 2, "shard": 2},
    "PP 2 x TP 2": {"pipeline": {"ranks": 2}, "tensor": 2},
    "PP 2 x CP 2": {"pipeline": {"ranks": 2}, "context": 2},
    "PP 2 x FSDP 2": {"pipeline": {"ranks": 2}, "shard": 2},
    FSDP: {"shard": 4},
}
"""Name -> mesh of 4 ranks, each continuing the checkpoint of the one before."""


@pytest.mark.parametrize("chain", [CHAIN, STAGES], ids=["axes", "stages"])
def test_a_checkpoint_of_each_strategy_is_continued_by_the_next(
    chain: dict[str, dict[str, Any]], start: Start, shows: Shows, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoints")
    found: dict[int, float] = {}
    for number, parallelism in enumerate(chain.values(), 1):
        tiers = {"path": path, "storage": {"everySteps": 10_000}}
        if number > 1:
            words = ("checkpoint", "adopt", path, "--job", f"run{number}", "--yes")
            subprocess.run([*HOLDFAST, *words], check=True, timeout=60)
        name, steps = f"run{number}", number * PIECE
        job = start(document(name, steps, parallelism, checkpoint=tiers, config=TWO_PASSES))
        assert job.wait().state == "succeeded", job.output()
        losses = losses_of(job)
        assert sorted(losses) == list(range((number - 1) * PIECE, number * PIECE)), job.output()
        found |= losses
    steps = len(chain) * PIECE
    expected = alone(tmp_path / "alone", document("alone", steps, {"shard": 1}, workers=1), 1)
    for step, (loss, _norm) in enumerate(expected):
        assert found[step] == pytest.approx(loss, rel=DIGITS), f"step {step}"
    for before, after in pairwise(chain):
        shows(before, "reshards", after)
