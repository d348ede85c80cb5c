"""A trace without other ranks, data and values is that of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.plan_accuracy import trace
from bench.plan_accuracy.cases import Case

from .real_ranks import JOBS, figures

ROOT = Path(__file__).parents[2]
PATIENCE_S = 800
"""Patience: 20 s of processor time took four minutes beside ten busy processes a core."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Measurements of each of two ranks, by job."""
    folder = tmp_path_factory.mktemp("ranks")
    files = [folder / f"{rank}.json" for rank in range(2)]
    program = [sys.executable, "-m", "tests.planner_accuracy.real_ranks"]
    ranks = [
        subprocess.Popen([*program, str(rank), "2", str(folder / "store"), str(out)], cwd=ROOT)
        for rank, out in enumerate(files)
    ]
    try:
        assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(out.read_text()) for out in files]


@pytest.mark.e2e
@pytest.mark.timeout(PATIENCE_S + 100)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_traced_rank_needs_and_sends_what_a_real_one_does(
    job: Case, real: list[dict[str, Any]]
) -> None:
    for rank in range(2):
        traced = figures(trace.measure_rank(job.job, job.mesh, rank, cuda=False))
        measured = real[rank][job.name]
        assert traced["states"] == measured["states"]
        assert traced["sent"] == measured["sent"]
        # A thread of gloo may hold what it has sent for another moment.
        assert traced["peak"] == pytest.approx(measured["peak"], rel=0.03)
