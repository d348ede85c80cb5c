"""Scripts with their own checkpoints: a sweep in one directory, one ignored, one unreadable."""

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


TORN = """
import os, pickle, signal, sys

step = 0
if "--resume" in sys.argv:
    with open(sys.argv[sys.argv.index("--resume") + 1], "rb") as file:
        step = pickle.load(file)
while step < 40:
    step += 1
    if step % 10 == 0:
        with open(f"ckpt-{step}.pkl", "wb") as file:
            pickle.dump(step, file)
    if step == 35 and "--resume" not in sys.argv:
        os.truncate("ckpt-30.pkl", 1)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def job_of(place: Path, name: str, script: str = SCRIPT, **entrypoint: object) -> Job:
    (place / "train.py").write_text(dedent(script))
    document = spec(name, 1)
    entry = {"script": "train.py", "args": [f"out/{name}", "ending"], **entrypoint}
    document["spec"]["entrypoint"] = entry
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
    """Another process's torn checkpoint, written since, lies beside it."""
    job = job_of(tmp_path, "a")
    job.run()
    try:
        own, foreign = tmp_path / "out" / "a", tmp_path / "out" / "b" / "checkpoint-3"
        job.until(lambda view: view.own_checkpoint == f"{own}/model.ckpt")
        foreign.mkdir(parents=True)
        (foreign / "config.json").write_text("{}")
        job.until(lambda _view: (own / "model.ckpt").exists() and steps_and_pid(own)[0] > 5)
        os.kill(steps_and_pid(own)[1], signal.SIGKILL)
        view = job.until(lambda view: view.state == "suspended")
        assert f"has not opened {own}/model.ckpt, and would write over it" in view.hold
        assert steps_and_pid(own)[0] > 5, "it is whole"
        assert (own / "hint").read_text() == f"{own}/model.ckpt"
        assert sorted(path.name for path in foreign.parent.iterdir()) == ["checkpoint-3"]
    finally:
        job.end()


def test_after_a_start_that_cannot_read_its_checkpoint_the_one_before_is_offered(
    tmp_path: Path,
) -> None:
    job = job_of(tmp_path, "a", TORN, resumeArgs=["--resume", "{checkpoint}"])
    job.run()
    try:
        view = job.wait()
        assert view.state == "succeeded"
        killed, unreadable = view.incidents
        newest, before = tmp_path / "ckpt-30.pkl", tmp_path / "ckpt-20.pkl"
        assert killed.decision.endswith(f"; it read {newest}")
        assert "UnpicklingError: " in unreadable.evidence
        assert unreadable.decision.endswith(f"; it read {before}")
        assert newest.stat().st_size > 0, "it was trained and written again"
    finally:
        job.end()
