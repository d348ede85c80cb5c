"""The end of a worker's interpreter: threads, pools and exit functions, as CPython ends them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from holdfast.workers.agent.pool import leaving

LEAVE = """
import atexit, os, sys, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import pytest
import torch

from holdfast.workers.agent.pool import leaving

def main():
{script}
    leaving.leave()
    print("left", flush=True)
    os._exit(0)

if __name__ == "__main__":
    main()
"""


def leave_after(script: str, directory: Path) -> tuple[list[str], str]:
    """(lines of stdout, stderr) of a program that leaves as a worker does."""
    lines = "".join(f"    {line}\n" for line in script.splitlines())
    (directory / "leaves.py").write_text(LEAVE.format(script=lines))
    done = subprocess.run(
        [sys.executable, "leaves.py"], cwd=directory, timeout=200,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines(), done.stderr


def test_pools_that_a_script_leaves_open_end(tmp_path: Path) -> None:
    script = """sys.kept = ThreadPoolExecutor(2), ProcessPoolExecutor(1)
for pool in sys.kept:
    print(pool.submit(abs, -7).result())"""
    assert leave_after(script, tmp_path) == (["7", "7", "left"], "")


def test_threads_end_before_exit_functions_run_and_an_error_stops_neither(tmp_path: Path) -> None:
    script = """def fail():
    raise KeyError("lock file")
begin = threading.Event()
thread = threading.Thread(target=lambda: begin.wait() and print("uploaded"))
thread.start()
threading._register_atexit(begin.set)
atexit.register(print, "flushed")
atexit.register(fail)"""
    out, errors = leave_after(script, tmp_path)
    assert out == ["uploaded", "flushed", "left"] and "KeyError: 'lock file'" in errors


def test_a_thread_that_is_waited_for_is_named_with_its_place() -> None:
    inside, end = threading.Event(), threading.Event()

    def upload() -> None:
        inside.set()
        end.wait()

    thread = threading.Thread(target=upload, name="to-the-hub")
    thread.start()
    inside.wait()
    try:
        assert "to-the-hub in upload (test_leaving.py:" in leaving.waits_for()
    finally:
        end.set()
        thread.join()


def test_no_signal_handler_interrupts_the_report_of_an_error(tmp_path: Path) -> None:
    script = """import signal
def late(*_):
    raise TimeoutError("again")
for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(number, late)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
try:
    while True:
        pass
except BaseException as error:
    leaving.silence_signals()
    for number in (signal.SIGCHLD, signal.SIGUSR1) * 100:
        signal.raise_signal(number)
    print(error)"""
    assert leave_after(script, tmp_path) == (["again", "left"], "")


def test_a_hook_that_fails_is_printed_and_the_exit_functions_run(tmp_path: Path) -> None:
    script = """atexit.register(print, "flushed")
sys.excepthook = lambda kind, error, trace: print("hook", error) or {}["sent"]
leaving.call_excepthook(ValueError("bad batch"))"""
    out, errors = leave_after(script, tmp_path)
    assert out == ["hook bad batch", "flushed", "left"] and "KeyError: 'sent'" in errors


@pytest.mark.parametrize("replaced", [False, True])
def test_torchs_own_hook_prints_no_second_traceback(
    replaced: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = (lambda kind, error, trace: print("sent", error)) if replaced else sys.__excepthook__
    monkeypatch.setattr(sys, "excepthook", hook)
    for _ in range(2):  # the second group wraps the hook of the first
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        torch.distributed.destroy_process_group()
    assert sys.excepthook is not hook
    leaving.call_excepthook(ValueError("bad batch"))
    assert tuple(capsys.readouterr()) == ("sent bad batch\n" if replaced else "", "")
