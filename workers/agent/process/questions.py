"""Answers what a user asks about running workers: their stacks, and where one spends its time.

No decision depends on an answer, so the machine does not see the questions. An error becomes the
answer: it never ends the agent.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.rank_stacks import RankStacks, fold

from ..pool import py_spy, stacks
from ..pool.worker_pool import WorkerPool

SPY_START_S = 8.0
"""Seconds to find the symbols of an interpreter with torch, and to write the file."""


async def answer(
    question: m.Question, workers: WorkerPool, send: Callable[[m.Message], None]
) -> None:
    if isinstance(question, m.ShowStacks):
        send(await _stacks(question, workers))
    else:
        send(await _profile(question, workers))


async def _stacks(question: m.ShowStacks, workers: WorkerPool) -> m.StacksShown:
    processes = {rank: workers.find(question.generation, rank) for rank in question.ranks}
    alive = {rank: process for rank, process in processes.items() if process is not None}
    try:
        shown = await stacks.show(alive, partial(workers.inspect, question.generation))
    except Exception as error:  # whatever it is, the node trains on
        problem = f"no stack could be taken: {type(error).__name__}: {error}"
        shown = (RankStacks(ranks=tuple(alive), problem=problem),)
    return m.StacksShown(question=question.question, stacks=tuple(fold(shown)))


async def _profile(question: m.RecordProfile, workers: WorkerPool) -> m.ProfileRecorded:
    process = workers.find(question.generation, question.rank)
    number = question.question
    if process is None:
        problem = f"rank {question.rank} of generation {question.generation} does not run any more"
        return m.ProfileRecorded(question=number, problem=problem)
    try:
        content = zlib.compress(await _record(question, process[0]), 9)
    except py_spy.SpyError as error:
        return m.ProfileRecorded(question=number, problem=str(error))
    except Exception as error:  # whatever it is, the node trains on
        return m.ProfileRecorded(question=number, problem=f"{type(error).__name__}: {error}")
    if len(content) > limits.MAX_ANSWER_BYTES:
        problem = (
            f"the profile has {len(content)} bytes, compressed; expected at most "
            f"{limits.MAX_ANSWER_BYTES}; lower --seconds or --rate"
        )
        return m.ProfileRecorded(question=number, problem=problem)
    return m.ProfileRecorded(question=number, content=content)


async def _record(question: m.RecordProfile, pid: int) -> bytes:
    with tempfile.TemporaryDirectory(prefix="holdfast-profile-") as place:
        file = Path(place, "profile")
        options = ["--idle"] if question.idle else []
        await py_spy.run(
            "record", "--nonblocking", *options,
            "--pid", str(pid),
            "--duration", str(max(1, round(question.seconds))),
            "--rate", str(question.rate),
            "--format", question.format,
            "--output", str(file),
            timeout_s=question.seconds + SPY_START_S,
        )  # fmt: skip
        return file.read_bytes()
