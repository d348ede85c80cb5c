"""A crash in native code as the end of a worker's output shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.orchestrator.core.failure import last_frame
from holdfast.workers.agent.pool import last_output

WATCHDOG = """step 500 loss 2.1
[rank2]:[E ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation timeout
[rank2]:[E ProcessGroupNCCL.cpp:684] We are taking the entire process down.
Fatal Python error: Aborted
"""

CRASH = """
import ctypes, faulthandler, threading
faulthandler.enable(file=2)
threading.Thread(target=threading.Event().wait, daemon=True).start()
libc = ctypes.CDLL(None)

def step():
    print("step 7", flush=True)
    libc.dprintf(2, b"terminate called after throwing an instance of 'c10::Error'\\n")
    libc.dprintf(2, b"  what():  bad index\\n")
    libc.abort()

step()
"""


def test_the_line_of_the_nccl_watchdog_is_found_in_the_last_output(tmp_path: Path) -> None:
    log = tmp_path / "rank-00002.log"
    log.write_text("x" * last_output.TAIL_BYTES + "\n" + WATCHDOG)
    crash = last_output.crash(last_output.tail(str(log)))
    assert crash is not None and crash.secondary
    assert "Watchdog caught collective operation timeout" in crash.message
    assert last_output.tail(str(tmp_path / "absent")) == ""


@pytest.mark.parametrize(
    "text",
    ["", "terminate called after throwing an instance of 'std::bad_alloc'\n",
     "NCCL INFO Bootstrap: Using eth0\nNCCL WARN no plugin\ndouble free or corruption\n"],
)  # fmt: skip
def test_other_output_before_a_sigabrt_is_not_the_network(text: str) -> None:
    assert last_output.crash(text) is None


def test_a_real_crash_has_its_message_and_the_innermost_python_frame(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text(CRASH)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    crash = last_output.crash(ended.stdout + ended.stderr)
    assert crash is not None and not crash.secondary
    assert crash.message.startswith("terminate called") and crash.message.endswith("bad index")
    assert last_frame(crash.traceback) == f'File "{script}", line 11 in step'
    assert "threading.py" not in crash.traceback


def test_the_error_after_a_usage_message_is_the_reason_of_an_exit() -> None:
    code = "import argparse; argparse.ArgumentParser('train.py').parse_args(['--lt', '3'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2
    found = last_output.usage(f"reads usage: data\n{ended.stderr}")
    assert found is not None
    assert (found.error_type, found.message) == (
        "", "train.py: error: unrecognized arguments: --lt 3"
    )  # fmt: skip
    assert last_output.usage("reads usage: data\nbash: no such file\n") is None
