"""Stacks of ranks that are about to be killed, from real processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock

from holdfast.workers.agent.linux import processes
from holdfast.workers.agent.pool import stacks
from holdfast.workers.agent.pool.stack_activity import Inspection

SCRIPT = f"""
import faulthandler, signal, sys
faulthandler.register({processes.STACK_SIGNAL}, file=int(sys.argv[1]), all_threads=False)
signal.signal(signal.SIGUSR1, lambda *_: print("SIGUSR1: saving, leaving", flush=True))
def waits_for_data():
    print("ready", flush=True)
    sys.stdin.read()
waits_for_data()
print("over", flush=True)
"""


no_answer = AsyncMock(return_value=Inspection())


def test_the_stack_of_a_script_is_taken_without_its_own_signals(tmp_path: Path) -> None:
    with (tmp_path / "stack").open("w+b") as file:
        script = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(file.fileno())], pass_fds=[file.fileno()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert script.stdout is not None and script.stdout.readline() == "ready\n"
        (stack,) = asyncio.run(stacks.take({3: (script.pid, file.fileno())}, no_answer))
        assert stack.rank == 3 and "waits_for_data" in stack.text
        assert stack.place.startswith("waits_for_data (<string>:")
        size = os.fstat(file.fileno()).st_size
        answers = AsyncMock(return_value=Inspection("its answer"))
        (stack,) = asyncio.run(stacks.take({3: (script.pid, file.fileno())}, answers))
        assert stack.text == "its answer"
        assert os.fstat(file.fileno()).st_size == size > 0, "the script was not signalled again"
        assert script.communicate()[0] == "over\n"


def test_a_program_that_does_not_know_the_signal_does_not_get_it(tmp_path: Path) -> None:
    program = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    with (tmp_path / "stack").open("w+b") as file:
        (stack,) = asyncio.run(stacks.take({0: (program.pid, file.fileno())}, no_answer))
    assert stack.text
    program.communicate()
    assert program.returncode == 0


def test_a_worker_that_ends_before_it_answers_has_no_stack() -> None:
    program = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    ends = AsyncMock(side_effect=lambda *_: (program.communicate(), Inspection())[1])
    assert asyncio.run(stacks.take({0: (program.pid, -1)}, ends)) == ()
