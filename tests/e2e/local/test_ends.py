"""Ends of local jobs, after which no process or socket of theirs is left."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .local_rig import Job, spec

pytestmark = pytest.mark.e2e

Make = Callable[[dict[str, Any]], Job]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    jobs: list[Job] = []

    def make(document: dict[str, Any]) -> Job:
        jobs.append(Job(tmp_path, document))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def script(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "train.py").write_text(text)
    return spec(
        "script", 0 + 1, entrypoint={"script": "train.py"}, nodes={"min": 1, "max": 1},
        parallelism={},
    )  # fmt: skip


def assert_nothing_is_left(job: Job) -> None:
    assert job.processes() == []
    assert not job.directory.host_socket.exists()
    assert job.directory.controller() is None


def test_a_finished_job_succeeds_and_its_last_step_is_in_storage(make: Make) -> None:
    job = make(spec("finished", steps=12))
    job.run()
    view = job.wait()
    assert (view.state, view.step, job.command.returncode) == ("succeeded", 11, 0)
    assert view.checkpoints[-1].step == 11
    assert view.incidents == []
    assert_nothing_is_left(job)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ValueError('no such luck')\n", "ValueError: no such luck"),
        ("exec('def train(:')\n", "SyntaxError: invalid syntax"),
    ],
)
def test_a_script_that_raises_at_once_fails_the_job_with_its_traceback(
    make: Make, tmp_path: Path, text: str, error: str
) -> None:
    job = make(script(tmp_path, text))
    job.run()
    view = job.wait()
    assert (view.state, job.command.returncode) == ("failed", 1)
    assert error in view.traceback and "train.py" in view.traceback
    assert "bootstrap.py" not in view.traceback, "frames of Holdfast do not help the user"
    assert len(view.incidents) == 2
    assert error in job.output()
    assert_nothing_is_left(job)


def test_a_job_whose_output_pipe_is_closed_trains_to_its_end(make: Make) -> None:
    job = make(spec("unread", steps=100, resources={"cpu": 1}))  # a note that there is no GPU
    job.run_unread()
    view = job.wait()
    assert (view.state, view.step) == ("succeeded", 99)
    assert_nothing_is_left(job)


def test_an_interrupt_cancels_a_job_whose_output_pipe_is_closed(make: Make) -> None:
    job = make(spec("unread", steps=1_000_000))
    job.run_unread()
    job.running(incidents=0)
    job.command.send_signal(signal.SIGINT)
    assert job.wait().state == "cancelled"
    assert_nothing_is_left(job)


def test_a_second_interrupt_kills_workers_that_ignore_sigterm(make: Make, tmp_path: Path) -> None:
    stubborn = (
        "import pathlib, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path('ready').touch()\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    job = make(script(tmp_path, stubborn))
    job.run()
    job.until(lambda view: view.state == "running" and (tmp_path / "ready").exists())
    job.command.send_signal(signal.SIGINT)
    job.until(lambda view: view.state == "finishing")
    while "killing all nodes" not in job.output():  # one within a second is not a second one
        job.command.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.command.wait(0.5)
    view = job.wait()
    assert view.state == "cancelled"
    assert view.finished_ns is not None
    # Long before the 30 s of the termination grace period.
    assert "killing all nodes" in job.output()
    assert_nothing_is_left(job)


def test_a_killed_controller_is_replaced_and_the_job_ends_as_without_it(make: Make) -> None:
    job = make(spec("replaced", steps=150))
    job.run()
    before = job.running(incidents=0)
    workers, controller = job.worker_pids(), job.controller_pid
    job.kill(controller)
    while job.controller_pid == controller:
        time.sleep(0.05)
    after = job.until(lambda v: v.controller_restarts == 1 and v.step > before.step)
    assert job.worker_pids() == workers and after.generation == before.generation
    assert not after.incidents
    view = job.wait()
    assert (view.state, view.step, job.command.returncode) == ("succeeded", 149, 0)
    assert "the controller was killed (SIGKILL); training continues" in job.output()
    assert_nothing_is_left(job)


def test_a_job_is_cancelled_while_its_killed_controller_is_replaced(make: Make) -> None:
    job = make(spec("stopped", steps=1_000_000))
    job.run()
    job.running(incidents=0)
    job.kill(job.controller_pid)
    while "the controller was killed" not in job.output():
        time.sleep(0.01)
    job.command.send_signal(signal.SIGTERM)
    assert job.wait().state == "cancelled"
    assert_nothing_is_left(job)


def test_a_job_whose_node_launcher_was_lost_trains_on_and_leaves_nothing(make: Make) -> None:
    job = make(spec("host", steps=1_000_000))
    job.run()
    view = job.running(incidents=0)
    agents = {job.agent_pid(node.name) for node in view.nodes}
    (launcher,) = [one for one in job.processes() if one.ppid() == job.controller_pid]
    assert launcher.pid not in agents
    launcher.kill()
    after = job.until(lambda v: v.step > view.step + 5)
    assert after.generation == view.generation and not after.incidents
    job.command.send_signal(signal.SIGTERM)
    assert job.wait().state == "cancelled"
    assert_nothing_is_left(job)


def test_hook_thread_and_exit_function_of_a_script_that_raised_run(
    make: Make, tmp_path: Path
) -> None:
    raises = (
        "import atexit, sys, threading\n"
        "sys.excepthook = lambda kind, error, trace: print('hook', error)\n"
        "atexit.register(print, 'flushed')\n"
        "failing = threading.Event()\n"
        "threading._register_atexit(failing.set)\n"
        "threading.Thread(target=lambda: failing.wait() and print('uploaded')).start()\n"
        "{}['batch']\n"
    )
    job = make(script(tmp_path, raises))
    job.run()
    view = job.wait()
    assert view.state == "failed" and "KeyError: 'batch'" in view.traceback
    printed = [line.partition("] ")[2] for line in job.output().splitlines() if "[rank 0]" in line]
    for text in ("hook 'batch'", "uploaded", "flushed"):
        assert printed.count(text) == len(view.incidents) == 2
    assert_nothing_is_left(job)


def test_a_script_that_leaves_its_pools_open_succeeds(make: Make, tmp_path: Path) -> None:
    pools = (
        "import sys\n"
        "from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor\n"
        "sys.kept = ThreadPoolExecutor(1), ProcessPoolExecutor(1)\n"
        "print('results', *[pool.submit(abs, -7).result() for pool in sys.kept])\n"
    )
    job = make(script(tmp_path, pools))
    job.run()
    assert job.wait().state == "succeeded"
    assert "results 7 7" in job.output()
    assert_nothing_is_left(job)


def test_neither_a_kill_nor_the_end_of_a_job_leaves_shared_memory(
    make: Make, tmp_path: Path
) -> None:
    shares = (
        "import os, time, torch, torch.multiprocessing\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "torch.multiprocessing.set_sharing_strategy('file_system')\n"
        "shared, memory = torch.zeros(9).share_memory_(), SharedMemory(create=True, size=9)\n"
        "torchs = [name for name in os.listdir('/dev/shm') if f'torch_{os.getpid()}_' in name]\n"
        "with open('shared', 'a') as file:\n"
        "    print(torchs[0], memory.name, file=file)\n"
        "time.sleep(1000)\n"
    )
    job, names = make(script(tmp_path, shares)), tmp_path / "shared"
    job.run()
    job.until(lambda _view: names.exists() and names.read_text().count("\n") == 2)
    job.kill(job.worker_pids()[0])
    job.until(lambda _view: names.read_text().count("\n") == 4)
    job.command.send_signal(signal.SIGINT)
    assert job.wait().state == "cancelled"
    written = names.read_text().split()
    assert len(written) == 8  # two ranks, two starts
    assert not [name for name in written if Path("/dev/shm", name).exists()]
    assert_nothing_is_left(job)
