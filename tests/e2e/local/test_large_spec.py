"""A job whose spec is larger than a packet of its agents' sockets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .local_rig import Job, spec

pytestmark = pytest.mark.e2e

SCRIPT = """
import json, os, subprocess
from pathlib import Path
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    lengths = [len(os.environ[f"TEXT_{n}"]) for n in range(3)]
    child = subprocess.run(["printenv", "TEXT_2"], capture_output=True, check=True)
    Path("result.json").write_text(json.dumps([*lengths, len(child.stdout.strip())]))
dist.destroy_process_group()
"""


def test_300_kib_of_variables_reach_workers_and_their_children(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {f"TEXT_{number}": "x" * 100_000 for number in range(3)}
    one_node = {"nodes": {"min": 1, "max": 1}, "parallelism": {}}
    job = Job(tmp_path, spec("big", 1, entrypoint={"script": "train.py"}, env=env, **one_node))
    try:
        job.run()
        view = job.wait()
        assert (view.state, job.command.returncode) == ("succeeded", 0), job.output()
        assert json.loads((tmp_path / "result.json").read_text()) == [100_000] * 4
    finally:
        job.end()
