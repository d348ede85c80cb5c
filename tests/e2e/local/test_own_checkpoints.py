"""Two runs of a sweep in one directory: each has its own checkpoints, and one that ignores them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from textwrap import dedent

import pytest

from .local_rig import Job, spec

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, pathlib, sys, time
import torch

out, ending = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)
(out / "hint").write_text(os.environ.get("HOLDFAST_RESUME_FROM_CHECKPOINT", ""))
step = 0
while not ending.exists():
    step += 1
    torch.save([step, os.getpid()], out / "next")
    os.replace(out / "next", out / "model.ckpt")
    time.sleep(0.05)
"""


def job_of(place: Path, name: str) -> Job:
    (place / "train.py").write_text(dedent(SCRIPT))
    document = spec(name, 1)
    document["spec"]["entrypoint"] = {"script": "train.py", "args": [f"out/{name}", "ending"]}
    document["spec"] |= {"nodes": {"min": 1, "max": 1}, "workersPerNode": 1}
    del document["spec"]["parallelism"]
    return Job(place, document)


def steps_and_pid(directory: Path) -> tuple[int, int]:
    import torch

    steps, pid = torch.load(directory / "model.ckpt")
    return steps, pid


def test_a_restart_touches_only_its_own_checkpoints_and_is_held_before_it_overwrites_one(
    tmp_path: Path,
) -> None:
    """Beside it is a torn checkpoint of another process, written since."""
    job = job_of(tmp_path, "a")
    job.run()
    try:
        own, foreign = tmp_path / "out" / "a", tmp_path / "out" / "b" / "checkpoint-3"
        job.until(lambda view: view.own_checkpoint == f"{own}/model.ckpt")
        foreign.mkdir(parents=True)
        (foreign / "config.json").write_text("{}")
        job.until(lambda _view: steps_and_pid(own)[0] > 5)
        os.kill(steps_and_pid(own)[1], signal.SIGKILL)
        view = job.until(lambda view: view.state == "suspended")
        assert f"has not opened {own}/model.ckpt, and would write over it" in view.hold
        assert steps_and_pid(own)[0] > 5, "it is whole"
        assert (own / "hint").read_text() == f"{own}/model.ckpt"
        assert sorted(path.name for path in foreign.parent.iterdir()) == ["checkpoint-3"]
    finally:
        job.end()
