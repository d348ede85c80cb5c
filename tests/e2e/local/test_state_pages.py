"""Averaged weights of docs/user/session.md, and the reader of docs/user/storage.md, exactly so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.documents import job_document
from tests.pages import ROOT, blocks

from .local_rig import BOUND_S, Job

pytestmark = pytest.mark.e2e

KILLED = """\
import os, signal
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []

def kill(*_):
    steps.append(1)
    at = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], len(steps)
    if at == ("1", "0", 20):
        os.kill(os.getpid(), signal.SIGKILL)

if "RANK" in os.environ:
    register_optimizer_step_post_hook(kill)
exec(compile(open("printed.py").read(), "printed.py", "exec"))
if "RANK" not in os.environ:
    import torch
    torch.save({f"{n}.{k}": v for n, m in (("model", model), ("ema", ema))
                for k, v in m.state_dict().items()}, "undisturbed.pt")
"""


def printed(page: str, word: str) -> str:
    (block,) = [
        lines
        for lines in blocks((ROOT / page).read_text(), "python")
        if any(word in line for line in lines)
    ]
    return "\n".join(block) + "\n"


def run(place: Path, *words: str) -> None:
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, *words], cwd=place, env=plain, capture_output=True, text=True,
        timeout=BOUND_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_averaged_weights_survive_a_kill_and_are_read_without_holdfast(tmp_path: Path) -> None:
    (tmp_path / "printed.py").write_text(printed("docs/user/session.md", "AveragedModel("))
    (tmp_path / "read.py").write_text(printed("docs/user/storage.md", "safe_open("))
    (tmp_path / "train.py").write_text(KILLED)
    run(tmp_path, "train.py")
    spec = {
        "entrypoint": {"script": "train.py"},
        "workersPerNode": 2,
        "resources": {"cpu": 1, "gpu": 0},
        "checkpoint": {"memory": {"everySteps": 1}, "path": str(tmp_path / "checkpoints")},
    }
    job = Job(tmp_path, job_document("averaged", spec))
    try:
        job.run()
        assert job.command.wait(BOUND_S) == 0, job.output()[-3000:]
        view = job.wait()
        assert [one.restored_from for one in view.incidents] == ["memory"]
    finally:
        job.end()
    (newest,) = sorted((tmp_path / "checkpoints").glob("step-00000039.*"))
    run(tmp_path, "read.py", str(newest))
    read, undisturbed = (torch.load(tmp_path / f"{n}.pt") for n in ("weights", "undisturbed"))
    assert read.keys() == undisturbed.keys() and read["ema.n_averaged"] == 40
    for name, tensor in undisturbed.items():
        torch.testing.assert_close(read[name], tensor, rtol=1e-4, atol=1e-5)
