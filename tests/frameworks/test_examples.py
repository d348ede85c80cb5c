"""The examples that train, run by the command in their first lines: a worker is killed, and the
job continues from the script's checkpoint, or from memory with the session."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.orchestrator.runtime.observe.view import JobView
from tests.e2e.local.local_rig import Job
from tests.pages import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KEPT = [ROOT / "examples/session_loop.py", ROOT / "examples/frameworks/finetune_session.py"]
"""Examples with the session."""
SAVED = [
    ROOT / "examples/ddp_script.py",
    *sorted({*(ROOT / "examples/frameworks").glob("*.py")} - {*KEPT}),
]
"""Examples that write checkpoints of their own, every 20 steps."""

Start = Callable[[Path], Job]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Runs a copy of the examples, from the directory that has it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=lambda *_: ["runs"])
    monkeypatch.chdir(tmp_path)
    jobs: list[Job] = []

    def run(example: Path) -> Job:
        (line,) = re.findall(r"^holdfast run ([^#\n]*)", example.read_text(), re.MULTILINE)
        jobs.append(Job(tmp_path, {"metadata": {"name": example.stem.replace("_", "-")}}))
        jobs[0].run(*shlex.split(line))
        return jobs[0]

    yield run
    jobs[0].end()


def end_without_worker_1(job: Job) -> JobView:
    os.kill(job.worker_pids()[1], signal.SIGKILL)
    view = job.wait()
    assert view.state == "succeeded", job.output()[-3000:]
    (incident,) = view.incidents
    assert (incident.culprit_rank, incident.world_size_after) == (1, 4)
    return view


@pytest.mark.parametrize("example", SAVED, ids=lambda path: path.stem)
def test_an_example_resumes_from_its_checkpoint(
    example: Path, start: Start, tmp_path: Path
) -> None:
    job = start(example)
    while not [*tmp_path.rglob(f"runs/{example.stem}.pt"), *tmp_path.glob("runs/*/*40*")]:
        assert job.command.poll() is None, job.output()[-3000:]
        time.sleep(0.02)
    end_without_worker_1(job)
    (log,) = job.directory.path.glob("logs/gen-*2/rank-00000.log")
    resumed = re.search(r"(?:checkpoint-|step[ =])(\d+)", log.read_text())
    assert resumed is not None and int(resumed[1]) in range(20, 200, 20)


@pytest.mark.parametrize("example", KEPT, ids=lambda path: path.stem)
def test_a_loop_with_the_session_continues_from_memory(example: Path, start: Start) -> None:
    job = start(example)
    job.until(lambda view: view.step >= 20)
    incident = end_without_worker_1(job).incidents[0]
    assert incident.restored_from == "memory"
    assert incident.steps_lost == 0 or example.stem == "finetune_session"
