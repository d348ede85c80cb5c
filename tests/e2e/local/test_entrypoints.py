"""Programs of a worker: the line of a launcher, another interpreter, a program of the user."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import site
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from tests.documents import job_document

from .local_rig import BOUND_S, Job

pytestmark = pytest.mark.e2e

RANKS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("rank", dist.get_rank(), "sum", int(value), os.environ["MINE"], *sys.argv[1:], flush=True)
dist.destroy_process_group()
"""
METADATA = "Metadata-Version: 2.1\nName: hftiny\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
SESSION = """
import sys, time
import torch
import torch.distributed as dist
from holdfast import session

s = session.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(s.restore(model, optimizer), 60):
    value = torch.ones(1)
    dist.all_reduce(value)
    time.sleep(0.1)
    s.step(step, loss=1.0)
print("python", sys.executable, flush=True)
s.finish()
if s.rank == 1:
    raise LookupError("the end")
session.leave()
"""
SAYS = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["MINE"], *sys.argv[1:])
"""
LAUNCHES = """
set -e
echo "before $RANK"
torchrun --nproc_per_node=8 train.py torchrun
venv/bin/python -m torch.distributed.run --standalone says.py module
MINE=prefix PYTHONPATH=packages accelerate launch --mixed_precision bf16 says.py accelerate
uv run --no-project --no-config --python venv torchrun --nproc_per_node 4 says.py uv
echo "after $RANK"
"""
FAKE_ACCELERATE = """
import os, types

def launch_command_parser():
    return types.SimpleNamespace(parse_args=lambda words: words)

def launch_command(words):
    import torch.distributed.run as torchrun
    os.environ["MINE"] += words[1]
    torchrun.run(words)

def simple_launcher(*arguments): ...
tpu_launcher = tpu_pod_launcher = sagemaker_launcher = simple_launcher
"""
PROGRAM = """
trap 'echo got SIGTERM; exit 0' TERM
setsid sleep 1000 &
echo "rank $RANK of $WORLD_SIZE"
[ -e fail ] && exit 7
sleep 1000 & wait
"""


def job(place: Path, name: str, entrypoint: dict[str, Any], **spec: Any) -> Job:
    document = job_document(
        name,
        {"entrypoint": entrypoint, "workersPerNode": 2, "resources": {"cpu": 1, "gpu": 0}, **spec},
    )
    return Job(place, document)


def log_of(job: Job, rank: int, generation: int = 1) -> str:
    path = job.directory.path / f"logs/gen-{generation:04}/rank-{rank:05}.log"
    return path.read_text() if path.exists() else ""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def writers_of(job: Job) -> dict[int, list[int]]:
    """Rank -> processes whose output is the log of that rank."""
    found: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            log = os.readlink(f"/proc/{process.pid}/fd/1")  # noqa: PTH115
            match = re.fullmatch(r".*/rank-(\d+)\.log", log)
            if match and log.startswith(str(job.directory.path.resolve())):
                found.setdefault(int(match[1]), []).append(process.pid)
    return found


def test_the_line_of_a_launcher_needs_no_spec(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(dedent(RANKS))
    one = job(tmp_path, "line", {"script": "unused.py"})
    options = ["--home", str(one.home), "--name", "line", "--gpus", "0", "--env", "MINE=yes"]
    line = ["torchrun", "--standalone", "--nproc_per_node=2", str(script), "a", "--lr=3"]
    with (tmp_path / "output.log").open("ab") as output:
        one.command = subprocess.Popen(
            [sys.executable, "-m", "holdfast.orchestrator.cli.main", "run", *options, "--", *line],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        assert one.wait().state == "succeeded"
        assert log_of(one, 1) == "rank 1 sum 2 yes a --lr=3\n"
        assert "workersPerNode: 2" in one.output()
        assert "--standalone: not used" in one.output().replace("\n", " ")
    finally:
        one.end()


def make_environment(venv: Path) -> Path:
    """An environment with the packages of the one that runs the tests, and the program torchrun."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    root = Path(__file__).parents[3]
    (packages / "shared.pth").write_text("\n".join([*site.getsitepackages(), str(root)]))
    torchrun = venv / "bin" / "torchrun"
    torchrun.write_text(f"#!{venv}/bin/python\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    return venv


def test_launchers_in_a_shell_script_run_their_script_once_in_each_rank(tmp_path: Path) -> None:
    make_environment(tmp_path / "venv")
    commands = tmp_path / "packages" / "accelerate" / "commands"
    commands.mkdir(parents=True)
    for directory in (commands, commands.parent):
        (directory / "__init__.py").touch()
    (commands / "launch.py").write_text(FAKE_ACCELERATE)
    (tmp_path / "train.py").write_text(dedent(RANKS))
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "run.sh").write_text(LAUNCHES)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of uv
    one = job(tmp_path, "shell", {"command": "bash run.sh"}, env={"MINE": "yes", "PATH": path})
    one.run()
    try:
        one.until(lambda view: view.state == "running")  # the import of torch has a time of its own
        view = one.wait()
        assert view.state == "succeeded" and not view.incidents, log_of(one, 0) + log_of(one, 1)
        for rank in range(2):
            said = [line for line in log_of(one, rank).splitlines() if str(rank) in line.split()]
            assert [line for line in said if not line.startswith("holdfast:")] == [
                f"before {rank}",
                f"rank {rank} sum 2 yes torchrun",
                f"rank {rank} of 2 yes module",
                f"rank {rank} of 2 prefixbf16 accelerate",
                f"rank {rank} of 2 yes uv",
                f"after {rank}",
            ]
        assert "--nproc_per_node=8: the job decides, and has 2 workers" in log_of(one, 0)
    finally:
        one.end()


