"""The driver of a submitted job is replaced when it is killed. Each case is a process."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from holdfast.orchestrator.cli.targets.supervisor import accept_stop, supervise
num_killed = supervise("driver", pause_s=0.0, max_early=3)
assert "ray" not in sys.modules
print("driver", num_killed, flush=True)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)\n"
WAIT = "os.read(0, 1)\n"


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + program], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_killed_driver_is_replaced_and_the_exit_code_is_that_of_the_last() -> None:
    process = start(f"if not num_killed: {KILL}sys.exit(7)\n")
    stdout, stderr = process.communicate()
    assert process.returncode == 7 and stdout == "driver 0\ndriver 1\n"
    assert "was killed (SIGKILL); training continues, and another one starts" in stderr


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_driver_that_ends_is_not_replaced(code: int) -> None:
    process = start(f"sys.exit({code})\n")
    assert process.communicate() == ("driver 0\n", "") and process.returncode == code


def test_drivers_that_are_all_killed_early_end_the_ray_job() -> None:
    process = start(KILL)
    stdout, stderr = process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    assert stdout == "driver 0\ndriver 1\ndriver 2\n" and "this command ends" in stderr


def test_a_ray_job_that_is_stopped_gets_no_other_driver() -> None:
    """Ray signals the process and its children, and kills what is left seconds later."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
    process = start(f"{handler}print('ready', flush=True)\n{WAIT}{KILL}")
    assert process.stdout is not None and process.stdin is not None
    assert [process.stdout.readline() for _ in range(2)] == ["driver 0\n", "ready\n"]
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    process.stdin.write("x")
    process.stdin.close()
    process.wait()
    assert process.stdout.read() == "" and process.returncode == 128 + signal.SIGKILL
    process = start(WAIT)
    assert process.stdout is not None and process.stdout.readline() == "driver 0\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM


def test_a_stop_while_another_driver_starts_is_handled_once_it_can_cancel_the_job() -> None:
    process = start(
        f"if not num_killed: {KILL}"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "from holdfast.orchestrator.cli.targets.tempdir import on_sigterm\n"
        "with on_sigterm(lambda: sys.exit(1)): accept_stop(); print('not here')\n"
    )
    stdout, _stderr = process.communicate()
    assert stdout == "driver 0\ndriver 1\n" and process.returncode == 1


def test_ctrl_c_between_two_drivers_reaches_the_next() -> None:
    pid, terminal = pty.fork()
    if not pid:
        program = PROGRAM.replace("pause_s=0.0", "pause_s=600") + (
            f"if not num_killed: {KILL}try: accept_stop(); time.sleep(60)\n"
            "except KeyboardInterrupt: sys.exit(3)\n"
        )
        os.execv(sys.executable, [sys.executable, "-c", program])
    with os.fdopen(terminal, "r+b", buffering=0) as screen:
        while b"was killed" not in screen.readline():
            pass
        screen.write(b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_a_stop_that_is_delivered_twice_is_one_request() -> None:
    """A second request to cancel would give up the final checkpoint."""
    program = (
        "import os, signal\n"
        "from holdfast.orchestrator.cli.targets.tempdir import on_sigterm\n"
        "with on_sigterm(lambda: print('cancel', flush=True)):\n"
        "    for _ in range(2): os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "cancel\n")


def test_the_driver_ends_with_its_parent() -> None:
    process = start("print(os.getpid(), flush=True)\n" + WAIT)
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert lines[0] == "driver 0\n" and int(lines[1]) != process.pid
    process.kill()
    assert process.stdout.read() == "", "the pipe ends with its last writer"
    process.wait()
