"""A running job is looked at: stacks, a profile and a trace of its ranks, what rank 0 prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.orchestrator.protocol.rank_stacks import RankStacks
from tests.documents import job_document

from .local_rig import Job

pytestmark = pytest.mark.e2e

SCRIPT = """
import time
import torch
import torch.distributed as dist

def sleeps():
    print("rank 1 is late", flush=True)
    while True:
        time.sleep(1)

dist.init_process_group("gloo")
for step in range(5):
    dist.all_reduce(torch.ones(1))
print("five steps", flush=True)
if dist.get_rank() == 1:
    sleeps()
dist.all_reduce(torch.ones(1))
"""

REPORTS = """
import itertools
import torch
import torch.distributed as dist
from holdfast import session

dist.init_process_group("gloo")
weights = torch.ones(64, 64)
for step in itertools.count():
    dist.all_reduce(weights @ weights)
    session.report(step)
"""


def job_of(place: Path, name: str, script: str) -> Job:
    (place / "train.py").write_text(script)
    document = job_document(
        name,
        {
            "entrypoint": {"script": "train.py"},
            "workersPerNode": 2,
            "resources": {"cpu": 1, "gpu": 0},
        },
    )
    return Job(place, document)


def profile(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "holdfast.orchestrator.cli.main", "debug", "profile", job.name]
    return subprocess.run(
        [*program, "--home", str(job.home), *words],
        capture_output=True, text=True, check=False, cwd=job.home.parent,
    )  # fmt: skip


def test_a_job_is_looked_at_while_it_runs(tmp_path: Path) -> None:
    job = job_of(tmp_path, "looked-at", SCRIPT)
    job.run()
    try:
        log = job.directory.rank_log(1, 1)
        view = job.until(lambda _view: log.exists() and "is late" in log.read_text())
        assert (view.mesh, view.strategy, view.relaunches) == ("", "", 0)
        reply = job.request("stacks")
        found = msgspec.convert(reply.body["stacks"], list[RankStacks])
        waiting, late = (next(one for one in found if one.ranks == (rank,)) for rank in (0, 1))
        assert waiting.activity == "peers", waiting
        assert any("all_reduce" in frame for frame in waiting.frames), waiting
        assert late.frames[0].startswith("sleeps ("), late
        assert waiting.collectives[0].last == late.collectives[0].last + 1

        flames = tmp_path / "flames.svg"
        done = profile(job, "--rank", "1", "--seconds", "1", "--idle", "-o", str(flames))
        assert done.returncode == 0, done.stderr
        assert "sleeps" in flames.read_text()
        assert "[rank 0] five steps" in job.output()
        assert not job.until(lambda view: view.state == "running").incidents, "it is undisturbed"
    finally:
        job.end()
