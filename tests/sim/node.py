"""One simulated node: the production agent machine over simulated workers, memory and network."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.protocol.facts import NodeFacts, Stack
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.machine.commands import Command
from holdfast.workers.agent.machine.machine import AgentMachine

from .trainer import Payload, SimWorker

if TYPE_CHECKING:
    from .network import Link
    from .world import World

IMPORTS_S = (0.0, 0.0, 0.3, 3.0, 20.0, float("inf"))
"""Seconds of the standbys' imports; 0: nothing to import, infinite: an import that hangs."""


class SimNode:
    def __init__(self, world: World, name: str, slots: int) -> None:
        self.world, self.name, self.slots = world, name, slots
        self.machine = AgentMachine(job=world.job_name, node=name, token="t", slots=slots)
        self.workers: dict[tuple[int, int], SimWorker] = {}
        self.starting: set[tuple[int, int]] = set()
        self.contents: dict[int, Payload | None] = {}
        self.memory_bytes: int | None = None
        """None: not measured, nothing is limited."""
        self.parts: dict[int, dict[int, Payload]] = {}
        """Buffer -> what twins have written into it, by part."""
        self.most_bytes = self.staged_bytes = 0
        """The most that its buffers took, and what its workers have copied into them."""
        self.facts = NodeFacts(hostname=name, address=f"ip-{name}", data_port=1, slots=slots)
        # Of its own random numbers: other draws of the seed stay what they are.
        self.imports_s = random.Random(f"imports {world.seed} {name}").choice(IMPORTS_S)
        self._learned_in = 0
        """The generation whose workers have reported what they import."""
        self.alive = True
        self.link: Link | None = None
        self._backoff_s = limits.RECONNECT_MIN_S
        self._pid = 100
        self._port = 30_000
        self._wake_ns: int | None = None

    # -- the machine --------------------------------------------------------------------------
    def feed(self, given: inputs.Input) -> None:
        if not self.alive:
            return
        for output in self.machine.step(self.world.now, given):
            if self.alive:
                self._carry_out(output)
        self._sleep()

    def _sleep(self) -> None:
        due = self.machine.next_deadline_ns() if self.alive else None
        if due is None or (self._wake_ns is not None and self.world.now < self._wake_ns <= due):
            return
        self._wake_ns = max(due, self.world.now)
        self.world.at(self._wake_ns, lambda at=self._wake_ns: self._wake(at))

    def _wake(self, at: int) -> None:
        if self._wake_ns == at and self.alive:
            self._wake_ns = None
            self.feed(inputs.ClockTick())

    def _carry_out(self, out: Command) -> None:
        world = self.world
        match out:
            case commands.Send():
                if self.link is not None:
                    self.link.to_controller(out.message)
            case commands.CloseLink():
                if self.link is not None:
                    self.link.close()
            case commands.Fork():
                self.starting.add((out.membership.generation, out.seat.rank))
                world.after(world.between(0.004, 0.03), lambda: self._fork(out))
            case commands.Kill():
                self._kill(out)
            case commands.Halt():
                for rank in out.ranks:
                    halted = self.workers[(out.generation, rank)].halted
                    world.after(world.keeps.choice((0.001, 0.02, 0.3, 0.9, 2.0)), halted)
            case commands.TakeStacks():
                world.after(world.between(0.05, 0.5), lambda: self._stacks(out))
            case commands.Configure():
                must_import = inputs.JobConfigured(must_import=self.imports_s > 0)
                world.after(0.001, lambda: self.feed(must_import))
            case commands.RefillStandbys():
                if self.imports_s < float("inf"):
                    world.after(self.imports_s, lambda: self.feed(inputs.StandbysReady()))
            case commands.OfferPort():
                self._port += 1
                world.after(0.001, lambda port=self._port: self.feed(inputs.PortOffered(port)))
            case commands.ToRank():
                worker = self.workers.get((out.generation, out.rank))
                payload = self.contents.get(out.buffer) if out.buffer is not None else None
                if worker is not None:
                    world.after(0.001, lambda: worker.received(out.message, payload))
            case commands.MakeBuffer():
                self.contents[out.buffer] = None
                size = len(self.contents) * world.sizes.shard_bytes
                self.most_bytes = max(self.most_bytes, size)
            case commands.FreeBuffer():
                self.contents.pop(out.buffer, None)
            case commands.WriteStorage():
                payload = self.contents[out.buffer]
                world.after(world.between(0.05, 0.8), lambda: self._written(out, payload))
            case commands.PushToBuddy():
                payload = self.contents[out.buffer]
                world.after(world.between(0.01, 0.1), lambda: self._push(out, payload))
            case commands.FetchFromPeer():
                world.after(0.002, lambda: self._fetch(out, 0))
            case commands.KillNode():
                world.node_dies(self, visible=True, why="chaos")
            case commands.EndNode():
                world.node_dies(self, visible=True, why=out.detail)

    def written(self, buffer: int, part: int, parts: int, payload: Payload) -> None:
        """A worker has copied its part; a buffer with parts of different states holds none."""
        found = self.parts.setdefault(buffer, {}) if parts > 1 else {}
        found[part] = payload
        whole = len(found) == parts and set(found.values()) == {payload}
        self.contents[buffer] = payload if whole else None
        self.staged_bytes += self.world.sizes.shard_bytes // parts

    def stage_every(self, generation: int) -> int:
        """The interval with which the workers of a generation are forked."""
        group = self.machine.group
        return group.stage_every[0] if group and group.generation == generation else 0

    # -- workers ------------------------------------------------------------------------------
    def _fork(self, out: commands.Fork) -> None:
        if not self.alive:
            return
        generation, rank = out.membership.generation, out.seat.rank
        dropped = (generation, rank) not in self.starting
        if dropped or self.world.fork_fails():
            why = "stopped before it was started" if dropped else "out of processes"
            self.feed(inputs.ForkFailed(generation, rank, why))
            return
        before = self.world.num_again
        if out.kept is not None and (held := self.workers[out.kept]).kept:
            held.take_seat(out.membership, out.seat)
        self._pid += 1
        worker = self.world.worker(self, out.membership, out.seat, len(out.twins))
        worker.again = self.world.num_again > before
        self.workers[(generation, rank)] = worker
        self.feed(inputs.WorkerForked(generation, rank, self._pid))
        self.world.after(self.world.between(0.1, 0.4), worker.begin)

    def _kill(self, out: commands.Kill) -> None:
        if (worker := self.workers.get((out.generation, out.rank))) is None:
            self.starting.discard((out.generation, out.rank))
            return
        if out.signal == 19:
            self.stop_worker(worker)
        else:
            self.world.after(self.world.between(0.005, 0.06), lambda: worker.end(None, out.signal))

    def stop_worker(self, worker: SimWorker) -> None:
        """SIGSTOP."""
        worker.stopped = True
        self.world.after(self.world.between(0.1, 0.5), self._report_stopped)

    def _report_stopped(self) -> None:
        ranks = sorted(w.rank for w in self.workers.values() if w.alive and w.stopped)
        self.feed(inputs.StoppedRanks(tuple(ranks)))

    def from_worker(self, worker: SimWorker, message: worker_protocol.FromWorker) -> None:
        if isinstance(message, worker_protocol.BufferRequest) and message.step < 0:
            self._measure_memory()
        self.feed(inputs.FromRank(worker.generation, worker.rank, message))
        trains = isinstance(message, worker_protocol.Progress)
        if trains and self.imports_s and self._learned_in < worker.generation:
            self._learned_in = worker.generation
            learned = worker_protocol.ImportsReported(modules=("transformers",))
            self.feed(inputs.FromRank(worker.generation, worker.rank, learned))

    def _measure_memory(self) -> None:
        if self.memory_bytes is not None:
            held = len(self.contents) * self.world.sizes.shard_bytes
            free = max(0, self.memory_bytes - held)
            self.feed(inputs.MemoryMeasured(self.memory_bytes, free, held))

    def worker_ended(self, worker: SimWorker, code: int | None, signal: int | None) -> None:
        self.feed(
            inputs.WorkerEnded(worker.generation, worker.rank, code, signal, wall_ns=self.world.now)
        )

    def _stacks(self, out: commands.TakeStacks) -> None:
        stacks = []
        for rank in out.ranks:
            worker = self.workers.get((out.generation, rank))
            if worker is not None and worker.alive:
                state, kind = "S", worker.doing
                if worker.stopped:
                    state, kind = ("T", "nothing") if out.by_signal else ("S", "")
                stacks.append(Stack(rank, f"stack of {rank}", kind == "peers", state, kind))
        self.feed(inputs.StacksTaken(out.generation, tuple(stacks), out.by_signal))

    def measure(self) -> None:
        """Report the kernel's figures of the workers as long as one of the job is delayed."""
        group = self.machine.group
        if not self.alive or group is None:
            return
        idle_s: dict[int, float] = {}
        for rank, known in group.workers.items():
            worker = self.workers.get((group.generation, rank))
            busy = worker is not None and worker.uses_cpu
            if worker is not None:
                worker.send(worker_protocol.Pulse())
            idle_s[rank] = 0.0 if busy else (self.world.now - known.progress_ns) / SECOND_NS
        self.feed(inputs.ActivityMeasured(idle_s, self.world.cpu_pressure))

    # -- tiers --------------------------------------------------------------------------------
    def _written(self, out: commands.WriteStorage, payload: Payload | None) -> None:
        if not self.alive:
            return
        if self.world.write_fails():
            self.feed(inputs.WriteDone(out.buffer, out.staged, out.file, detail="no space left"))
            return
        self.world.storage.write(out.directory, out.file, out.staged, payload)
        self.feed(inputs.WriteDone(out.buffer, out.staged, out.file, checksum="aa", seconds=0.1))

    def _push(self, out: commands.PushToBuddy, payload: Payload | None) -> None:
        peer = self.world.nodes.get(out.node)
        if peer is None or not self._reaches(peer):
            self.feed(inputs.PushDone(out.buffer, "the buddy cannot be reached"))
            return
        if peer.machine.tiers.memory.current is None:
            peer._measure_memory()
        buffer, before = peer.machine.accept_copy(out.staged, out.confirmed)
        for command in before:
            peer._carry_out(command)
        if isinstance(buffer, str):
            self.feed(inputs.PushDone(out.buffer, buffer))
            return
        peer.contents[buffer] = None
        self.world.after(
            self.world.sizes.push_s(self.slots) * self.world.between(0.9, 1.1),
            lambda: peer._copied(buffer, self, out.buffer, payload),
        )

    def _reaches(self, peer: SimNode) -> bool:
        cut_off = self.world.disconnected(self) or self.world.disconnected(peer)
        return peer.alive and not cut_off

    def _fetch(self, out: commands.FetchFromPeer, index: int) -> None:
        if not self.alive:
            return
        if index >= len(out.sources):
            worker = self.workers.get((out.generation, out.rank))
            if worker is not None:
                worker.received(
                    worker_protocol.NoShard(shard=out.wanted.shard, detail="no source"), None
                )
            return
        peer = self.world.nodes.get(out.sources[index].node)
        if peer is None or not self._reaches(peer):
            self.world.after(0.05, lambda: self._fetch(out, index + 1))
            return
        wanted = out.wanted
        found = peer.machine.tiers.lend(wanted.step, wanted.generation, wanted.shard)
        if found is None:
            self.world.after(0.005, lambda: self._fetch(out, index + 1))
            return
        buffer = found[0]
        payload = peer.contents.get(buffer)
        took_s = self.world.between(0.01, 0.05) + self.world.sizes.fetch_s
        self.world.after(took_s, lambda: peer._served(buffer, self, out, payload))

    def _copied(self, to: int, origin: SimNode, buffer: int, payload: Payload | None) -> None:
        ok = origin.alive and self.alive
        if ok:
            self.contents[to] = payload
        self.feed(inputs.CopyDone(to, ok))
        detail = "" if self.alive else "the buddy went away"
        origin.feed(inputs.PushDone(buffer, detail, self.world.sizes.push_s(self.slots)))

    def _served(
        self, buffer: int, asker: SimNode, out: commands.FetchFromPeer, payload: Payload | None
    ) -> None:
        self.feed(inputs.ServeDone(buffer))
        worker = asker.workers.get((out.generation, out.rank))
        if worker is not None and asker.alive and self.alive:
            worker.received(
                worker_protocol.Shard(
                    shard=out.wanted.shard, num_bytes=self.world.sizes.shard_bytes
                ),
                payload,
            )
        elif worker is not None and asker.alive:
            worker.received(
                worker_protocol.NoShard(shard=out.wanted.shard, detail="the peer died"), None
            )

    # -- the link -----------------------------------------------------------------------------
    def connect(self) -> None:
        """Connect, with back-off until it succeeds."""
        if not self.alive or self.link is not None:
            return
        self.link = self.world.connect(self)
        if self.link is None:
            self.world.after(self._backoff_s, self.connect)
            self._backoff_s = min(self._backoff_s * 2, limits.RECONNECT_MAX_S)
            return
        self._backoff_s = limits.RECONNECT_MIN_S
        self._port += 1
        self.feed(inputs.LinkUp(self.facts, self._port))

    def link_down(self, link: Link) -> None:
        if self.link is link:
            self.link = None
            self.feed(inputs.LinkDown())
            self.world.after(self._backoff_s, self.connect)

    def die(self) -> None:
        """All processes and memory of the node are lost at once."""
        self.alive = False
        for worker in self.workers.values():
            worker.kept = False
            if worker.alive:
                worker.alive = False
                worker.ready = False
                worker.gang.broken(worker)
        self.contents.clear()
