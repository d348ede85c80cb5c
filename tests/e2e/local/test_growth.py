"""A job trains on while a node that has joined imports what the script imports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import job_document

from .local_rig import Job

pytestmark = pytest.mark.e2e

SCRIPT = """
import itertools
import time

import hf_library
import torch
import torch.distributed as dist
from holdfast import session

dist.init_process_group("gloo")
for step in itertools.count():
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
    session.report(step)
"""
LIBRARY = """
import pathlib
import time

place = pathlib.Path(__file__).parent
while (place / "hf_slow").exists():
    time.sleep(0.02)
"""
"""Library whose import takes as long as the test wants."""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "lib"
    place.mkdir()
    (place / "hf_library.py").write_text(LIBRARY)
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    return place


@pytest.fixture
def job(tmp_path: Path, library: Path) -> Iterator[Job]:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    document = job_document(
        "growth",
        {
            "entrypoint": {"script": "train.py"},
            "nodes": {"min": 1, "max": 2},
            "workersPerNode": 2,
            "resources": {"cpu": 1, "gpu": 0},
            "preload": ["hf_library"],
            "recovery": {"growDelaySeconds": 0.5},
        },
    )
    made = Job(project, document)
    made.run()
    yield made
    made.end()


def test_a_job_grows_when_the_standbys_of_the_new_node_have_imported_the_library(
    job: Job, library: Path
) -> None:
    view = job.until(lambda v: v.state == "running" and v.world_size == 4 and v.step > 0)
    slow = library / "hf_slow"
    slow.touch()
    before = [node.name for node in view.nodes]  # in the order in which they joined
    lost = before[-1]
    assert job.request("chaos", kind="kill-node", node=lost, hold_s=2.0).ok
    job.until(lambda v: v.state == "running" and v.world_size == 2)
    waits = job.until(lambda v: "have imported what the script imports" in v.reason)
    (new,) = [node.name for node in waits.nodes if node.name not in before]
    assert new in waits.reason and (waits.state, waits.world_size) == ("running", 2)
    trained = job.until(lambda v: v.step >= waits.step + 40)
    assert (trained.state, trained.world_size) == ("running", 2), "it trains meanwhile"
    slow.unlink()
    grown = job.until(lambda v: v.state == "running" and v.world_size == 4)
    assert "have not imported" not in grown.incidents[-1].title + grown.reason
