"""Reports of a script that keeps its own checkpoints: the steps that it has finished, and the work
that takes longer than a step. Works without `session.init()`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.facts import WorkerPhase
from holdfast.workers import worker_protocol

from . import agent_channel
from .loss import LossReport

PHASES: tuple[WorkerPhase, ...] = ("build", "compile", "train", "evaluate", "save")
TICK_S = 1.0


class PlannedStop(NamedTuple):
    """A planned stop, or a node that will be taken away."""

    after_step: int
    """Save after this step, which is the same on all ranks, and end."""
    seconds: float
    """Seconds until this process is killed."""


class _Steps:
    """The last report of this process."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.at_s = 0.0
        self.tick_s = 0.0
        """Time at which `progress` last sent anything."""
        self.losses: dict[str, LossReport] = {}


_last = _Steps()


def forget() -> None:
    """The script begins again in this process."""
    _last.__init__()  # type: ignore[misc]


def report(
    step: int,
    *,
    loss: float | Tensor | None = None,
    tokens: int = 0,
    flops: float = 0.0,
    total_steps: int = 0,
) -> None:
    """Reports that step `step` is finished, for a script that keeps its own checkpoints:

        from holdfast import session

        for step in range(start, total_steps):  # start: from a checkpoint of the script
            loss = train_one(step)
            session.report(step, loss=loss, total_steps=total_steps)

    Steps count from 0; they may leave out numbers, and must grow. All ranks may call it, or rank 0
    alone: then a rank that hangs is found by its stack and by what it waits for. `loss` (a number
    or a scalar tensor; of a GPU it is shown with the next report, so that the host does not wait),
    `tokens` and `flops` (model FLOPs) are those of the global batch of this step; `total_steps` is
    how many the script will train. Nothing is stored: after a restart the script continues from a
    checkpoint of its own. Outside Holdfast nothing happens.

    Raises UserError for a step that is not larger than the last one.
    """
    now_s, last = time.perf_counter(), _last
    if last.step is not None and step <= last.step:
        raise UserError(
            f"session.report: got step {step} after {last.step}; expected a larger one; call it "
            "once after every optimizer step"
        )
    channel = agent_channel.of_process()
    step_s = (now_s - last.at_s) / (step - last.step) if last.step is not None else 0.0
    last.step, last.at_s = step, now_s
    if channel is None:
        return
    if loss is not None:
        kind = loss.device.type if isinstance(loss, Tensor) else "cpu"
        loss = last.losses.setdefault(kind, LossReport(kind)).swap(loss)
    channel.phase = "train"
    channel.reports_steps()
    channel.send(
        worker_protocol.Reported(
            step=step,
            loss=loss,
            tokens=tokens,
            flops_per_step=flops,
            total_steps=total_steps,
            step_s=step_s,
        )
    )


def preemption() -> PlannedStop | None:
    """The notice that this process will be stopped; None: none has come. For a script that keeps
    its own checkpoints and calls `report` in each step:

        notice = session.preemption()
        if notice is not None and step == notice.after_step:
            save()
            sys.exit()

    Call it on all ranks after each `report`. From the first call on a planned stop (preemption,
    drain, resize, suspend) comes as a notice, and not as SIGTERM, if a step can be finished in
    time. Outside Holdfast it is always None.
    """
    channel = agent_channel.of_process()
    warning = channel.stop_notice() if channel is not None else None
    if warning is None:
        return None
    notice, at_s = warning
    return PlannedStop(notice.after_step, max(0.0, at_s + notice.grace_s - time.monotonic()))


def begin(after_step: int) -> None:
    """Says after which step this process begins to train; -1: from the beginning. Of a framework
    that knows: otherwise the first report shows it."""
    if _last.step is None or after_step < _last.step:
        _last.step, _last.at_s = after_step, time.perf_counter()
    channel = agent_channel.of_process()
    if channel is not None:
        channel.begin(after_step, "build")


def enter(name: WorkerPhase) -> None:
    """Says what this process does from now on."""
    channel = agent_channel.of_process()
    if channel is not None and channel.phase != name:
        channel.enter(name)


def progress(name: WorkerPhase) -> None:
    """Says that this process does `name`, and is not stuck in it: for each batch of an evaluation.
    Sends at most one message in TICK_S."""
    channel, now_s = agent_channel.of_process(), time.monotonic()
    if channel is None:
        return
    if channel.phase != name:
        channel.enter(name)
    elif now_s - _last.tick_s < TICK_S:
        return
    else:
        channel.send(worker_protocol.ProgressTick())
    _last.tick_s = now_s


@contextmanager
def phase(name: WorkerPhase) -> Iterator[None]:
    """`with session.phase("evaluate"):` the hang timeout inside is 600 s instead of a few step
    times. `name` is build, compile, train, evaluate or save; save also lets the rank end what it
    writes when another one fails. Raises UserError for another name."""
    if name not in PHASES:
        raise UserError(f"session.phase: got {name!r}; expected one of {', '.join(PHASES)}")
    with within(name):
        yield


@contextmanager
def within(name: WorkerPhase) -> Iterator[None]:
    """The same as `phase`, for any phase: what a worker prepares is not training."""
    channel = agent_channel.of_process()
    if channel is None:
        yield
        return
    before = channel.phase
    channel.enter(name)
    try:
        yield
    finally:
        channel.enter(before)
