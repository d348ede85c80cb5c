"""What the agent knows of the workers of one generation. Pure records.

Owns: a worker's progress and how it ended. Must not: decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import (
    Exit,
    Membership,
    Stack,
    WorkerBeat,
    WorkerPhase,
    WorkerSeat,
    report_fields,
)
from holdfast.orchestrator.protocol.messages import LaunchWorkers, Stage
from holdfast.workers import worker_protocol

NS = 1_000_000_000
SIGKILL, SIGTERM, SIGSTOP = 9, 15, 19
"""Linux numbers; the signal module is of no use to a pure machine."""


@dataclass
class Worker:
    """One seat of the generation."""

    seat: WorkerSeat
    since_ns: int
    pid: int = 0
    ended: bool = False
    exit: Exit | None = None
    phase: WorkerPhase = "start"
    step: int = -1
    ticks: int = 0
    progress_ns: int = 0
    pulse_ns: int = 0
    last: worker_protocol.Progress | None = None
    failed: worker_protocol.Failed | None = None
    finished: bool = False
    signals: set[int] = field(default_factory=set)
    """Sent by order of the controller."""

    def heard(self, now_ns: int, message: worker_protocol.FromWorker) -> None:
        """Note a sign of life or of progress."""
        self.pulse_ns = now_ns
        match message:
            case worker_protocol.PhaseChanged():
                self.phase = message.phase
            case worker_protocol.Progress():
                self.step, self.last, self.phase = message.step, message, "train"
            case worker_protocol.Failed():
                self.failed = message
            case worker_protocol.Finished():
                self.finished = True
                self.phase = "finish"
            case worker_protocol.Pulse():
                return
            case _:
                pass
        self.ticks += 1
        self.progress_ns = now_ns

    def beat(self, now_ns: int, stopped: bool) -> WorkerBeat:
        last = self.last or worker_protocol.Progress(step=-1)
        return WorkerBeat(
            rank=self.seat.rank,
            phase=self.phase,
            step=self.step,
            ticks=self.ticks,
            quiet_s=(now_ns - max(self.progress_ns, self.since_ns)) / NS,
            pulse_age_s=(now_ns - max(self.pulse_ns, self.since_ns)) / NS,
            stopped=stopped,
            **report_fields(last),
        )

    def ended_with(
        self, code: int | None, signal: int | None, *, oom: bool, wall_ns: int, after_step: int
    ) -> Exit:
        """The exit report. It was us when the signal is ours, or when the process obeyed our
        SIGTERM; an error that came before the signal is its own."""
        failed = self.failed or worker_protocol.Failed(error_type="", message="", traceback="")
        obeyed = SIGTERM in self.signals and signal is None and self.failed is None
        by_us = (signal is not None and signal in self.signals) or obeyed
        self.exit = Exit(
            rank=self.seat.rank,
            local_rank=self.seat.local_rank,
            code=code,
            signal=signal,
            by_us=by_us,
            # A worker that fails before its first step has the step that it resumed after.
            step=max(self.step, after_step),
            error_type=failed.error_type,
            error_message=failed.message,
            traceback=failed.traceback[-limits.MAX_TRACEBACK_BYTES :],
            secondary=failed.secondary,
            out_of_memory=oom,
            at_ns=wall_ns,
        )
        self.ended = True
        return self.exit


@dataclass
class Stopping:
    """A Stop that is being carried out."""

    action_ids: list[int]
    grace_s: float
    stage: str = "begin"
    """begin, stacks, term, kill."""
    deadline_ns: int | None = None
    stacks: tuple[Stack, ...] = ()


@dataclass
class Generation:
    """One generation on this node."""

    launch: LaunchWorkers
    workers: dict[int, Worker]
    launch_ids: list[int]
    """Actions that wait for Launched."""
    launched: bool = False
    stop: Stopping | None = None
    stopped: bool = False
    order: Stage | None = None
    """A step to be staged out of turn, until it is answered."""
    advanced: bool = False
    """Every local worker has finished a step of this generation."""

    @property
    def membership(self) -> Membership:
        return self.launch.membership

    @property
    def generation(self) -> int:
        return self.launch.membership.generation

    @property
    def after_step(self) -> int:
        restore = self.membership.restore
        return restore.step if restore else -1

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.ended]

    @property
    def exits(self) -> tuple[Exit, ...]:
        return tuple(w.exit for w in self.workers.values() if w.exit is not None)

    def min_step(self) -> int:
        return min((worker.step for worker in self.workers.values()), default=-1)
