"""Simulated training: the workers of one generation step together or not at all.

A step ends when every rank takes part. A dead rank leaves its peers with a broken connection or
blocked, a stopped one leaves them blocked. What a rank stages is a pure function of (step, shard),
so that a wrong restore is detected.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import Membership, StackActivity, WorkerSeat
from holdfast.orchestrator.protocol.manifest import directory_name
from holdfast.workers import worker_protocol
from holdfast.workers.checkpoint.twin_parts import MIN_SHARED_BYTES

if TYPE_CHECKING:
    from .node import SimNode
    from .world import World


@dataclass(frozen=True)
class Delay:
    """One rank is late at one step."""

    seconds: float | None
    """None: it never arrives."""
    doing: StackActivity
    uses_cpu: bool


Payload = tuple[int, int, int]
"""(step, shard, num_shards): the training state of one rank."""


class SimWorker:
    """One worker process."""

    def __init__(self, node: SimNode, membership: Membership, seat: WorkerSeat, twins: int) -> None:
        self.node, self.world = node, node.world
        self.membership, self.seat = membership, seat
        self.rank, self.generation = seat.rank, membership.generation
        self.alive = True
        self.stopped = False
        self.step = membership.restore.step if membership.restore else -1
        self.ready = False
        """True while the rank waits for its peers at the next collective."""
        self.twins, self.shares = twins, False
        self.writable: list[tuple[int, int, int]] = []
        """(buffer, part, parts)."""
        self.staged_bytes = 0
        self.parts = 1
        """Parts of the last staging."""
        self.wants_to_stage: int | None = None
        self.requested = -1
        self.staged_before = self.staged_now = False
        """The staging after a step counts as time of the next one."""
        self.intervals = [(0, node.stage_every(membership.generation))]
        """(from this step on, every Nth is staged)."""
        self.keepable = self.kept = self.waited = False
        """True if the rank may be kept, and its process waits for a seat in the next generation."""
        self.stateless = self.again = False
        """Nothing but the process is kept, and the script runs again in this one."""
        self.gang = self.world.gang(membership)
        if membership.ahead:  # it waits for a seat like a kept one, once it is built
            self.alive, self.kept = False, True
        self.doing: StackActivity = "peers"
        self.uses_cpu = False

    # -- to the agent -------------------------------------------------------------------------
    def send(self, message: worker_protocol.FromWorker) -> None:
        if self.alive and not self.stopped:
            self.node.from_worker(self, message)

    # -- life ---------------------------------------------------------------------------------
    def begin(self) -> None:
        if self.membership.ahead and self.kept:
            self._build()
        if not self._runs(self.begin):
            return
        self.gang.workers[self.rank] = self
        self.send(worker_protocol.PhaseChanged(phase="build"))
        if self.world.runs_again:
            self.send(worker_protocol.RunsAgain())
        goes_on = self.membership.kept_from or self.again
        if goes_on and self.world.keeps.random() < self.world.unfit_share:
            self.fail("NotKept", "process groups were not formed again in time")
            return
        size = self.world.sizes.shard_bytes
        shares = self.shares = self.twins > 1 and size >= MIN_SHARED_BYTES
        for _ in range(1 if shares else 3):
            self.send(worker_protocol.BufferRequest(num_bytes=size, shared=shares))
        restore = self.membership.restore
        if restore is None:
            self._restored(None)
        elif restore.directory:
            self.send(worker_protocol.PhaseChanged(phase="restore"))
            self.world.after(self.world.between(0.02, 0.1), self._read_storage)
        else:
            self.send(worker_protocol.PhaseChanged(phase="restore"))
            self.missing = self._needed(restore.num_shards)
            self._fetch_next()

    def _needed(self, num_shards: int) -> list[int]:
        same = num_shards == self.membership.mesh.num_shards
        return [self.seat.shard] if same else list(range(num_shards))

    def _fetch_next(self) -> None:
        if self.missing:
            self.send(worker_protocol.FetchShard(shard=self.missing[0]))
        else:
            self._restored(None)

    def received(self, message: worker_protocol.ToWorker, payload: Payload | None) -> None:
        if not self._runs(lambda: self.received(message, payload)):
            return
        match message:
            case worker_protocol.StageAt():
                self.requested = message.step
            case worker_protocol.SetStagingInterval():
                self.intervals.append((message.from_step, message.every_steps))
            case worker_protocol.Buffer() | worker_protocol.BufferFree():
                if message.parts:
                    self.writable.append((message.buffer, message.part, message.parts))
                self._stage()
            case worker_protocol.Shard():
                restore = self.membership.restore
                assert restore is not None
                expected = (restore.step, message.shard, restore.num_shards)
                self.world.oracle.require(
                    payload == expected, f"restored {payload} where {expected} was to be"
                )
                if self.missing and self.missing[0] == message.shard:
                    self.missing.pop(0)
                self._fetch_next()
            case worker_protocol.NoShard():
                self.fail("UnreadableCheckpoint", f"shard {message.shard}: {message.detail}")

    def _read_storage(self) -> None:
        if not self._runs(self._read_storage):
            return
        restore = self.membership.restore
        assert restore is not None
        directory = directory_name(restore.step, restore.generation)
        error, problem = self.world.storage.verify(directory)
        if problem:
            self.fail(error, problem)
        else:
            self._restored(None)

    def _restored(self, _payload: None) -> None:
        self.send(worker_protocol.PhaseChanged(phase="train"))
        self._next()

    def _next(self) -> None:
        if self.step >= self.world.total_steps - 1:
            self.send(worker_protocol.Finished(step=self.step))
            self.world.after(self.world.between(0.0, 0.1), lambda: self.end(0, None))
        elif self.world.poison == self.step and self.rank == 0:
            self.fail("ValueError", f"the data of step {self.step + 1} is bad", secondary=False)
        elif (delay := self.world.delays.pop(self.rank, None)) is not None:
            self.doing, self.uses_cpu = delay.doing, delay.uses_cpu
            self.world.measure_activity()
            if delay.seconds is not None:
                self.world.after(delay.seconds, self._arrive)
        else:
            self._arrive()

    def _arrive(self) -> None:
        if not self._runs(self._arrive):
            return
        self.doing, self.uses_cpu = "peers", False
        self.ready = True
        self.gang.arrive()

    def advance(self) -> None:
        """This rank has finished the collective of a step."""
        if not self._runs(self.advance):
            return
        self.step += 1
        if self.step == self.gang.differs_at:
            self._differ()
            return
        checkpoint = self.world.host.job.spec.checkpoint
        chosen = [every for begin, every in self.intervals if begin <= self.step][-1]
        due = checkpoint.stages(self.step, chosen or checkpoint.staging_interval)
        last = self.step == self.world.total_steps - 1
        self.staged_before, self.staged_now = self.staged_now, due
        if last or self.step == self.requested or due:
            self.wants_to_stage = self.step
            if self.shares:
                size = self.world.sizes.shard_bytes
                request = worker_protocol.BufferRequest(
                    num_bytes=size, shared=True, step=self.step, layout=1
                )
                self.send(request)
            else:
                self._stage()
        else:
            self._report()

    def _stage(self) -> None:
        if self.wants_to_stage is None:
            return
        if not self.writable:
            if not self.shares:
                self.send(worker_protocol.BufferWanted())
            return
        step, self.wants_to_stage = self.wants_to_stage, None
        number, part, self.parts = self.writable.pop(0)
        self.world.after(self.stall_s, lambda: self._staged(number, part, step))

    @property
    def stall_s(self) -> float:
        return self.world.sizes.stall_s / self.parts

    def _staged(self, number: int, part: int, step: int) -> None:
        if not self._runs(lambda: None):
            return
        payload = (step, self.seat.shard, self.membership.mesh.num_shards)
        self.node.written(number, part, self.parts, payload)
        self.staged_bytes += self.world.sizes.shard_bytes // self.parts
        num_bytes = self.world.sizes.shard_bytes
        self.send(worker_protocol.Staged(buffer=number, step=step, num_bytes=num_bytes))
        self._report()

    def _report(self) -> None:
        stall_s = self.stall_s
        progress = worker_protocol.Progress(
            step=self.step, loss=1.0 / (self.step + 1),
            step_s=self.world.step_s + (stall_s if self.staged_before else 0.0), stall_s=stall_s,
            staging_s=stall_s,
        )  # fmt: skip
        self.send(progress)
        if self.world.keeps_any and not self.keepable:
            self.keepable = True
            self.send(worker_protocol.KeepReported(why_not=""))
        held_s = limits.HOLD_S if self.step == self.requested else 0.0
        if held_s:
            self.send(worker_protocol.PhaseChanged(phase="save"))
        self.world.after(held_s + self.world.between(0.0, 0.02), self._after_step)

    def _after_step(self) -> None:
        if not self._runs(self._after_step):
            return
        if self.step == self.requested:
            self.send(worker_protocol.PhaseChanged(phase="train"))
        self._next()

    def _runs(self, again: object) -> bool:
        """Neither dead nor stopped."""
        return self.alive and not self.stopped

    # -- death --------------------------------------------------------------------------------
    def fail(self, error_type: str, message: str, *, secondary: bool = False) -> None:
        if not self.alive or self.stopped:
            return
        if secondary and self.doing != "peers":
            return  # it is in no collective, so it does not see that a peer is gone
        if secondary and (self.keepable or self.world.runs_again) and not self.waited:
            self.waited = True  # for the order to halt
            again = lambda: self.fail(error_type, message, secondary=True)
            self.world.after(limits.HALT_WAIT_S, again)
            return
        trace = f'Traceback:\n  File "train.py", line 1, in step\n{error_type}: {message}'
        self.send(
            worker_protocol.Failed(
                error_type=error_type, message=message, traceback=trace, secondary=secondary
            )
        )
        self.end(1, None)

    # -- kept ---------------------------------------------------------------------------------
    def _differ(self) -> None:
        """Replicas differ: what this node's memory has since processes were kept is wrong."""
        self.world.num_differed += 1
        tiers, renewed_in = self.node.machine.tiers, self.world.host.state.keeping.renewed_in
        for held in (*tiers.buffers.buffers.values(), *tiers.copies.copies.values()):
            if held.content is not None and held.content.generation > renewed_in:
                self.node.contents[held.number] = (-1, -1, -1)
        if self.rank == 0 and self.gang.suspended_s:
            self.world.after(self.gang.suspended_s, self.world.suspend)
        self.fail("ReplicasDiverged", f"ranks have different parameters after step {self.step}")

    def _build(self) -> None:
        """Build beside the running job, unless it fails or never ends."""
        fate = self.world.builds.random()
        if fate < 0.1:
            self.world.after(self.world.builds.uniform(0, 3), lambda: self.end(1, None))
        elif fate < 0.95:
            self.world.after(self.world.builds.uniform(0, 8), self._built)

    def _built(self) -> None:
        if self.kept:
            self.world.num_built += 1
            self.node.from_worker(self, worker_protocol.Halted(step=self.step))

    def halted(self) -> None:
        """Leave the step, and wait."""
        if not self._runs(self.halted):
            return
        fixed_size = "the script reads world_size" if self.world.fixed_size else ""
        again = self.world.runs_again
        self.stateless = again and (not self.keepable or self.world.keeps.random() < 0.1)
        halted = {"fixed_size": fixed_size, "runs_again": self.stateless}
        self.send(worker_protocol.Halted(step=self.step, **halted))
        self.alive, self.ready, self.kept = False, False, True
        if self.world.keeps.random() < 0.05:
            self.world.after(self.world.keeps.uniform(0, 2), lambda: self.end(None, 9))

    def take_seat(self, membership: Membership, seat: WorkerSeat) -> None:
        """Continue the process as another worker of the next generation."""
        require, was = self.world.oracle.require, self.membership
        self.kept = False
        if self.stateless or not membership.kept_from:
            require(self.world.runs_again, "a script that may not run again is to do it")
            require(seat.rank == self.rank, f"rank {seat.rank} for one of {self.rank}")
            require(not was.ahead, "a process that was started ahead is to run again")
            self.world.num_again += 1
            return
        require(membership.kept_from == self.generation, "a seat for a process of another one")
        require(seat.shard == self.seat.shard, f"shard {seat.shard} for one of {self.seat.shard}")
        same = membership.world_size == was.world_size
        require(not same or seat.rank == self.rank, f"rank {seat.rank} for one of {self.rank}")
        require(same or not self.world.fixed_size, "another size for a script of a fixed one")
        require(membership.restore is not None, "a kept process has nothing to restore")
        self.world.num_kept += 1
        self.world.num_joined += was.ahead

    def end(self, code: int | None, signal: int | None) -> None:
        if self.kept:
            self.kept = False
            self.node.worker_ended(self, code, signal)
            return
        if not self.alive or (self.stopped and signal != 9):
            return
        self.alive = False
        self.ready = False
        self.node.worker_ended(self, code, signal)
        if code != 0:
            self.gang.broken(self)


