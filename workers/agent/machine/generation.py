"""The workers of one generation on this node: their progress, their exits and how they are stopped.

Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import (
    AGAIN,
    SCRIPT_SOURCES,
    Exit,
    Membership,
    Stack,
    WorkerBeat,
    WorkerPhase,
    WorkerSeat,
    is_silent,
    report_fields,
)
from holdfast.orchestrator.protocol.messages import (
    AgentEvent,
    Chaos,
    GroupInspected,
    Launched,
    LaunchWorkers,
    NodeRemarked,
    ShardStaged,
    Stage,
    StopWorkers,
    WorkerExited,
)
from holdfast.workers import worker_protocol

from . import commands
from .commands import Command
from .inputs import WorkerEnded
from .script_progress import SECOND_NS, ScriptProgress

MAX_INSPECTED_BYTES = 4096
"""Limit of one stack in GroupInspected: the innermost 40 frames."""
NO_ERROR = worker_protocol.Failed(error_type="", message="", traceback="")
LOOK_AT_SAVES_S = 0.5
"""Workers that end a save are asked so often whether they wait for a peer that is gone."""
LATE = "it did not wait for a seat in time"
"""Reason why a process is not kept whose worker does not leave its step."""
SIGKILL, SIGTERM, SIGSTOP = 9, 15, 19
"""Linux numbers. The signal module does IO, which a pure machine must not import."""


@dataclass
class Worker:
    """One seat of the generation."""

    seat: WorkerSeat
    since_ns: int
    pid: int = 0
    ended: bool = False
    ended_ns: int = 0
    exit: Exit | None = None
    phase: WorkerPhase = "start"
    step: int = -1
    ticks: int = 0
    progress_ns: int = 0
    pulse_ns: int = 0
    idle_s: float = 0.0
    """Seconds at the last measurement."""
    last: worker_protocol.Progress | worker_protocol.Reported | None = None
    script: ScriptProgress = field(default_factory=ScriptProgress)
    collectives: int = 0
    failed: worker_protocol.Failed | None = None
    finished: bool = False
    leaves: bool = False
    """The script has run to its end."""
    keeps: bool | str = ""
    """True if the process can be kept when the generation stops, or why not; empty: not known."""
    process_of: tuple[int, int] | None = None
    """(generation, rank) of the kept worker whose process it takes over."""
    kept: bool = False
    """True if the process waits for a seat in the next generation; here it counts as ended."""
    runs_again: bool = False
    """The script may run again in the process."""
    stateless: bool = False
    """A kept process has no state any more: it can only run the script again."""
    fixed_size: str = ""
    """Reason why a kept process cannot go on in a world of another size."""
    signals: set[int] = field(default_factory=set)
    """Signals that the controller ordered; SIGTERM may have come as a StopNotice."""
    wants_notice: bool = False

    def received(self, now_ns: int, message: worker_protocol.FromWorker) -> None:
        """Record a message of the worker as pulse and, unless it is only a Pulse, as progress."""
        self.pulse_ns = now_ns
        match message:
            case worker_protocol.PhaseChanged():
                self.phase = message.phase
                self.script.begins(message.began_after)
            case worker_protocol.Progress():
                self.step, self.last, self.phase = message.step, message, "train"
                self.script.counted_by_session()
            case worker_protocol.Reported():
                sent = self.script.received(now_ns, message)
                if sent is not None:
                    self.step, self.last, self.phase = sent.step, sent, "train"
            case worker_protocol.Failed():
                self.failed = message
            case worker_protocol.Finished():
                self.finished = True
                self.phase = "finish"
            case worker_protocol.KeepReported():
                self.keeps = message.why_not or True
            case worker_protocol.RunsAgain():
                self.runs_again = True
                return
            case worker_protocol.Halted():
                self.fixed_size, self.stateless = message.fixed_size, message.runs_again
            case worker_protocol.Pulse():
                if message.collectives != self.collectives:
                    self.collectives = message.collectives
                    if self.script.source != "session":
                        self.progress_ns, self.idle_s = now_ns, 0.0
                return
            case worker_protocol.ImportsReported():
                return
            case worker_protocol.StopNoticeWanted():
                self.wants_notice = True
                return
            case _:
                pass
        self.leaves = isinstance(message, worker_protocol.Leaving)
        self.ticks += 1
        self.progress_ns, self.idle_s = now_ns, 0.0

    @property
    def why_not_kept(self) -> str:
        """Reason why its process is not kept with the state; empty: none is known."""
        if isinstance(self.keeps, str) and self.keeps:
            return self.keeps
        own = self.script.source in SCRIPT_SOURCES
        return "the script keeps its own state" if own else ""

    @property
    def is_silent(self) -> bool:
        return is_silent(self.step, self.phase, self.script.began_after)

    @property
    def ends_itself(self) -> bool:
        """True if the worker gets some time in an unplanned stop: it saves, or cleans up after an
        error of its own, which the loss of a peer is not."""
        if self.failed is not None:
            return not self.failed.secondary
        return self.phase == "save"

    def beat(self, now_ns: int, stopped: bool) -> WorkerBeat:
        last = self.last or worker_protocol.Progress(step=-1)
        return WorkerBeat(
            rank=self.seat.rank,
            phase=self.phase,
            step=self.step,
            ticks=self.ticks,
            quiet_s=(now_ns - max(self.progress_ns, self.since_ns)) / SECOND_NS,
            pulse_age_s=(now_ns - max(self.pulse_ns, self.since_ns)) / SECOND_NS,
            stopped=stopped,
            work_s=getattr(last, "work_s", 0.0),
            probe_s=getattr(last, "probe_s", 0.0),
            idle_s=self.idle_s,
            counted_by=self.script.source,
            began_after=self.script.began_after,
            began_estimated=self.script.began_estimated,
            began_s=self.script.began_s(now_ns),
            collectives=self.collectives,
            leaves=self.leaves,
            keeps=(self.keeps is True and not self.seat.rank)
            or "; ".join(filter(None, (self.why_not_kept, AGAIN * self.runs_again))),
            **report_fields(last),
        )

    def ended_with(self, given: WorkerEnded, after_step: int, now_ns: int) -> None:
        """Record the exit, once. `by_us` is true for a signal that we sent, and for a process that
        ended on our SIGTERM. An error is the worker's own, however the process ended after it."""
        if self.exit is not None:
            return
        code, signal, self.ended_ns = given.code, given.signal, now_ns
        if self.failed is not None:
            code, signal = 1, None
        failed = self.failed or given.crash or NO_ERROR
        obeyed = SIGTERM in self.signals and signal is None and self.failed is None
        by_us = (signal is not None and signal in self.signals and not given.before_ours) or obeyed
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
            out_of_memory=given.out_of_memory or failed.out_of_memory,
            at_ns=given.wall_ns,
        )


