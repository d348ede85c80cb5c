"""Loops of one's own on an axis, through the session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from .rig import DIGITS, numbers_in, of_ranks

pytestmark = pytest.mark.e2e

LOOP = Path(__file__).with_name("context_loop.py")
ON_CPUS = {"CUDA_VISIBLE_DEVICES": ""}


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


def _losses(place: Path, ranks: int, **variables: str) -> list[tuple[float, float]]:
    return numbers_in(of_ranks(place, (sys.executable, str(LOOP)), ranks, **variables))
