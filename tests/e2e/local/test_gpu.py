"""Recovery on a GPU: NCCL, pinned staging during the next step, restore to the device.

One GPU is enough: the mesh has one rank. The tests skip without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .local_rig import Job, spec

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none"),
]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    changes = {
        "nodes": {"min": 1, "max": 1},
        "workersPerNode": 1,
        "resources": {"gpu": 1},
        "parallelism": {},
    }
    document = spec("gpu", 400, **changes)
    # A GPU needs 2 s for all of them otherwise.
    document["spec"]["entrypoint"]["recipe"]["config"]["minStepSeconds"] = 0.02
    job = Job(tmp_path, document)
    job.run()
    yield job
    job.end()


def test_a_killed_worker_on_a_gpu_is_restored_from_memory(job: Job) -> None:
    view = job.until(lambda view: view.step >= 20)
    assert view.device_memory_peak_bytes > 0
    job.kill(job.worker_pids()[0])
    view = job.wait()
    assert view.state == "succeeded", job.output()
    (incident,) = view.incidents
    assert incident.restored_from == "memory"
    assert incident.steps_lost is not None and incident.steps_lost <= 1


def test_the_checkpoints_of_a_gpu_job_are_complete(job: Job) -> None:
    view = job.wait()
    assert view.state == "succeeded", job.output()
    assert [one.step for one in view.checkpoints][-1] == 399
