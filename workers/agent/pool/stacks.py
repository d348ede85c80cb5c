"""Takes the stacks of workers before they are killed, as evidence for the attribution.

faulthandler answers from any state except stopped; py-spy reads stopped processes from outside.
Takes at most limits.STACK_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import Stack

from ..linux import processes

FAULTHANDLER_TIMEOUT_S = 0.4
"""A live process writes its stacks within milliseconds of SIGUSR1; on a busy node, 0.1 s or so."""

POLL_INTERVAL_S = 0.01
TOP_FRAMES = 6
"""Innermost frames in which a collective is looked for."""

_COLLECTIVE = re.compile(
    r"torch/distributed/|distributed_c10d|_functional_collectives|wait_tensor"
    r"|cuda/(__init__|streams)\.py.*synchronize|\b(all_reduce|all_gather|reduce_scatter|barrier)\b"
)
_FRAME = re.compile(r'^\s+(File ".*|\S.* \(.*:\d+\))\s*$')


async def take(workers: dict[int, tuple[int, int]]) -> tuple[Stack, ...]:
    """Stacks of ranks: rank -> (pid, descriptor of the file that faulthandler writes to)."""
    jobs = [_take_one(rank, pid, fd) for rank, (pid, fd) in workers.items()]
    return tuple(await asyncio.gather(*jobs))


async def _take_one(rank: int, pid: int, stack_fd: int) -> Stack:
    state = processes.state_of(pid)
    text = ""
    if state not in ("T", "t", "D", "Z", ""):
        text = await _from_faulthandler(pid, stack_fd)
    if not text and state not in ("Z", ""):
        text = await _from_py_spy(pid)
    if not text:
        text = f"no stack could be taken; the process is in state {state or 'ended'}"
    return Stack(rank, shorten(text)[: limits.MAX_STACK_BYTES], in_collective(text), state)


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


def in_collective(text: str) -> bool:
    """Whether the main thread waits for its peers in a collective."""
    return any(_COLLECTIVE.search(frame) for frame in _main_frames(text)[:TOP_FRAMES])


def _main_frames(text: str) -> list[str]:
    """Innermost first. faulthandler calls the main thread `Current thread` (the signal goes there)
    and prints it last; py-spy calls it `MainThread`."""
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ", "Process ")):
            inside = "MainThread" in line or line.startswith("Current thread ")
        elif inside and _FRAME.match(line):
            frames.append(line.strip())
    return frames