@dataclass
class Stopping:
    """A stop in progress. Without grace: kill at once, but for workers that end a save or clean up
    after an error. Else: SIGTERM or StopNotice, the grace, SIGKILL."""

    action_ids: list[int]
    grace_s: float
    save_grace_s: float = 0.0
    after_step: int = -1
    keep: bool = False
    saves_until_ns: int = 0
    stage: Literal["begin", "stacks", "halt", "save", "term", "kill"] = "begin"
    deadline_ns: int | None = None
    stacks: tuple[Stack, ...] = ()

    def repeated(self, now_ns: int, message: StopWorkers) -> None:
        """A second StopWorkers gets its own answer and may shorten the grace."""
        if message.action_id not in self.action_ids:
            self.action_ids.append(message.action_id)
        if message.grace_s < self.grace_s:
            self.grace_s = message.grace_s
            if self.stage == "term":
                self.deadline_ns = now_ns + int(message.grace_s * SECOND_NS)


@dataclass
class Generation:
    """One generation on this node."""

    launch: LaunchWorkers
    workers: dict[int, Worker]
    launch_ids: list[int]
    """Actions that wait for a Launched."""
    launched: bool = False
    stop: Stopping | None = None
    stopped: bool = False
    stage_every: tuple[int, int] = (0, 0)
    """(every Nth step is staged, from this step on); 0: as the spec says."""
    stage_request: Stage | None = None
    """A requested step that is not answered yet."""
    lingers: bool = False
    """A worker that has not left was named."""
    num_built: int = 0
    """Workers that were started ahead, and wait for their seats."""
    advanced: bool = False
    """Every worker of this node has finished a step of this generation."""
    now_ns: int = 0
    """Time of the newest input."""

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
        """Ends of workers, each with its age."""
        return tuple(
            replace(w.exit, ago_s=round((self.now_ns - w.ended_ns) / SECOND_NS, 3))
            for w in self.workers.values()
            if w.exit is not None
        )

    def quiet_ranks(self, now_ns: int) -> list[int]:
        """Ranks without progress for limits.QUIET_S."""
        before_ns = now_ns - int(limits.QUIET_S * SECOND_NS)
        return [w.seat.rank for w in self.alive if w.progress_ns < before_ns]

    def measured(self, idle_s: dict[int, float]) -> None:
        for rank, worker in self.workers.items():
            worker.idle_s = idle_s.get(rank, 0.0)

    def min_step(self) -> int:
        """The lowest step of all workers; in a script, of the workers that report steps."""
        workers = self.workers.values()
        reporting = [w for w in workers if w.script.source in SCRIPT_SOURCES]
        return min((worker.step for worker in reporting or workers), default=-1)

    def communicates(self) -> bool:
        """All workers of a script that reports nothing have begun collectives."""
        workers = self.workers.values()
        return all(w.is_silent and w.collectives >= limits.BEGUN_COLLECTIVES for w in workers)

    def twins(self) -> dict[int, tuple[int, ...]]:
        """Shard index -> the local ranks that hold it, in ascending order."""
        ranks_of: dict[int, list[int]] = {}
        for worker in self.workers.values():
            ranks_of.setdefault(worker.seat.shard, []).append(worker.seat.local_rank)
        return {shard: tuple(sorted(ranks)) for shard, ranks in ranks_of.items()}

    @property
    def halts(self) -> bool:
        """Workers are leaving their step."""
        return self.stop is not None and self.stop.stage == "halt"

    @property
    def kept(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.kept]

    def why_not_kept(self) -> str:
        """Reason that one of the workers has given; empty: none has."""
        return max((worker.why_not_kept for worker in self.workers.values()), default="")

    def kept_for(self, launch: LaunchWorkers) -> dict[int, tuple[int, int]]:
        """Rank of the next generation -> (this generation, rank) of the kept worker that gets its
        seat: it is in that place and has that shard; a rank changes only with their number."""
        membership = launch.membership
        if membership.kept_from != self.generation:
            return self._again_for(launch)
        same = membership.world_size == self.membership.world_size
        if self.membership.ahead and not (same and self.num_built == len(self.workers)):
            return {}  # an attempt without peers may never end
        here = {
            (w.seat.local_rank, w.seat.shard): w.seat.rank for w in self.kept if not w.stateless
        }
        previous = {seat.rank: here.get((seat.local_rank, seat.shard)) for seat in launch.seats}
        return self._again_for(launch) | {
            rank: (self.generation, was)
            for rank, was in previous.items()
            if was is not None and (was == rank or not same)
        }

    def _again_for(self, launch: LaunchWorkers) -> dict[int, tuple[int, int]]:
        """The same for processes that run the script again. Their rank stays: torch's caches hold
        results of a rank."""
        if launch.code != self.launch.code or self.membership.ahead:
            return {}
        seats = {(seat.rank, seat.local_rank) for seat in launch.seats}
        again = [w.seat for w in self.kept if w.runs_again]
        same = [seat.rank for seat in again if (seat.rank, seat.local_rank) in seats]
        return {rank: (self.generation, rank) for rank in same}

    def end_kept(self, used: Mapping[int, tuple[int, int]]) -> list[Command]:
        """Kill the kept workers that get no seat, see kept_for. None gets one while it ends."""
        ranks = {was for _, was in used.values()}
        unused = [worker for worker in self.kept if worker.seat.rank not in ranks]
        for worker in unused:
            worker.kept = False
        return self.kill(unused)

    # -- stop ---------------------------------------------------------------------------------
    def begin_stop(self, now_ns: int, message: StopWorkers, stack_limit_s: float) -> list[Command]:
        """The first StopWorkers of this generation."""
        stop = self.stop = Stopping(
            [message.action_id],
            message.grace_s,
            message.save_grace_s,
            message.after_step,
            message.keep,
        )
        if not (message.stacks and self.alive):
            return self.continue_stop(now_ns, stop)
        stop.stage, stop.deadline_ns = "stacks", now_ns + int(stack_limit_s * SECOND_NS)
        ranks = tuple(worker.seat.rank for worker in self.alive)
        return [commands.TakeStacks(self.generation, ranks, by_signal=True)]

    def continue_stop(self, now_ns: int, stop: Stopping) -> list[Command]:
        """The next stage: HALT, SIGTERM or a notice, then SIGKILL."""
        at_once = stop.grace_s <= 0 and any(w.keeps is True or w.runs_again for w in self.alive)
        if stop.keep and (at_once or (self.alive and all(w.keeps is True for w in self.alive))):
            return self._halt(now_ns, stop)
        if stop.grace_s <= 0 and stop.save_grace_s > 0 and stop.stage in ("begin", "halt", "save"):
            return self._wait_for_saves(now_ns, stop)
        if stop.grace_s <= 0 or stop.stage == "term":
            return self.kill_all()
        stop.stage, stop.deadline_ns = "term", now_ns + int(stop.grace_s * SECOND_NS)
        noticed = [w for w in self.alive if w.wants_notice and w.step < stop.after_step]
        others = [w for w in self.alive if w not in noticed]
        for worker in noticed:
            worker.signals.add(SIGTERM)
        notice = worker_protocol.StopNotice(after_step=stop.after_step, grace_s=stop.grace_s)
        out = [commands.ToRank(self.generation, w.seat.rank, notice) for w in noticed]
        return [*out, *self._signal(others, SIGTERM)]

    def _halt(self, now_ns: int, stop: Stopping) -> list[Command]:
        """Halt the workers that can be kept, and kill those that do not end by themselves."""
        stop.keep = False
        stop.stage, stop.deadline_ns = "halt", now_ns + int(limits.HALT_S * SECOND_NS)
        ranks = tuple(
            w.seat.rank
            for w in self.alive
            if w.failed is None and (w.keeps is True or (w.runs_again and not w.ends_itself))
        )
        others = [w for w in self.alive if w.seat.rank not in ranks and not w.ends_itself]
        return [*self.kill(others), commands.Halt(self.generation, ranks)]

    def _wait_for_saves(self, now_ns: int, stop: Stopping) -> list[Command]:
        """Kill all but the workers that end by themselves, and look what those do."""
        if stop.stage in ("begin", "halt"):
            stop.saves_until_ns = now_ns + int(stop.save_grace_s * SECOND_NS)
        saving = tuple(worker.seat.rank for worker in self.alive if worker.ends_itself)
        if not saving or now_ns >= stop.saves_until_ns:
            return self.kill_all()
        stop.stage = "save"
        out = self.no_longer_saves()
        stop.deadline_ns = min(stop.saves_until_ns, now_ns + int(LOOK_AT_SAVES_S * SECOND_NS))
        return [*out, commands.TakeStacks(self.generation, saving, by_signal=False)]

    def no_longer_saves(self, ranks: Iterable[int] = ()) -> list[Command]:
        """Kill workers that neither save nor clean up, in a stop that waits for saves, and `ranks`,
        which wait for their peers."""
        if self.stop is None or self.stop.stage != "save":
            return []
        chosen = frozenset(ranks)
        over = [w for w in self.alive if not w.ends_itself or w.seat.rank in chosen]
        return self.kill([w for w in over if SIGKILL not in w.signals])

    def kill_all(self) -> list[Command]:
        stop = self.stop = self.stop or Stopping([], 0.0)
        late = [w for w in self.alive if (w.keeps or w.runs_again) and not (w.failed or w.signals)]
        late = late if stop.stage == "halt" else []
        for worker in late:
            if worker.keeps is True or worker.runs_again:
                worker.keeps, worker.runs_again = LATE, False
        notes = [commands.Note(f"rank {w.seat.rank} is not kept: {w.keeps}") for w in late]
        stop.stage, stop.deadline_ns = "kill", None
        return [*notes, *self.kill(self.alive)]

    def kill(self, workers: list[Worker]) -> list[Command]:
        return self._signal(workers, SIGKILL)

    def _signal(self, workers: list[Worker], signal: int) -> list[Command]:
        for worker in workers:
            worker.signals.add(signal)
        return [commands.Kill(self.generation, worker.seat.rank, signal) for worker in workers]


