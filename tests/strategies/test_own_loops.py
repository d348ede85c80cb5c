"""Loops of one's own on an axis, through the session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from .conftest import Start
from .rig import DIGITS, ON_CPUS, lose_a_worker_and_a_node, losses_of, numbers_in, of_ranks

pytestmark = pytest.mark.e2e

LOOP = Path(__file__).with_name("context_loop.py")
TENSOR_LOOP, PIPELINE_LOOP = (LOOP.with_name(f"{axis}_loop.py") for axis in ("tensor", "pipeline"))


def test_a_loop_on_a_context_axis_computes_what_one_process_computes(tmp_path: Path) -> None:
    one, two = (_losses(tmp_path, ranks, **ON_CPUS) for ranks in (1, 2))
    assert len(one) == 5
    for got, expected in zip(two, one, strict=True):
        assert got == pytest.approx(expected, rel=DIGITS)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, one for each rank")
def test_the_ring_of_gpus_computes_what_one_gpu_computes(tmp_path: Path) -> None:
    one, two = (_losses(tmp_path, ranks) for ranks in (1, 2))
    assert len(one) == 5
    for got, expected in zip(two, one, strict=True):
        assert got == pytest.approx(expected, rel=2e-2), "bfloat16"


@pytest.mark.parametrize(
    ("loop", "ranks", "axis"), [(TENSOR_LOOP, 4, "TENSOR"), (PIPELINE_LOOP, 2, "PIPELINE")]
)
def test_a_loop_on_an_axis_computes_what_one_process_computes(
    tmp_path: Path, loop: Path, ranks: int, axis: str
) -> None:
    words = (sys.executable, str(loop))
    one = numbers_in(of_ranks(tmp_path, words, 1, **ON_CPUS))
    many = numbers_in(of_ranks(tmp_path, words, ranks, **{axis: "2"}, **ON_CPUS))
    assert len(one) == 5
    for got, expected in zip(many, one, strict=True):
        assert got == pytest.approx(expected, rel=DIGITS)


def test_a_killed_worker_and_a_lost_node_change_no_loss_of_a_loop_on_a_tensor_axis(
    start: Start, tmp_path: Path
) -> None:
    steps = 45
    job = start({
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "tensor-loop"},
        "spec": {
            "entrypoint": {"script": str(TENSOR_LOOP)},
            "env": {"STEPS": str(steps), "STEP_S": "0.3"},
            "nodes": {"min": 2, "max": 2},
            "workersPerNode": 2,
            "resources": {"cpu": 1, "gpu": 0},
            "parallelism": {"tensor": 2, "shard": 2},
            "checkpoint": {"memory": {"everySteps": 1}},
        },
    })  # fmt: skip
    lose_a_worker_and_a_node(job)
    words = (sys.executable, str(TENSOR_LOOP))
    one = numbers_in(of_ranks(tmp_path, words, 1, STEPS=str(steps), **ON_CPUS))
    found = losses_of(job)
    assert sorted(found) == list(range(steps))
    for step, (loss, _norm) in enumerate(one):
        assert found[step] == pytest.approx(loss, rel=DIGITS), f"step {step}"


def _losses(place: Path, ranks: int, **variables: str) -> list[tuple[float, float]]:
    return numbers_in(of_ranks(place, (sys.executable, str(LOOP)), ranks, **variables))
