"""The agent's machine: what a node does about each fact. Pure.

    AgentMachine(...).step(now_ns, input) -> outputs;  next_deadline_ns()

Owns: fencing (only the current generation is obeyed), the life of a generation on this node
(launch, exits, stop), heartbeats, and when the node must end itself; tiers.py has the tiers and
ending.py how a generation is ended. Must not: do IO or read a clock; node.py does, and tests/sim
drives this very code in virtual time.

What is lost with a connection is told again: exits of the current generation and shards that are
durable but not committed, after every Welcome. The controller takes repetitions for what they are.
"""

from __future__ import annotations

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as m
from holdfast.workers import worker_protocol

from . import inputs as f
from . import outbound, stage_request, stop_sequence
from .checkpoint_tiers import CheckpointTiers
from .generation import NS, Generation, Worker
from .preemption import Preemption
from .warm_pool import WarmPool


class AgentMachine:
    """One node. `slots` is the number of workers that fit here."""

    def __init__(self, *, job: str, node: str, token: str, slots: int) -> None:
        self.job = job
        self.node = node
        self.slots = slots
        self.tiers = CheckpointTiers()
        self.group: Generation | None = None
        self.welcome: m.Welcome | None = None
        self._standbys = WarmPool(slots)
        self._token = token
        self._fence = 0
        """The highest generation that may never be launched (again)."""
        self._waiting: m.LaunchWorkers | None = None
        """A launch that waits for the workers of an older generation to be gone."""
        self._link_up = False
        self._talking = False
        """Between Welcome and LinkDown."""
        self._absent_since_ns: int | None = None
        self._beat_ns: int | None = None
        self._outbox: list[m.FromAgent] = []
        self._port = 0
        self._stopped_ranks: frozenset[int] = frozenset()
        self._ending: str = ""
        self._ending_ns: int | None = None
        self._ended = False
        self._leaving: Preemption | None = None

    # -- the two entry points -----------------------------------------------------------------
    def step(self, now_ns: int, given: f.Input) -> tuple[f.Output, ...]:
        """Take in one fact; returns what is to be done, in order."""
        if self._absent_since_ns is None and not self._link_up:
            self._absent_since_ns = now_ns
        out = self._react(now_ns, given)
        return tuple(self._deliver([*out, *stage_request.settle(self.group, self.tiers)]))

    def next_deadline_ns(self) -> int | None:
        """When to give Tick at the latest."""
        group, due = self.group, [self._ending_ns, self._standbys.due_ns]
        if self._talking:
            due.append(self._beat_ns)
        elif self._absent_since_ns is not None:
            due.append(self._absent_since_ns + int(limits.CONTROLLER_ABSENCE_S * NS))
        due += [group.stop.deadline_ns if group and group.stop else None]
        if self._leaving is not None and not self._ending:
            due += [self._leaving.due_ns(self._talking)]
        return None if self._ended else min((at for at in due if at is not None), default=None)

    # -- dispatch -----------------------------------------------------------------------------
    def _react(self, now_ns: int, given: f.Input) -> list[f.Output]:
        group = self.group
        match given:
            case f.Received():
                return self._obey(now_ns, given.message)
            case f.FromRank():
                return self._from_rank(now_ns, given)
            case f.ClockTick():
                return self._tick(now_ns)
            case f.LinkUp():
                return self._link(given)
            case f.LinkDown():
                self._link_up = self._talking = False
                self._absent_since_ns = now_ns
                return []
            case f.Terminated():
                return self._terminated(now_ns, given)
            case f.WorkerForked():
                return self._forked(given)
            case f.ForkFailed():
                return self._fork_failed(now_ns, given)
            case f.WorkerEnded():
                return self._worker_ended(now_ns, given)
            case f.ForkserverDied():
                return [f.Send(m.AgentEvent(text=f"forkserver: {given.detail}"))]
            case f.StoppedRanks():
                self._stopped_ranks = frozenset(given.ranks)
                return []
            case f.StacksTaken():
                return self._stacks_taken(now_ns, given)
            case f.PortOffered():
                self._port = given.port
                return []
            case f.WriteDone():
                return self.tiers.write_done(group, given)
            case f.PushDone():
                return self.tiers.push_done(group, given)
            case f.CopyOffered():
                return self.tiers.copy_offered(group.generation if group else 0, given)
            case f.CopyDone():
                return self.tiers.copy_done(given)
            case f.PeerAsked():
                return self.tiers.peer_asked(given)
            case f.ServeDone():
                return self.tiers.serve_done(group, given)

    def _obey(self, now_ns: int, message: m.ToAgent) -> list[f.Output]:
        running = self._running(getattr(message, "generation", 0))
        match message:
            case m.Welcome():
                return self._welcomed(now_ns, message)
            case m.Refused():
                if message.final:
                    return self._end(now_ns, f"refused by the controller: {message.detail}")
                return [f.CloseLink(message.detail)]
            case m.LaunchWorkers():
                return self._launch(now_ns, message)
            case m.StopWorkers():
                return self._stop(now_ns, message)
            case m.Stage():
                return stage_request.begin(running, message)
            case m.Persist():
                return self.tiers.persist(running, message)
            case m.Committed():
                self.tiers.committed(message)
                return []
            case m.Chaos():
                return stop_sequence.rehearse(self.group, message)
            case m.Shutdown():
                return self._end(now_ns, message.detail)

    def _deliver(self, outputs: list[f.Output]) -> list[f.Output]:
        """Messages wait while nobody listens; heartbeats and what is told again anyway do not."""
        out: list[f.Output] = []
        for output in outputs:
            message = output.message if isinstance(output, f.Send) else None
            if message is None or self._talking or isinstance(message, m.Hello):
                out.append(output)
            elif not isinstance(message, m.Heartbeat | m.WorkerExitReport | m.Persisted):
                self._outbox.append(message)
        return out

    # -- the link -----------------------------------------------------------------------------
    def _link(self, up: f.LinkUp) -> list[f.Output]:
        self._link_up, self._absent_since_ns = True, None
        self._port = up.offered_port
        group = self.group
        runs = group is not None and not group.stopped
        hello = m.Hello(
            token=self._token,
            job=self.job,
            node=self.node,
            facts=up.facts,
            generation=group.generation if group and runs else 0,
            ranks=tuple(w.seat.rank for w in group.alive) if group and runs else (),
            staged=self.tiers.inventory(),
            offered_port=self._port,
        )
        return [f.Send(hello)]

    def _welcomed(self, now_ns: int, message: m.Welcome) -> list[f.Output]:
        first, self.welcome, self._talking = self.welcome is None, message, True
        out: list[f.Output] = [f.Configure()] if first else []
        if first:
            self._standbys.welcomed(now_ns)
        out += map(f.Send, self._outbox)
        self._outbox = []
        out += outbound.exits_again(self.group)
        out += map(f.Send, self.tiers.unacknowledged.values())
        if self._leaving is not None:
            out.append(f.Send(self._leaving.message(now_ns)))
        return [*out, *self._beat(now_ns)]

    def _beat(self, now_ns: int) -> list[f.Output]:
        assert self.welcome is not None
        self._beat_ns = now_ns + int(self.welcome.heartbeat_interval_s * NS)
        group = self.group
        alive = group.alive if group and not group.stopped else []
        beats = (worker.beat(now_ns, worker.seat.rank in self._stopped_ranks) for worker in alive)
        return [outbound.heartbeat(group, tuple(beats), self.tiers.staged_step())]

    def _tick(self, now_ns: int) -> list[f.Output]:
        out: list[f.Output] = []
        group = self.group
        if self._talking and self._beat_ns is not None and now_ns >= self._beat_ns:
            out += self._beat(now_ns)
        out += self._standbys.refill(now_ns, group)
        stop = group.stop if group else None
        if group and stop and stop.deadline_ns is not None and now_ns >= stop.deadline_ns:
            out += stop_sequence.carry_on(now_ns, group, stop)
            out += self._settle_stop(now_ns, group)
        absent = self._absent_since_ns
        if absent is not None and now_ns >= absent + int(limits.CONTROLLER_ABSENCE_S * NS):
            detail = f"no controller for {limits.CONTROLLER_ABSENCE_S:g} s"
            out += self._end(now_ns, detail) if not self._ending else []
        out += self._leave_in_time(now_ns)
        if self._ending_ns is not None and now_ns >= self._ending_ns and not self._ended:
            out += self._leave()
        return out

    # -- launch -------------------------------------------------------------------------------
    def _launch(self, now_ns: int, message: m.LaunchWorkers) -> list[f.Output]:
        generation, group = message.membership.generation, self.group
        if self._ending or generation <= self._fence:
            detail = self._ending or f"generation {generation} is over; the fence is {self._fence}"
            return [outbound.launched(message.action_id, generation, ok=False, detail=detail)]
        if group is not None and not group.stopped:
            if group.generation == generation:
                group.launch_ids.append(message.action_id)
                return self._answer_launch(group, ok=True) if group.launched else []
            # The controller moved on while we were cut off: the old generation is a zombie.
            self._waiting, self._fence = message, generation - 1
            return stop_sequence.kill_all(group)
        return self._begin(now_ns, message)

    def _begin(self, now_ns: int, message: m.LaunchWorkers) -> list[f.Output]:
        membership = message.membership
        self._fence, self._waiting = membership.generation - 1, None
        self._standbys.launching()
        workers = {seat.rank: Worker(seat, now_ns) for seat in message.seats}
        group = self.group = Generation(message, workers, [message.action_id])
        self._stopped_ranks = frozenset()
        out = self.tiers.launch(group)
        out += [f.Fork(membership, message.node_rank, seat) for seat in message.seats]
        return [*out, f.OfferPort()]

    def _forked(self, given: f.WorkerForked) -> list[f.Output]:
        group = self._running(given.generation)
        if group is None or given.rank not in group.workers:
            return []
        group.workers[given.rank].pid = given.pid
        if group.launched or not all(w.pid for w in group.workers.values()):
            return []
        group.launched = True
        return self._answer_launch(group, ok=True)

    def _fork_failed(self, now_ns: int, given: f.ForkFailed) -> list[f.Output]:
        group = self._running(given.generation)
        if group is None:
            return []
        group.workers[given.rank].ended = True
        out = self._answer_launch(group, ok=False, detail=given.detail)
        if group.stop is None:
            self._fence = max(self._fence, group.generation)
            out += stop_sequence.kill_all(group)
        return [*out, *self._settle_stop(now_ns, group)]

    def _answer_launch(self, group: Generation, *, ok: bool, detail: str = "") -> list[f.Output]:
        ids, group.launch_ids = group.launch_ids, []
        return [outbound.launched(action, group.generation, ok=ok, detail=detail) for action in ids]

    # -- workers ------------------------------------------------------------------------------
    def _from_rank(self, now_ns: int, given: f.FromRank) -> list[f.Output]:
        group = self._running(given.generation)
        worker = group.workers.get(given.rank) if group else None
        if group is None or worker is None:
            return []
        message = given.message
        worker.heard(now_ns, message)
        match message:
            case worker_protocol.Progress():
                return self._advanced(now_ns, group)
            case worker_protocol.BufferRequest():
                return self.tiers.request(group, worker.seat, message.num_bytes)
            case worker_protocol.Staged():
                return self.tiers.staged(group, worker.seat, message)
            case worker_protocol.FetchShard():
                return self.tiers.fetch(group, given.rank, message.shard)
            case worker_protocol.Finished():
                return self.tiers.finished(group, worker.seat)
            case _:
                return []

    def _advanced(self, now_ns: int, group: Generation) -> list[f.Output]:
        """The first step of a generation ends its recovery, so it is told at once; later steps
        ride on the heartbeats."""
        if group.advanced or group.min_step() <= group.after_step:
            return []
        group.advanced = True
        self._standbys.advanced(now_ns)
        return self._beat(now_ns) if self._talking else []

    def _worker_ended(self, now_ns: int, given: f.WorkerEnded) -> list[f.Output]:
        group = self._running(given.generation)
        worker = group.workers.get(given.rank) if group else None
        if group is None or worker is None or worker.ended:
            return []
        worker.ended_with(
            given.code,
            given.signal,
            oom=given.out_of_memory,
            wall_ns=given.wall_ns,
            after_step=group.after_step,
        )
        if group.stop is not None:
            return self._settle_stop(now_ns, group)
        # The last steps of a finished worker must not wait for a beat that no longer shows it.
        last = (worker.beat(now_ns, stopped=False),)
        words = outbound.heartbeat(group, last, self.tiers.staged_step())
        return [*([words] if self._talking else []), f.Send(outbound.exited(group, worker))]

    # -- stop ---------------------------------------------------------------------------------
    def _stop(self, now_ns: int, message: m.StopWorkers) -> list[f.Output]:
        generation, group = message.generation, self._running(message.generation)
        self._fence = max(self._fence, generation)
        if self._waiting and self._waiting.membership.generation <= generation:
            self._waiting = None
        if group is None or group.stopped:
            return [self._stopped(message.action_id, generation, group)]
        if group.stop is None:
            out = stop_sequence.begin(now_ns, group, message)
            return [*out, *self._settle_stop(now_ns, group)]
        stop_sequence.again(now_ns, group.stop, message)
        return []

    def _stacks_taken(self, now_ns: int, given: f.StacksTaken) -> list[f.Output]:
        group = self._running(given.generation)
        if group is None or group.stop is None or group.stop.stage != "stacks":
            return []
        group.stop.stacks = given.stacks
        out = stop_sequence.carry_on(now_ns, group, group.stop)
        return [*out, *self._settle_stop(now_ns, group)]

    def _settle_stop(self, now_ns: int, group: Generation) -> list[f.Output]:
        if group.alive or group.stopped or group.stop is None:
            return []
        group.stopped = True
        self.tiers.stop()
        out = self._answer_launch(group, ok=False, detail="stopped while it was launched")
        out += [self._stopped(at, group.generation, group) for at in group.stop.action_ids]
        if self._ending:
            return [*out, *self._leave()]
        if self._waiting is not None:
            return [*out, *self._begin(now_ns, self._waiting)]
        return out

    def _stopped(self, action_id: int, generation: int, group: Generation | None) -> f.Output:
        staged = self.tiers.inventory()
        return outbound.stopped(action_id, generation, group, staged, self._port)

    # -- the end ------------------------------------------------------------------------------
    def _terminated(self, now_ns: int, given: f.Terminated) -> list[f.Output]:
        if self._leaving is not None or self._ending:
            return []  # whoever ends containers may say so more than once
        self._leaving = Preemption(given.detail, now_ns, given.grace_s)
        self._standbys.retire()
        if self._talking:
            return [f.Send(self._leaving.message(now_ns))]
        used = (self.group is not None and not self.group.stopped) or self.tiers.inventory()
        return [] if used else self._end(now_ns, given.detail)

    def _leave_in_time(self, now_ns: int) -> list[f.Output]:
        leaving = self._leaving
        if leaving is None or self._ending or now_ns < leaving.due_ns(self._talking):
            return []
        if now_ns >= leaving.end_ns:
            return self._end(now_ns, leaving.verdict)
        leaving.saved = True
        return self.tiers.save()

    def _end(self, now_ns: int, detail: str) -> list[f.Output]:
        if self._ending:
            return []
        self._ending = detail or "shut down"
        self._waiting = None
        group = self.group
        if group is None or group.stopped or not group.alive:
            return self._leave()
        self._ending_ns = now_ns + int(limits.STOP_TIMEOUT_S * NS)
        if self._leaving is not None:
            self._ending_ns = min(self._ending_ns, max(now_ns, self._leaving.last_ns))
        return stop_sequence.kill_all(group)

    def _leave(self) -> list[f.Output]:
        self._ended = True
        return [f.EndNode(self._ending)]

    def _running(self, generation: int) -> Generation | None:
        """The group if it is of this generation, whether it runs or has been stopped."""
        group = self.group
        return group if group is not None and group.generation == generation else None
