"""The agent's machine: decides what a node does. Pure: it reads no clock and does no IO.

    AgentMachine(...).step(now_ns, input) -> commands;  next_deadline_ns()

process/node.py carries the commands out; tests/sim drives the same code in virtual time. Invariant:
only messages of the current generation are obeyed (fencing).

What may be lost with a connection is sent again after every Welcome: exits of the current
generation, and shards that are durable but not committed. The controller accepts repetitions.
"""

from __future__ import annotations

import msgspec

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import StagedShard, WorkerBeat, state_after, steps_done
from holdfast.workers import worker_protocol

from . import commands, inputs
from .checkpoint_tiers import CheckpointTiers
from .commands import Command
from .generation import (
    SIGKILL,
    Generation,
    Stopping,
    Worker,
    exit_reports,
    inject_fault,
    inspect,
    inspected,
    launched,
    lingers,
    stage_result,
)
from .inputs import Input
from .preemption import Preemption
from .script_progress import SECOND_NS
from .standbys import REFILL_DELAY_S, SPARE_DELAY_S, Standbys

RESENT = (
    m.Heartbeat | m.WorkerExited | m.ShardPersisted | m.StepCopied | m.GroupInspected
    | m.StandbysReported | m.ImportsLearned
)  # fmt: skip
"""Messages that need not wait for a connection: every Welcome sends their newest state again, or
they are worth nothing later."""
STACK_MARGIN_S = 0.5
"""Seconds after limits.STACK_TIMEOUT_S at which workers are killed without their stacks."""


