"""Real ranks that hang or are only late: who is named, and who is left alone."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from .local_rig import Job, spec

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from holdfast import session

s = session.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = s.restore(model, optimizer)
first = start == 0


def fetch(seconds):
    time.sleep(seconds)


def compute(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10000))


for step in range(start, 60):
    if first and s.rank == 1 and step == 12:
        LATE
    value = torch.ones(1)
    time.sleep(0.05)
    dist.all_reduce(value)
    s.step(step, loss=1.0)
s.finish()
session.leave()
"""


def job_of(place: Path, late: str, **recovery: Any) -> Job:
    (place / "train.py").write_text(dedent(SCRIPT).replace("LATE", late))
    document = spec("late", 60, recovery=recovery)
    document["spec"]["entrypoint"] = {"script": "train.py"}
    document["spec"]["parallelism"] = {"shard": 1}
    return Job(place, document)


def test_a_rank_that_does_nothing_is_named_by_the_collective_that_it_has_not_begun(
    tmp_path: Path,
) -> None:
    job = job_of(tmp_path, "fetch(1000)")
    job.run()
    try:
        view = job.wait()
        (incident,) = [one for one in view.incidents if one.failure_class == "hang"]
        assert (view.state, incident.culprit_rank) == ("succeeded", 1)
        assert "rank 1 has not begun gloo:all_reduce number" in incident.evidence
        assert "which 3 of its 4 ranks wait in" in incident.evidence
        assert "in fetch" in incident.stacks["1"]
    finally:
        job.end()


def test_a_rank_that_computes_for_longer_than_the_hang_limit_is_only_suspected(
    tmp_path: Path,
) -> None:
    job = job_of(tmp_path, "compute(10)")
    job.run()
    try:
        job.until(lambda view: "rank 1 is in no collective at File" in view.reason)
        view = job.wait()
        assert (view.state, view.incidents) == ("succeeded", [])
    finally:
        job.end()
