"""A loop that shards its model over all ranks: the shard axis follows the number of nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.documents import job_document

from .local_rig import Job

pytestmark = pytest.mark.e2e

STEPS = 350
SCRIPT = f"""
import sys, time
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from holdfast import session

result, pause_s = sys.argv[1], float(sys.argv[2])
s = session.init()
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(s.restore(model, optimizer), {STEPS}):
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(12, 8, generator=generator)  # 3, 2 and 1 ranks divide it
    mine = batch[s.data_parallel_rank :: s.data_parallel_size]
    loss = (model(mine) - mine.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(pause_s)
    s.step(step, loss=loss.item())
weights = {{name: value.full_tensor() for name, value in model.state_dict().items()}}
if s.rank == 0:
    torch.save(weights, result)
s.finish()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """No word on parallelism in the spec, and none on the mesh in the script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = [str(tmp_path / "weights.pt"), "0.04"]
    document: dict[str, Any] = job_document(
        "world",
        {
            "entrypoint": {"script": "train.py", "args": arguments},
            "nodes": {"min": 1, "max": 3},
            "workersPerNode": 1,
            "resources": {"cpu": 1},
            "checkpoint": {"storage": {"everySteps": 10_000}, "memory": {"everySteps": 1}},
        },
    )
    job = Job(tmp_path, document)
    job.run()
    try:
        yield job
    finally:
        job.end()


def undisturbed(place: Path) -> dict[str, torch.Tensor]:
    """The weights of one process that nothing interrupts."""
    result = place / "alone.pt"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    words = [sys.executable, str(place / "train.py"), str(result), "0"]
    subprocess.run(words, check=True, timeout=120, env=environment)
    found: dict[str, torch.Tensor] = torch.load(result)
    return found


def test_a_fully_sharded_model_shrinks_and_grows_from_memory(job: Job) -> None:
    view = job.running(incidents=1)
    learnt = view.incidents[0]
    assert learnt.title.startswith("the model is sharded over all ranks")
    assert (view.world_size, view.restarts) == (3, {})
    for number, size in ((2, 2), (3, 3)):
        assert job.request("resize", nodes=size).ok
        view = job.running(incidents=number)
        incident = view.incidents[-1]
        assert (incident.world_size_after, incident.restored_from) == (size, "memory")
        assert incident.steps_lost == 0
    job.kill(job.agent_pid(view.nodes[-1].name))
    view = job.running(incidents=4)
    assert view.incidents[-1].restored_from == "memory"
    assert job.command.wait(timeout=180) == 0, job.output()
    found, expected = torch.load(job.place / "weights.pt"), undisturbed(job.place)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)
