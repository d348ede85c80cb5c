"""A torchrun script whose project has modules named like Holdfast's folders runs unmodified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .local_rig import Job, spec

pytestmark = pytest.mark.e2e

FILES = {
    "workers/__init__.py": "",
    "workers/loader.py": "def batch(rank): return float(rank + 1)\n",
    "orchestrator.py": "SCALE = 10.0\n",
    "train.py": """
import importlib.util, json, os
from pathlib import Path
import torch
import torch.distributed as dist
import orchestrator
from workers.loader import batch

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([batch(rank) * orchestrator.SCALE])
dist.all_reduce(total)
if rank == 0:
    names = ("bench", "tests", "helm")
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    Path("result.json").write_text(json.dumps({"total": total.item(), "found": found}))
dist.destroy_process_group()
""",
}


def test_modules_named_like_ours(tmp_path: Path) -> None:
    """The path of a job's socket may have 107 bytes, so names are short here."""
    project = tmp_path / "p"
    for name, text in FILES.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    one_node = {"nodes": {"min": 1, "max": 1}, "parallelism": {}}
    job = Job(project, spec("own", 1, entrypoint={"script": "train.py"}, **one_node))
    try:
        job.run()
        view = job.wait()
        assert (view.state, job.command.returncode) == ("succeeded", 0), job.output()
    finally:
        job.end()
    result = json.loads((project / "result.json").read_text())
    assert result == {"total": 30.0, "found": []}, "a folder of the checkout can be imported"