def test_an_unknown_option_in_a_shell_script_fails_the_job_without_a_restart(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.sh").write_text("torchrun --new-option train.py")
    one = job(tmp_path, "unknown", {"command": "bash run.sh"})
    one.run()
    try:
        view = one.wait()
        (incident,) = view.incidents
        assert (view.state, view.generation) == ("failed", 1)
        assert "torchrun with the unknown option --new-option" in incident.evidence
        assert "exit code 2" in incident.evidence
    finally:
        one.end()


def test_a_session_in_another_interpreter_loses_no_step_to_a_kill(tmp_path: Path) -> None:
    venv = make_environment(tmp_path / "venv")
    (tmp_path / "train.py").write_text(dedent(SESSION))
    one = job(
        tmp_path, "other", {"script": "train.py", "python": "venv"},
        checkpoint={"memory": {"everySteps": 1}},
    )  # fmt: skip
    one.run()
    try:
        one.until(lambda view: view.step >= 5)
        (pid,) = writers_of(one)[1]
        one.kill(pid)
        view = one.wait()
        first, *_more, last = view.incidents
        assert (first.culprit_rank, first.steps_lost) == (1, 0), first
        assert (view.step, view.state) == (59, "failed")
        assert "LookupError" in last.evidence and last.culprit_rank == 1
        assert f"python {venv}/bin/python" in log_of(one, 0, view.generation)
    finally:
        one.end()


WITH_PACKAGES = """
import hftiny
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "has", hftiny.VERSION, flush=True)
dist.destroy_process_group()
"""


def test_uv_adds_packages_for_the_script_alone(tmp_path: Path) -> None:
    make_environment(tmp_path / ".venv")
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels/hftiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("hftiny/__init__.py", "VERSION = '1.0'")
        wheel.writestr("hftiny-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("hftiny-1.0.dist-info/WHEEL", WHEEL)
        wheel.writestr("hftiny-1.0.dist-info/RECORD", "")
    (tmp_path / "requirements.txt").write_text("hftiny\n")
    (tmp_path / "train.py").write_text(WITH_PACKAGES)
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not Path(uv).exists():
        pytest.skip("uv is not installed")
    command = (
        f"{uv} run --no-index --find-links wheels --with-requirements requirements.txt train.py"
    )
    one = job(tmp_path, "packages", {"command": command}, env={"UV_NO_CONFIG": "1"})
    one.run()
    try:
        view = one.wait()
        assert view.state == "succeeded", log_of(one, 0) + one.output()
        assert [f"rank {rank} has 1.0" in log_of(one, rank) for rank in range(2)] == [True, True]
    finally:
        one.end()


def test_a_program_gets_signals_and_its_exit_code_counts(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(PROGRAM)
    one = job(
        tmp_path, "program", {"command": "bash run.sh"},
        recovery={"budgets": {"user": {"restarts": 1}}},
    )  # fmt: skip
    one.run()
    try:
        one.until(lambda view: view.state == "running")
        until(lambda: "rank 1 of 2" in log_of(one, 1))
        before = [pid for pids in writers_of(one).values() for pid in pids]
        assert len(before) == 6  # of each rank the program and two children
        assert one.request("suspend").ok
        one.until(lambda view: view.state == "suspended")
        assert "got SIGTERM" in log_of(one, 0) and "got SIGTERM" in log_of(one, 1)
        until(lambda: not any(map(psutil.pid_exists, before)))  # also of other sessions
        (tmp_path / "fail").touch()
        assert one.request("resume").ok
        view = one.wait()
        assert view.state == "failed"
        assert "exit code 7" in view.incidents[-1].evidence
        assert writers_of(one) == {}
    finally:
        one.end()
