"""Takes the stacks of workers, as evidence for the attribution.

The pulse thread is asked first, and reports all threads. If it does not answer, faulthandler writes
the main thread: reading threads that run may end a healthy process with SIGSEGV. py-spy reads
stopped processes from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import Stack, StackActivity
from holdfast.orchestrator.protocol.rank_stacks import RankStacks, spans_of

from ..linux import processes
from . import py_spy, stack_activity
from .stack_activity import Inspection

ANSWER_TIMEOUT_S = 0.4
"""A live process answers or writes within milliseconds; on a busy node, 0.1 s or so."""
INSPECTION_TIMEOUT_S = 0.7
"""Limit for the pulse threads of workers that go on. The controller asks 1 s before it decides."""
CLASSIFY_TIMEOUT_S = 0.2
UNABLE = ("T", "t", "D", "Z", "")
"""States in which a process answers nothing."""
SHOWN_TIMEOUT_S = 6.0
"""Limit for py-spy, where a user waits and no recovery does."""
MAX_SPIES = 8
"""Processes of py-spy at the same time, for a user."""
STATES = {"T": "stopped", "t": "stopped", "D": "blocked in the kernel", "Z": "ended", "": "ended"}

Ask = Callable[[int, float], Awaitable[Inspection]]
"""(rank, timeout) -> what its pulse thread reports."""

POLL_INTERVAL_S = 0.01


async def take(workers: dict[int, tuple[int, int]], ask: Ask) -> tuple[Stack, ...]:
    """Stacks of ranks before they are stopped, without those that have ended: rank -> (pid,
    descriptor of the file that faulthandler writes to)."""
    jobs = [_take_one(rank, pid, fd, ask) for rank, (pid, fd) in workers.items()]
    return tuple(stack for stack in await asyncio.gather(*jobs) if stack.text)


async def inspect(workers: dict[int, tuple[int, int]], ask: Ask) -> tuple[Stack, ...]:
    """Stacks of ranks that go on. No signal is sent, since a script may handle it itself: only the
    pulse threads are asked, and a worker that does not answer has no text."""
    jobs = [_inspect_one(rank, pid, ask) for rank, (pid, _fd) in workers.items()]
    return tuple(await asyncio.gather(*jobs))


async def show(workers: dict[int, tuple[int, int]], ask: Ask) -> tuple[RankStacks, ...]:
    """Stacks of ranks that go on, for a user: of a rank whose pulse thread does not answer, py-spy
    reads it without a signal."""
    few = asyncio.Semaphore(MAX_SPIES)
    jobs = [_show_one(rank, pid, ask, few) for rank, (pid, _fd) in workers.items()]
    return tuple(await asyncio.gather(*jobs))


async def _show_one(rank: int, pid: int, ask: Ask, few: asyncio.Semaphore) -> RankStacks:
    state = processes.state_of(pid)
    answer = Inspection() if state in UNABLE else await ask(rank, INSPECTION_TIMEOUT_S)
    text, problem = answer.text, ""
    if not text and state not in ("Z", ""):
        dump = ("dump", "--nonblocking", "--full-filenames", "--pid", str(pid))
        try:
            async with few:
                out = await py_spy.run(*dump, timeout_s=SHOWN_TIMEOUT_S)
            text = out.decode(errors="replace")
        except py_spy.SpyError as error:
            problem = str(error)
    state = processes.state_of(pid)
    shown = await _stack(rank, text, state, answer)
    frames = tuple(map(stack_activity.in_one_form, stack_activity.main_frames(shown.text)))
    return RankStacks(
        ranks=(rank,),
        frames=frames,
        activity=shown.activity,
        state=STATES.get(state, ""),
        problem="" if frames else problem or "its main thread runs no Python",
        collectives=spans_of(answer.groups),
    )


async def _take_one(rank: int, pid: int, stack_fd: int, ask: Ask) -> Stack:
    until_s = time.monotonic() + limits.STACK_TIMEOUT_S - CLASSIFY_TIMEOUT_S
    state = processes.state_of(pid)
    answer = Inspection() if state in UNABLE else await ask(rank, ANSWER_TIMEOUT_S)
    text, state = answer.text, processes.state_of(pid)
    if not text and state not in UNABLE:
        with contextlib.suppress(OSError):  # it has ended
            text = await _from_faulthandler(pid, stack_fd)
    if not text and state not in ("Z", ""):
        text = f"no stack could be taken; the process is in state {state}"
        with contextlib.suppress(py_spy.SpyError):
            spy = ("dump", "--nonblocking", "--pid", str(pid))
            out = await py_spy.run(*spy, timeout_s=until_s - time.monotonic())
            text = out.decode(errors="replace") or text
    return await _stack(rank, text, state, answer)


async def _inspect_one(rank: int, pid: int, ask: Ask) -> Stack:
    state = processes.state_of(pid)
    answer = Inspection() if state in UNABLE else await ask(rank, INSPECTION_TIMEOUT_S)
    main = answer.text.partition("\nThread ")[0]
    return await _stack(rank, main, processes.state_of(pid), answer)


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
        next(map(stack_activity.in_one_form, stack_activity.main_frames(text)), ""),
    )


async def _from_faulthandler(pid: int, stack_fd: int) -> str:
    before = os.fstat(stack_fd).st_size
    if not processes.catches(pid, processes.STACK_SIGNAL):
        return ""  # it is another program, and would end at the signal
    os.kill(pid, processes.STACK_SIGNAL)
    size, give_up = before, asyncio.get_running_loop().time() + ANSWER_TIMEOUT_S
    while asyncio.get_running_loop().time() < give_up:
        await asyncio.sleep(POLL_INTERVAL_S)
        now = os.fstat(stack_fd).st_size
        if now > before and now == size:
            break  # the file is complete
        size = now
    text = os.pread(stack_fd, limits.MAX_STACK_BYTES, before).decode(errors="replace")
    return text.replace("Stack ", "Current thread ", 1)


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