class SimGang:
    """All workers of a generation."""

    def __init__(self, world: World, membership: Membership) -> None:
        self.world, self.membership = world, membership
        self.workers: dict[int, SimWorker] = {}
        self.differs_at, self.suspended_s = -1, 0.0
        """The step after which replicas are seen to differ; seconds until a suspend after it."""
        drawn = random.Random(f"differs {world.seed} {membership.generation}")
        if membership.kept_from and membership.restore and drawn.random() < world.differ_share:
            self.differs_at = membership.restore.step + drawn.randint(1, 8)
            self.suspended_s = drawn.choice((0.0, 0.01, 0.1))
        self.busy = False
        self.since_ns = 0
        """Time at which the last step ended, or the first one began."""

    def arrive(self) -> None:
        size = self.membership.world_size
        ready = [w for w in self.workers.values() if w.ready and w.alive and not w.stopped]
        if len(ready) < size or self.busy:
            return
        self.world.oracle.require(
            len({w.step for w in ready}) == 1, f"ranks at steps {[w.step for w in ready]}"
        )
        self.busy = True
        self.since_ns = self.since_ns or self.world.now
        self.world.after(self.world.step_s * self.world.between(0.9, 1.1), self._through)

    def _through(self) -> None:
        self.busy = False
        workers = list(self.workers.values())
        if any(not w.alive or w.stopped for w in workers):
            return
        self.world.step_trained(self.membership.generation, workers[0].step + 1, self.since_ns)
        self.since_ns = self.world.now
        for worker in workers:
            worker.ready = False
            old = [w for w in worker.node.workers.values() if w.kept]
            self.world.oracle.require(
                all(w.generation >= self.membership.generation for w in old),
                "kept processes are left while the next generation trains",
            )
        for worker in workers:
            self.world.after(self.world.between(0.0, 0.03), worker.advance)

    def broken(self, dead: SimWorker) -> None:
        """Some peers get an error, others block."""
        for worker in self.workers.values():
            if worker.alive and worker is not dead and self.world.chance(0.7):
                self.world.after(
                    self.world.between(0.03, 0.05),
                    lambda peer=worker: peer.fail(
                        "DistBackendError", "Connection reset by peer", secondary=True
                    ),
                )