def inspect(group: Generation | None) -> list[Command]:
    if group is None or group.stop is not None or group.stopped or not group.alive:
        return []
    ranks = tuple(worker.seat.rank for worker in group.alive)
    return [commands.TakeStacks(group.generation, ranks, by_signal=False)]


def inspected(
    group: Generation | None, generation: int, stacks: tuple[Stack, ...]
) -> list[Command]:
    """Report inspected stacks to the controller, or to a stop that waits for saves. Texts of ranks
    that wait for their peers show the same collective, so they stay here."""
    if group is not None and group.generation == generation and group.stop is not None:
        return group.no_longer_saves(stack.rank for stack in stacks if stack.in_collective)
    short = tuple(
        replace(stack, text="" if stack.in_collective else stack.text[:MAX_INSPECTED_BYTES])
        for stack in stacks
    )
    return [commands.Send(GroupInspected(generation=generation, stacks=short))]


def inject_fault(group: Generation | None, message: Chaos) -> list[Command]:
    if message.kind == "kill-node":
        return [commands.KillNode()]
    signal = {"kill-worker": SIGKILL, "hang-worker": SIGSTOP}.get(message.kind)
    if not signal or not group or message.rank not in {w.seat.rank for w in group.alive}:
        text = f"chaos {message.kind}: there is no live worker of rank {message.rank} here"
        return [commands.Send(AgentEvent(text=text))]
    # Not in worker.signals: the exit must look like one that Holdfast did not cause.
    return [commands.Kill(group.generation, message.rank, signal, injected=True)]


def lingers(group: Generation, rank: int, waits_for: str) -> list[Command]:
    """Name the first worker of this node that is done and does not leave."""
    if group.lingers or not waits_for:
        return []
    group.lingers = True
    text = f"rank {rank} has run to its end and does not leave: it waits for {waits_for}"
    return [commands.Send(NodeRemarked(text=text, shown=True))]


def launched(action_id: int, generation: int, *, ok: bool, detail: str) -> Command:
    return commands.Send(Launched(action_id=action_id, generation=generation, ok=ok, detail=detail))


def exit_reports(group: Generation, *ranks: int) -> list[WorkerExited]:
    """Reports of these ranks, or of all that have ended."""
    return [
        WorkerExited(generation=group.generation, exit=exit)
        for exit in group.exits
        if exit.rank in ranks or not ranks
    ]


def stage_result(action_id: int, detail: str) -> Command:
    """`detail`: why the step was not staged; empty when it was."""
    return commands.Send(ShardStaged(action_id=action_id, ok=not detail, detail=detail))
