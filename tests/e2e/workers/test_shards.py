"""`Session.shards` beside an optimizer over DTensors and torch's own clipping, on real groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("compare_shards.py")


@pytest.mark.parametrize(
    ("shard", "tensor", "world_size"),
    [
        pytest.param(4, 1, 4, id="fsdp"),
        pytest.param(2, 1, 4, id="hsdp"),
        pytest.param(1, 1, 2, id="replicas"),
        pytest.param(2, 2, 4, id="tensor-fsdp"),
        pytest.param(1, 2, 2, id="tensor"),
    ],
)
def test_optimizing_shards_gives_the_same_model_and_gradient_norms(
    shard: int, tensor: int, world_size: int
) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, f"--nproc-per-node={world_size}", str(SCRIPT), str(shard), str(tensor)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["apart"] < 1e-6
    for quick, usual in found["norms"]:
        assert quick == pytest.approx(usual, rel=1e-5)
        assert usual > 0.05, "a norm that clipping does not change proves less"
