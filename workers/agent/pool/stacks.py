"""Takes the stacks of workers, as evidence for the attribution.

faulthandler answers from any state except stopped; py-spy reads stopped processes from outside.
faulthandler and py-spy take at most limits.STACK_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import Stack, StackActivity

from ..linux import processes
from . import stack_activity
from .stack_activity import Inspection

FAULTHANDLER_TIMEOUT_S = 0.4
"""A live process writes its stacks within milliseconds of SIGUSR1; on a busy node, 0.1 s or so."""
INSPECTION_TIMEOUT_S = 0.7
"""For the pulse threads of workers that go on. The controller asks 1 s before it decides."""
CLASSIFY_TIMEOUT_S = 0.2
UNABLE = ("T", "t", "D", "Z", "")
"""States in which a process answers nothing."""

Ask = Callable[[int, float], Awaitable[Inspection]]
"""(rank, timeout) -> what its pulse thread reports."""

POLL_INTERVAL_S = 0.01


async def take(workers: dict[int, tuple[int, int]], ask: Ask) -> tuple[Stack, ...]:
    """Stacks of ranks before they are killed: rank -> (pid, descriptor of the file that
    faulthandler writes to). `ask` gets the collectives from a worker's pulse thread."""
    jobs = [_take_one(rank, pid, fd, ask) for rank, (pid, fd) in workers.items()]
    return tuple(await asyncio.gather(*jobs))


async def inspect(workers: dict[int, tuple[int, int]], ask: Ask) -> tuple[Stack, ...]:
    """Stacks of ranks that go on. No signal is sent, since a script may handle it itself: only the
    pulse threads are asked, and a worker that does not answer has no text."""
    jobs = [_inspect_one(rank, pid, ask) for rank, (pid, _fd) in workers.items()]
    return tuple(await asyncio.gather(*jobs))


async def _take_one(rank: int, pid: int, stack_fd: int, ask: Ask) -> Stack:
    state = processes.state_of(pid)
    text, answer = "", Inspection()
    if state not in UNABLE:
        text, answer = await asyncio.gather(
            _from_faulthandler(pid, stack_fd), ask(rank, FAULTHANDLER_TIMEOUT_S)
        )
    if not text and state not in ("Z", ""):
        text = await _from_py_spy(pid)
    if not text:
        text = f"no stack could be taken; the process is in state {state or 'ended'}"
    return await _stack(rank, text, state, answer)


async def _inspect_one(rank: int, pid: int, ask: Ask) -> Stack:
    state = processes.state_of(pid)
    answer = Inspection() if state in UNABLE else await ask(rank, INSPECTION_TIMEOUT_S)
    return await _stack(rank, answer.text, processes.state_of(pid), answer)


async def _stack(rank: int, text: str, state: str, answer: Inspection) -> Stack:
    kind: StackActivity = ""
    try:
        async with asyncio.timeout(CLASSIFY_TIMEOUT_S):
            # In a thread: the source file may be on a file system that does not answer.
            kind = await asyncio.to_thread(stack_activity.activity, text)
    except TimeoutError:
        kind = stack_activity.activity(text, line_of=lambda file, number: "")
    return Stack(
        rank,
        shorten(text)[: limits.MAX_STACK_BYTES],
        stack_activity.waits_for_peers(kind),
        state,
        kind,
        answer.groups,
    )


async def _from_faulthandler(pid: int, stack_fd: int) -> str:
    before = os.fstat(stack_fd).st_size
    os.kill(pid, signal.SIGUSR1)
    size, give_up = before, asyncio.get_running_loop().time() + FAULTHANDLER_TIMEOUT_S
    while asyncio.get_running_loop().time() < give_up:
        await asyncio.sleep(POLL_INTERVAL_S)
        now = os.fstat(stack_fd).st_size
        if now > before and now == size:
            break  # the file is complete
        size = now
    return os.pread(stack_fd, limits.MAX_STACK_BYTES, before).decode(errors="replace")


async def _from_py_spy(pid: int) -> str:
    """py-spy reads the memory of the process. --nonblocking: it never leaves the process paused."""
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return ""
    spy = await asyncio.create_subprocess_exec(
        tool, "dump", "--nonblocking", "--pid", str(pid),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limits.STACK_TIMEOUT_S - FAULTHANDLER_TIMEOUT_S):
            out, _ = await spy.communicate()
    except TimeoutError:
        spy.kill()
        await spy.wait()
        return ""
    return out.decode(errors="replace") if spy.returncode == 0 else ""


def shorten(text: str) -> str:
    """The text without the frames that start a worker and without threads that run no Python."""
    kept: list[str] = []
    for block in re.split(r"\n(?=(?:Current thread|Thread) )", text):
        frames = []
        for line in block.splitlines():
            if "workers/agent/pool/worker_main.py" in line:
                break
            if line.strip() and "<frozen runpy>" not in line and "<no Python frame>" not in line:
                frames.append(line)
        if len(frames) > 1 or not block.startswith("Thread "):
            kept += frames
    return "\n".join(kept)