class AgentMachine:
    """One node. `slots` is the number of workers that fit here."""

    def __init__(self, *, job: str, node: str, token: str, slots: int) -> None:
        self.job, self.node, self.slots = job, node, slots
        self.tiers = CheckpointTiers()
        self.group: Generation | None = None
        self.welcome: m.Welcome | None = None
        self._token = token
        self._fence = 0
        """The highest generation that may not be launched (again)."""
        self._waiting: m.LaunchWorkers | None = None
        """A launch that waits for the end of an older generation's workers."""
        self._link_up = False
        self._connected = False
        """True between Welcome and LinkDown."""
        self._absent_since_ns: int | None = None
        self._last_save_ns: int | None = None
        """No controller came in time, and the last steps are written until then."""
        self._heartbeat_ns: int | None = None
        self._standbys = Standbys()
        self._outbox: list[m.FromAgent] = []
        self._stopped_ranks: tuple[int, ...] = ()
        self._port, self._cpu_pressure, self._ending = 0, 0.0, ""
        self._ending_ns: int | None = None
        self._ended, self._exit_code = False, 0
        self._preemption: Preemption | None = None

    # -- entry points -------------------------------------------------------------------------
    def step(self, now_ns: int, given: Input) -> tuple[Command, ...]:
        """Take one input; the commands are to be carried out in order."""
        if self._absent_since_ns is None and not self._link_up:
            self._absent_since_ns = now_ns
        if self.group is not None:
            self.group.now_ns = now_ns
        out = self._react(now_ns, given)
        return tuple(self._deliver([*out, *self._answer_stage_request()]))

    def next_deadline_ns(self) -> int | None:
        """Latest time to give ClockTick."""
        group, due = self.group, [self._ending_ns, self._standbys.due_ns]
        if self._connected:
            due.append(self._heartbeat_ns)
        elif self._absent_since_ns is not None:
            due.append(self._last_save_ns or self._absence_ends_ns())
        due += [group.stop.deadline_ns if group and group.stop else None]
        if self._preemption is not None and not self._ending:
            due += [self._preemption.due_ns(self._connected)]
        return None if self._ended else min((at for at in due if at is not None), default=None)

    def accept_copy(
        self, staged: StagedShard, confirmed: int = -1
    ) -> tuple[int | str, list[Command]]:
        """The buffer for a copy of another node's shard, until CopyDone, or why it is refused.
        The commands come before the use of the buffer. `confirmed`: see commands.PushToBuddy."""
        answer, before = self.tiers.accept_copy(self.group, staged, confirmed)
        return answer, self._deliver(before)

    # -- dispatch -----------------------------------------------------------------------------
    def _react(self, now_ns: int, given: Input) -> list[Command]:
        group = self.group
        match given:
            case inputs.Received():
                return self._obey(now_ns, given.message)
            case inputs.FromRank():
                return self._from_rank(now_ns, given)
            case inputs.ClockTick():
                return self._tick(now_ns)
            case inputs.LinkUp():
                return self._on_link_up(given)
            case inputs.LinkDown():
                self._link_up = self._connected = False
                self._absent_since_ns = now_ns
                return []
            case inputs.Terminated():
                return self._terminated(now_ns, given)
            case inputs.WorkerForked():
                return self._forked(given)
            case inputs.ForkFailed():
                return self._fork_failed(now_ns, given)
            case inputs.WorkerEnded():
                return self._worker_ended(now_ns, given)
            case inputs.JobConfigured():
                return self._standbys.configured(must_import=given.must_import)
            case inputs.StandbysReady():
                return self._standbys.imported()
            case inputs.ForkserverDied():
                return [commands.Send(m.AgentEvent(text=f"forkserver: {given.detail}"))]
            case inputs.StoppedRanks():
                self._stopped_ranks = given.ranks
                return []
            case inputs.ActivityMeasured():
                self._cpu_pressure = given.cpu_pressure
                if group is not None:
                    group.measured(given.idle_s)
                return []
            case inputs.MemoryMeasured():
                self.tiers.memory.measured(given)
                return []
            case inputs.StacksTaken():
                if given.by_signal:
                    return self._stacks_taken(now_ns, given)
                return inspected(self.group, given.generation, given.stacks)
            case inputs.PortOffered():
                self._port = given.port
                return []
            case inputs.WriteDone():
                out = self.tiers.write_done(group, given)
                return [*out, *self._give_up_controller(now_ns)]
            case inputs.PushDone():
                return self.tiers.push_done(group, given)
            case inputs.CopyDone():
                return self.tiers.copy_done(given)
            case inputs.ServeDone():
                return self.tiers.unpin(group, given.buffer)

    def _obey(self, now_ns: int, message: m.ToAgent) -> list[Command]:
        running = self._group_of(getattr(message, "generation", 0))
        match message:
            case m.Welcome():
                return self._welcomed(now_ns, message)
            case m.Refused():
                if message.final:
                    self._exit_code = 1
                    return self._end(now_ns, f"rejected by the controller: {message.detail}")
                return [commands.CloseLink(message.detail)]
            case m.LaunchWorkers():
                return self._launch(now_ns, message)
            case m.StopWorkers():
                return self._stop(now_ns, message)
            case m.Inspect():
                return inspect(running)
            case m.Stage():
                return self._request_stage(running, message)
            case m.StageEvery():
                return self._stage_every(running, message)
            case m.Persist():
                return self.tiers.persist(running, message)
            case m.CopyStep():
                return self.tiers.copy_step(running, message)
            case m.Committed():
                self.tiers.committed(message)
                return []
            case m.Chaos():
                return inject_fault(self.group, message)
            case m.Shutdown():
                return self._end(now_ns, message.detail)

    def _deliver(self, found: list[Command]) -> list[Command]:
        """Messages wait for a connection, except heartbeats and what every Welcome sends again."""
        out: list[Command] = []
        for command in found:
            if isinstance(command, commands.WriteStorage) and not self._connected:
                command = self._with_mesh(command)
            message = command.message if isinstance(command, commands.Send) else None
            if message is None or self._connected or isinstance(message, m.Hello):
                out.append(command)
            elif not isinstance(message, RESENT):
                self._outbox.append(message)
        return out

    # -- the connection -----------------------------------------------------------------------
    def _on_link_up(self, up: inputs.LinkUp) -> list[Command]:
        self._link_up, self._absent_since_ns, self._last_save_ns = True, None, None
        self._port = up.offered_port
        group = self._running
        joined = m.NodeJoined(
            facts=up.facts,
            generation=group.generation if group else 0,
            ranks=tuple(w.seat.rank for w in group.alive) if group else (),
            staged=self.tiers.inventory(),
            offered_port=self._port,
        )
        hello = m.Hello(token=self._token, job=self.job, node=self.node, joined=joined)
        return [commands.Send(hello)]

    def _welcomed(self, now_ns: int, message: m.Welcome) -> list[Command]:
        first, self.welcome, self._connected = self.welcome is None, message, True
        out: list[Command] = [commands.Configure()] if first else []
        if first:
            self._standbys.schedule(now_ns, SPARE_DELAY_S)
        pending, self._outbox = self._outbox, []
        if self._running is not None:
            pending += exit_reports(self._running)
        pending += self.tiers.unacknowledged.values()
        if self.tiers.rounds.report is not None:
            pending.append(self.tiers.rounds.report)
        if self._preemption is not None:
            pending.append(self._preemption.message(now_ns))
        out += [*map(commands.Send, pending), *self._standbys.repeat()]
        return [*out, *self._heartbeat(now_ns)]

    def _heartbeat(self, now_ns: int) -> list[Command]:
        assert self.welcome is not None
        self._heartbeat_ns = now_ns + int(self.welcome.heartbeat_interval_s * SECOND_NS)
        alive = self._running.alive if self._running else []
        return [self._beat([w.beat(now_ns, w.seat.rank in self._stopped_ranks) for w in alive])]

    def _beat(self, beats: list[WorkerBeat]) -> Command:
        group = self.group
        heartbeat = m.Heartbeat(
            generation=self._running.generation if self._running else 0,
            workers=tuple(beats),
            staged_step=self.tiers.staged_step(),
            stage_every_steps=group.stage_every[0] if group else 0,
            stage_from_step=group.stage_every[1] if group else 0,
            copied_step=self.tiers.rounds.confirmed[1] if self.tiers.rounds.confirmed else -1,
            cpu_pressure=self._cpu_pressure,
        )
        return commands.Send(heartbeat)

    def _tick(self, now_ns: int) -> list[Command]:
        out: list[Command] = []
        group = self.group
        if self._connected and self._heartbeat_ns is not None and now_ns >= self._heartbeat_ns:
            out += self._heartbeat(now_ns)
        out += self._fork_standbys(now_ns)
        stop = group.stop if group else None
        if group and stop and stop.deadline_ns is not None and now_ns >= stop.deadline_ns:
            if group.stopped:
                stop.deadline_ns = None
                out += group.end_kept({})
            else:
                out += group.continue_stop(now_ns, stop)
                out += self._settle_stop(now_ns, group)
        out += self._give_up_controller(now_ns)
        out += self._leave_in_time(now_ns)
        if self._ending_ns is not None and now_ns >= self._ending_ns and not self._ended:
            out += self._end_node()
        return out

    # -- without a controller ------------------------------------------------------------------
    def _absence_ends_ns(self) -> int | None:
        """None: a controller is there, or the node waits for one without limit."""
        limit_s = self._absence_s
        if self._absent_since_ns is None or limit_s is None:
            return None
        return self._absent_since_ns + int(limit_s * SECOND_NS)

    @property
    def _absence_s(self) -> float | None:
        """Seconds without a controller; before the first controller the spec is not known."""
        welcome = self.welcome
        return welcome.controller_absence_s if welcome else limits.CONTROLLER_ABSENCE_S

    def _give_up_controller(self, now_ns: int) -> list[Command]:
        """Write what only memory holds, then end the node."""
        ends = self._absence_ends_ns()
        if ends is None or now_ns < ends or self._ending:
            return []
        out: list[Command] = []
        if self._last_save_ns is None:
            self._last_save_ns = now_ns + int(limits.PERSIST_TIMEOUT_S * SECOND_NS)
            out = self.tiers.save_last(self.group)
        if self.tiers.is_writing and now_ns < self._last_save_ns:
            return out
        return [*out, *self._end(now_ns, f"no controller for {self._absence_s:g} s")]

    # -- launch -------------------------------------------------------------------------------
    def _launch(self, now_ns: int, message: m.LaunchWorkers) -> list[Command]:
        generation, running = message.membership.generation, self._running
        busy = message.membership.ahead and running is not None
        if self._ending or generation <= self._fence or busy:
            over = f"generation {generation} is over; the fence is {self._fence}"
            detail = self._ending or ("workers run here" if busy else over)
            return [launched(message.action_id, generation, ok=False, detail=detail)]
        if message.membership.ahead:
            return self._begin_ahead(now_ns, message)
        if running is not None:
            if running.generation == generation:
                running.launch_ids.append(message.action_id)
                return self._answer_launch(running, ok=True) if running.launched else []
            # The controller started a new generation while this node was disconnected.
            self._waiting, self._fence = message, generation - 1
            return running.kill_all()
        return self._begin(now_ns, message)

    def _begin(self, now_ns: int, message: m.LaunchWorkers) -> list[Command]:
        self._fence, self._waiting = message.membership.generation - 1, None
        before = self.group
        kept = before.kept_for(message) if before is not None else {}
        out = before.end_kept(kept) if before is not None else []
        group = self._new_group(now_ns, message)
        group.stage_every = (message.stage_every_steps, 0)
        self._stopped_ranks = ()
        out += self.tiers.launch(group)
        return [*out, *self._forks(group, kept), commands.OfferPort()]

    def _begin_ahead(self, now_ns: int, message: m.LaunchWorkers) -> list[Command]:
        """Start workers beside the running generation, which has none here. For the node they wait
        like kept ones from now on. With other seats they would have the names of processes that
        still end."""
        before, membership = self.group, message.membership
        if before is not None and before.generation == membership.generation:
            wanted, here = message.seats, before.membership
            if before.launch.seats != wanted or here.mesh != membership.mesh or not here.ahead:
                detail = "other workers of this generation were here"
                answer = launched(message.action_id, before.generation, ok=False, detail=detail)
                return [answer, *before.end_kept({})]
            before.launch_ids.append(message.action_id)
            return self._answer_if_built(before)
        out = before.end_kept({}) if before is not None else []
        group = self._new_group(now_ns, message)
        for worker in group.workers.values():
            worker.ended = worker.kept = True
        until_ns = now_ns + int(2 * limits.JOIN_WAIT_S * SECOND_NS)
        group.stopped, group.stop = True, Stopping([], 0.0, deadline_ns=until_ns)
        return [*out, *self._forks(group, {})]

    def _new_group(self, now_ns: int, message: m.LaunchWorkers) -> Generation:
        self._standbys.cancel()
        workers = {seat.rank: Worker(seat, now_ns) for seat in message.seats}
        self.group = Generation(message, workers, [message.action_id])
        return self.group

    def _forks(self, group: Generation, kept: dict[int, tuple[int, int]]) -> list[Command]:
        launch, twins, out = group.launch, group.twins(), list[Command]()
        for seat in launch.seats:
            place = group.workers[seat.rank].process_of = kept.get(seat.rank)
            # A packet holds the sources of one shard; this machine keeps those of all of them.
            for_rank = group.membership.with_sources_of([seat.shard])
            at = (launch.node_rank, seat, launch.stage_every_steps, twins[seat.shard])
            out.append(commands.Fork(for_rank, *at, launch.code, place))
        return out

    def _forked(self, given: inputs.WorkerForked) -> list[Command]:
        group = self._group_of(given.generation)
        if group is None or given.rank not in group.workers:
            return []
        group.workers[given.rank].pid = given.pid
        if (
            group.launched
            or group.membership.ahead
            or not all(w.pid for w in group.workers.values())
        ):
            return []
        group.launched = True
        return self._answer_launch(group, ok=True)

    def _fork_failed(self, now_ns: int, given: inputs.ForkFailed) -> list[Command]:
        group = self._group_of(given.generation)
        if group is None:
            return []
        if group.membership.ahead:
            return self._not_built(now_ns, group, given.rank, given.detail)
        worker = group.workers[given.rank]
        worker.ended = True
        out = self._answer_launch(group, ok=False, detail=given.detail)
        if worker.process_of is not None:
            out.append(commands.Kill(*worker.process_of, SIGKILL))
        if group.stop is None:
            self._fence = max(self._fence, group.generation)
            out += group.kill_all()
        return [*out, *self._settle_stop(now_ns, group)]

    def _answer_launch(self, group: Generation, *, ok: bool, detail: str = "") -> list[Command]:
        ids, group.launch_ids = group.launch_ids, []
        return [launched(action, group.generation, ok=ok, detail=detail) for action in ids]

    def _answer_if_built(self, group: Generation) -> list[Command]:
        if len(group.kept) < len(group.workers):
            return self._answer_launch(group, ok=False, detail="a worker has ended")
        built = group.num_built == len(group.workers)
        return self._answer_launch(group, ok=True) if built else []

    def _not_built(self, now_ns: int, group: Generation, rank: int, detail: str) -> list[Command]:
        """A worker that was started ahead cannot continue; the others of its node end with it. They
        had taken the place of standbys."""
        self._standbys.schedule(now_ns, REFILL_DELAY_S)
        group.workers[rank].kept = False
        out = self._answer_launch(group, ok=False, detail=f"rank {rank}: {detail}")
        return [*out, *group.end_kept({})]

    # -- standbys -----------------------------------------------------------------------------
    def _fork_standbys(self, now_ns: int) -> list[Command]:
        """Standbys for a launch as large as the running one."""
        running = self._running
        return self._standbys.fork(now_ns, len(running.workers) if running else self.slots)

    # -- workers ------------------------------------------------------------------------------
    def _from_rank(self, now_ns: int, given: inputs.FromRank) -> list[Command]:
        group = self._group_of(given.generation)
        worker = group.workers.get(given.rank) if group else None
        if group is None or worker is None:
            return []
        message = given.message
        worker.received(now_ns, message)
        match message:
            case worker_protocol.PhaseChanged():
                return group.no_longer_saves()
            case worker_protocol.Progress() | worker_protocol.Reported() | worker_protocol.Pulse():
                return self._advanced(now_ns, group)
            case worker_protocol.BufferRequest():
                return self.tiers.request(group, worker.seat, message)
            case worker_protocol.BufferWanted() | worker_protocol.BufferReturned():
                return self.tiers.without_buffer(group, worker.seat, message)
            case worker_protocol.Staged():
                return self.tiers.staged(group, worker.seat, message)
            case worker_protocol.FetchShard():
                return self.tiers.fetch(group, given.rank, message.shard)
            case worker_protocol.Finished():
                return self.tiers.finished(group, worker.seat)
            case worker_protocol.Failed():
                return self._worker_failed(now_ns, group, worker)
            case worker_protocol.Halted():
                return self._halted(now_ns, group, worker)
            case worker_protocol.KeepReported() if group.halts and message.why_not:
                return group.kill([worker])
            case worker_protocol.Leaving():
                return lingers(group, given.rank, message.waits_for)
            case worker_protocol.ImportsReported():  # it trains: standbys can be made ready
                self._standbys.schedule(now_ns, REFILL_DELAY_S)
                return self._standbys.learned(message.modules, by_rank=given.rank)
            case _:
                return []

    def _advanced(self, now_ns: int, group: Generation) -> list[Command]:
        """The first step of a generation ends its recovery, so it is reported at once. Later steps
        are in the regular heartbeats. Of a script that reports none its collectives count."""
        if group.advanced or (group.min_step() <= group.after_step and not group.communicates()):
            return []
        group.advanced = True
        self._standbys.schedule(now_ns, REFILL_DELAY_S)
        return self._heartbeat(now_ns) if self._connected else []

    def _worker_ended(self, now_ns: int, given: inputs.WorkerEnded) -> list[Command]:
        group = self._group_of(given.generation)
        worker = group.workers.get(given.rank) if group else None
        if worker is not None:
            worker.kept = False
        if group is not None and group.membership.ahead:
            return self._not_built(now_ns, group, given.rank, "its process has ended")
        if group is None or worker is None or worker.ended:
            return []
        worker.ended, reported = True, worker.exit is not None
        worker.ended_with(given, group.after_step, now_ns)
        if group.stop is not None:
            return self._settle_stop(now_ns, group)
        return [] if reported else self._report_exit(now_ns, group, worker)

    def _halted(self, now_ns: int, group: Generation, worker: Worker) -> list[Command]:
        """A worker has left its step and waits: for this generation it has ended, as if killed."""
        if group.membership.ahead:
            group.num_built += 1
            return self._answer_if_built(group)
        if not group.halts or worker.ended:
            return []  # it is killed
        worker.ended = worker.kept = True
        worker.signals.add(SIGKILL)
        killed = inputs.WorkerEnded(group.generation, worker.seat.rank, None, SIGKILL)
        worker.ended_with(killed, group.after_step, now_ns)
        return self._settle_stop(now_ns, group)

    def _worker_failed(self, now_ns: int, group: Generation, worker: Worker) -> list[Command]:
        """The recovery need not wait for what the process still does."""
        if group.membership.ahead and worker.failed is not None:
            return self._not_built(now_ns, group, worker.seat.rank, worker.failed.message)
        if group.stop is not None:
            return group.no_longer_saves()
        at_ns = worker.failed.at_ns if worker.failed else 0
        ended = inputs.WorkerEnded(group.generation, worker.seat.rank, 1, None, wall_ns=at_ns)
        worker.ended_with(ended, group.after_step, now_ns)
        return self._report_exit(now_ns, group, worker)

    def _report_exit(self, now_ns: int, group: Generation, worker: Worker) -> list[Command]:
        # Its last steps come first: no regular heartbeat shows a process that has ended.
        last = [self._beat([worker.beat(now_ns, stopped=False)])] if self._connected else []
        return [*last, *map(commands.Send, exit_reports(group, worker.seat.rank))]

    # -- a requested step ---------------------------------------------------------------------
    def _request_stage(self, group: Generation | None, message: m.Stage) -> list[Command]:
        """Have all workers stage one step regardless of the checkpoint interval. Used before a
        planned stop; the controller's StopWorkers follows."""
        if group is None or group.stop is not None:
            detail = f"generation {message.generation} does not run here"
            return [stage_result(message.action_id, detail)] if message.action_id else []
        replaced = group.stage_request if message.action_id else None
        if message.action_id:
            group.stage_request = message
        request = worker_protocol.StageAt(step=message.step, hold=message.hold)
        out = [commands.ToRank(group.generation, w.seat.rank, request) for w in group.alive]
        again = f"{state_after(message.step)} was requested after it"
        return [stage_result(replaced.action_id, again), *out] if replaced else [*out]

    def _stage_every(self, group: Generation | None, message: m.StageEvery) -> list[Command]:
        """Have all workers stage every Nth step from a step that is ahead of them."""
        if group is None or group.stop is not None:
            return []
        group.stage_every = (message.every_steps, message.from_step)
        request = worker_protocol.SetStagingInterval(
            every_steps=message.every_steps, from_step=message.from_step
        )
        return [commands.ToRank(group.generation, w.seat.rank, request) for w in group.alive]

    def _answer_stage_request(self) -> list[Command]:
        """Answer as soon as all workers have staged the step, or one of them cannot any more."""
        group = self.group
        if group is None or group.stage_request is None:
            return []
        request = group.stage_request
        missed = [w.seat.rank for w in group.workers.values() if self._missed(w, request)]
        if group.stop is not None:
            detail = "it was stopped before"
        elif (group.generation, request.step) in self.tiers.buffers.complete():
            detail = ""
        elif missed:
            detail = f"rank {missed[0]} was past {steps_done(request.step)}, or at its end"
        else:
            return []
        group.stage_request = None
        return [stage_result(request.action_id, detail)]

    def _missed(self, worker: Worker, request: m.Stage) -> bool:
        """The worker will not stage that step. A worker sends Staged before Progress of a step."""
        if worker.ended or worker.finished or worker.leaves or worker.step > request.step:
            return True
        wanted = (request.generation, request.step)
        staged = self.tiers.buffers.has_staged(worker.seat.local_rank, wanted)
        return worker.step == request.step and not staged

    # -- stop ---------------------------------------------------------------------------------
    def _stop(self, now_ns: int, message: m.StopWorkers) -> list[Command]:
        generation, group = message.generation, self._group_of(message.generation)
        self._fence = max(self._fence, generation)
        if self._waiting and self._waiting.membership.generation <= generation:
            self._waiting = None
        if group is None or group.stopped:
            return [self._stopped(message.action_id, generation, group)]
        if group.stop is None:
            limit_s = limits.STACK_TIMEOUT_S + STACK_MARGIN_S
            out = group.begin_stop(now_ns, message, limit_s)
            return [*out, *self._settle_stop(now_ns, group)]
        group.stop.repeated(now_ns, message)
        return []

    def _stacks_taken(self, now_ns: int, given: inputs.StacksTaken) -> list[Command]:
        group = self._group_of(given.generation)
        if group is None or group.stop is None or group.stop.stage != "stacks":
            return []
        group.stop.stacks = given.stacks
        out = group.continue_stop(now_ns, group.stop)
        return [*out, *self._settle_stop(now_ns, group)]

    def _settle_stop(self, now_ns: int, group: Generation) -> list[Command]:
        if group.alive or group.stopped or group.stop is None:
            return []
        group.stopped = True
        group.stop.deadline_ns = now_ns + int(limits.KEPT_S * SECOND_NS) if group.kept else None
        self.tiers.stop()
        out = self._answer_launch(group, ok=False, detail="stopped while it was launched")
        out += [self._stopped(at, group.generation, group) for at in group.stop.action_ids]
        if self._ending:
            return [*out, *self._end_node()]
        if self._waiting is not None:
            return [*out, *self._begin(now_ns, self._waiting)]
        return out

    def _stopped(self, action_id: int, generation: int, group: Generation | None) -> Command:
        """No worker of the generation runs here any more. `group` is None when it never ran."""
        kept = group.kept if group else []
        message = m.GroupStopped(
            action_id=action_id,
            generation=generation,
            exits=group.exits if group else (),
            staged=self.tiers.inventory(),
            stacks=group.stop.stacks if group and group.stop else (),
            offered_port=self._port,
            kept=tuple(worker.seat.rank for worker in kept if not worker.stateless),
            again=tuple(worker.seat.rank for worker in kept if worker.runs_again),
            fixed_size=max((worker.fixed_size for worker in kept), default=""),
            why_not=group.why_not_kept() if group else "",
        )
        return commands.Send(message)

    # -- the end ------------------------------------------------------------------------------
    def _terminated(self, now_ns: int, given: inputs.Terminated) -> list[Command]:
        if self._preemption is not None or self._ending:
            return []  # a container runtime may send SIGTERM more than once
        self._preemption = Preemption(given.detail, now_ns, given.grace_s)
        self._standbys.leave()
        if self._connected:
            return [commands.Send(self._preemption.message(now_ns))]
        used = self._running is not None or self.tiers.inventory()
        return [] if used else self._end(now_ns, given.detail)

    def _leave_in_time(self, now_ns: int) -> list[Command]:
        leaving = self._preemption
        if leaving is None or self._ending or now_ns < leaving.due_ns(self._connected):
            return []
        if now_ns >= leaving.kill_ns:
            reason = f"{leaving.detail}; the grace period of {leaving.grace_s:g} s is over"
            return self._end(now_ns, reason)
        leaving.saved = True
        return self.tiers.save()

    def _end(self, now_ns: int, detail: str) -> list[Command]:
        if self._ending:
            return []
        self._ending = detail or "shut down"
        self._waiting = None
        running = self._running
        if running is None or not running.alive:
            return self._end_node()
        self._ending_ns = now_ns + int(limits.STOP_TIMEOUT_S * SECOND_NS)
        if self._preemption is not None:
            self._ending_ns = min(self._ending_ns, max(now_ns, self._preemption.end_ns))
        return running.kill_all()

    def _with_mesh(self, command: commands.WriteStorage) -> commands.WriteStorage:
        """The command with the note by which the next controller can commit it."""
        group = self.group
        if group is None or group.generation != command.staged.generation:
            return command
        return msgspec.structs.replace(command, mesh=group.membership.mesh)

    def _end_node(self) -> list[Command]:
        self._ended = True
        return [commands.EndNode(self._ending, self._exit_code)]

    @property
    def _running(self) -> Generation | None:
        """The group, until it is stopped."""
        return None if self.group is None or self.group.stopped else self.group

    def _group_of(self, generation: int) -> Generation | None:
        """The group if it is of this generation, running or stopped."""
        group = self.group
        return group if group is not None and group.generation == generation else None
