"""Each sample counts once in each epoch, also where a worker is killed in the middle of one and
the Trainers of transformers and Lightning, or a loop with accelerate, go on from their own
checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .catalogue import Framework
from .test_recovery import BOUND_S, Start, finish, start, trained

__all__ = ["start"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SCRIPT = "lightning_samples.py"


def job_of(loader: str, *more: str) -> Framework:
    return Framework("lightning", "", SCRIPT, "lightning", ("--loader", loader, *more))


@pytest.mark.parametrize(
    ("loader", "ranks"),
    [
        ("shuffled", 2),
        ("processes", 2),
        ("shuffled", 1),
        ("processes", 1),
        ("generator", 1),
        ("subset", 1),
        ("stream", 1),
        ("two", 1),
        ("own-state", 1),
    ],
)
def test_each_sample_counts_once_in_each_epoch(
    loader: str, ranks: int, start: Start, tmp_path: Path
) -> None:
    import torch

    place = {"nodes": {"min": 1, "max": 1}, "workersPerNode": ranks}
    job, log = start(job_of(loader), steps=-1, save_every=5, **place)
    per_epoch = 96 // 4 // ranks
    before = trained(log, job, per_epoch + 7)  # after the fifth step of the second epoch was saved
    os.kill(job.worker_pids()[ranks - 1], signal.SIGKILL)
    after = log.recovery(before, before[-1].time, BOUND_S)
    assert per_epoch < after.step < 2 * per_epoch, "in the middle of an epoch"
    finish(job)
    counts = torch.load(tmp_path / "out" / "counts.pt")
    assert (counts["seen"] == 1).all(), counts["seen"]
    if loader not in ("stream", "own-state"):
        first, second, third = counts["orders"].tolist()
        assert first != second != third != first


@pytest.mark.parametrize("loop", ["trainer", "loop"])
def test_each_sample_counts_once_in_transformers_and_accelerate(
    loop: str, start: Start, tmp_path: Path
) -> None:
    import torch

    script = Framework("samples", "", "samples.py", "transformers", ("--loop", loop))
    job, log = start(script, steps=0, nodes={"min": 1, "max": 1})
    before = trained(log, job, 12 + 7)  # of 12 in each epoch
    os.kill(job.worker_pids()[1], signal.SIGKILL)
    after = log.recovery(before, before[-1].time, BOUND_S)
    assert 12 < after.step < 24, "in the middle of an epoch"
    finish(job)
    counts = torch.load(tmp_path / "out" / "counts.pt")
    assert (counts["seen"] == 1).all(), counts["seen"]
    first, second, third = counts["order"].tolist()
    assert first != second != third != first


def test_each_sample_counts_once_at_another_number_of_ranks(start: Start, tmp_path: Path) -> None:
    import torch

    job, log = start(
        job_of("shuffled", "--strategy", "ddp"),
        steps=-1,
        save_every=4,
        pace_s=0.5,
        workersPerNode=1,
    )
    trained(log, job, 12 + 6)  # of 12 in each epoch; the fourth of the second one was saved
    assert job.request("resize", nodes=1).ok
    log.until(lambda lines: lines[-1].world == 1, BOUND_S)
    finish(job)
    seen = torch.load(tmp_path / "out" / "counts.pt")["seen"]
    assert (seen == 1).all(), seen
