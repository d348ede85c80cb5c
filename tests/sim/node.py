"""One simulated node: the real agent machine over fake workers, memory and network.

Owns: carrying out the machine's commands in virtual time. Must not: decide anything of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import NodeFacts, Stack
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import inputs as f
from holdfast.workers.agent.machine.machine import AgentMachine

from .trainer import Payload, Worker

if TYPE_CHECKING:
    from .network import Link
    from .world import World


class SimNode:
    def __init__(self, world: World, name: str, slots: int) -> None:
        self.world, self.name, self.slots = world, name, slots
        self.machine = AgentMachine(job=world.job_name, node=name, token="t", slots=slots)
        self.workers: dict[tuple[int, int], Worker] = {}
        self.contents: dict[int, Payload | None] = {}
        self.alive = True
        self.link: Link | None = None
        self._backoff_s = limits.RECONNECT_MIN_S
        self._pid = 100
        self._port = 30_000
        self._wake_ns: int | None = None
        self._asked: dict[int, object] = {}
        self._numbers = 0

    # -- the machine --------------------------------------------------------------------------
    def feed(self, given: f.Input) -> None:
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
            self.feed(f.ClockTick())

    def _carry_out(self, out: f.Output) -> None:
        world = self.world
        match out:
            case f.Send():
                if self.link is not None:
                    self.link.to_controller(out.message)
            case f.CloseLink():
                if self.link is not None:
                    self.link.close()
            case f.Fork():
                world.after(world.between(0.004, 0.03), lambda: self._fork(out))
            case f.Kill():
                self._kill(out)
            case f.TakeStacks():
                world.after(world.between(0.05, 0.5), lambda: self._stacks(out))
            case f.OfferPort():
                self._port += 1
                world.after(0.001, lambda port=self._port: self.feed(f.PortOffered(port)))
            case f.ToRank():
                worker = self.workers.get((out.generation, out.rank))
                payload = self.contents.get(out.buffer) if out.buffer is not None else None
                if worker is not None:
                    world.after(0.001, lambda: worker.received(out.message, payload))
            case f.MakeBuffer():
                self.contents[out.buffer] = None
            case f.FreeBuffer():
                self.contents.pop(out.buffer, None)
            case f.WriteStorage():
                payload = self.contents[out.buffer]
                world.after(world.between(0.05, 0.8), lambda: self._written(out, payload))
            case f.PushToBuddy():
                payload = self.contents[out.buffer]
                world.after(world.between(0.01, 0.1), lambda: self._push(out, payload))
            case f.FetchFromPeer():
                world.after(0.002, lambda: self._fetch(out, 0))
            case f.AcceptCopy() | f.RefuseCopy() | f.ServePeer() | f.RefusePeer():
                self._peer_answer(out)
            case f.KillNode():
                world.node_dies(self, visible=True, why="chaos")
            case f.EndNode():
                world.node_dies(self, visible=True, why=out.detail)
            case _:
                pass

    # -- workers ------------------------------------------------------------------------------
    def _fork(self, out: f.Fork) -> None:
        if not self.alive:
            return
        generation, rank = out.membership.generation, out.seat.rank
        if self.world.fork_fails():
            self.feed(f.ForkFailed(generation, rank, "out of processes"))
            return
        self._pid += 1
        worker = Worker(self, out.membership, out.seat)
        self.workers[(generation, rank)] = worker
        self.feed(f.WorkerForked(generation, rank, self._pid))
        self.world.after(self.world.between(0.1, 0.4), worker.begin)

    def _kill(self, out: f.Kill) -> None:
        worker = self.workers.get((out.generation, out.rank))
        if worker is None:
            return
        if out.signal == 19:
            self.stop_worker(worker)
        else:
            self.world.after(self.world.between(0.005, 0.06), lambda: worker.end(None, out.signal))

    def stop_worker(self, worker: Worker) -> None:
        """SIGSTOP."""
        worker.stopped = True
        self.world.after(self.world.between(0.1, 0.5), self._tell_stopped)

    def _tell_stopped(self) -> None:
        ranks = sorted(w.rank for w in self.workers.values() if w.alive and w.stopped)
        self.feed(f.StoppedRanks(tuple(ranks)))

    def from_worker(self, worker: Worker, message: worker_protocol.FromWorker) -> None:
        self.feed(f.FromRank(worker.generation, worker.rank, message))

    def worker_ended(self, worker: Worker, code: int | None, signal: int | None) -> None:
        self.feed(
            f.WorkerEnded(worker.generation, worker.rank, code, signal, wall_ns=self.world.now)
        )

    def _stacks(self, out: f.TakeStacks) -> None:
        stacks = []
        for rank in out.ranks:
            worker = self.workers.get((out.generation, rank))
            if worker is not None and worker.alive:
                state = "T" if worker.stopped else "S"
                stacks.append(Stack(rank, f"stack of {rank}", not worker.stopped, state))
        self.feed(f.StacksTaken(out.generation, tuple(stacks)))

    # -- tiers --------------------------------------------------------------------------------
    def _written(self, out: f.WriteStorage, payload: Payload | None) -> None:
        if not self.alive:
            return
        if self.world.write_fails():
            self.feed(f.WriteDone(out.buffer, out.staged, out.file, detail="no space left"))
            return
        self.world.storage.write(out.directory, out.file, out.staged, payload)
        self.feed(f.WriteDone(out.buffer, out.staged, out.file, checksum="aa", seconds=0.1))

    def _push(self, out: f.PushToBuddy, payload: Payload | None) -> None:
        peer = self.world.nodes.get(out.node)
        if peer is None or not peer.alive or self.world.cut_off(self) or self.world.cut_off(peer):
            self.feed(f.PushDone(out.buffer, "the buddy cannot be reached"))
            return
        copy_id = peer.ask((self, out, payload))
        peer.feed(f.CopyOffered(copy_id, out.staged))

    def _fetch(self, out: f.FetchFromPeer, index: int) -> None:
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
        if peer is None or not peer.alive or self.world.cut_off(self) or self.world.cut_off(peer):
            self.world.after(0.05, lambda: self._fetch(out, index + 1))
            return
        request = peer.ask((self, out, index))
        peer.feed(f.PeerAsked(request, out.wanted.step, out.wanted.generation, out.wanted.shard))

    def ask(self, what: object) -> int:
        self._numbers += 1
        self._asked[self._numbers] = what
        return self._numbers

    def _peer_answer(self, answer: f.Output) -> None:
        world = self.world
        match answer:
            case f.AcceptCopy():
                origin, out, payload = self._asked.pop(answer.copy_id)
                self.contents[answer.buffer] = None
                world.after(
                    world.between(0.01, 0.05),
                    lambda: self._copied(answer, origin, out.buffer, payload),
                )
            case f.RefuseCopy():
                origin, out, _payload = self._asked.pop(answer.copy_id)
                origin.feed(f.PushDone(out.buffer, answer.detail))
            case f.ServePeer():
                asker, out, _index = self._asked.pop(answer.request_id)
                payload = self.contents.get(answer.buffer)
                world.after(
                    world.between(0.01, 0.05),
                    lambda: self._served(answer.request_id, asker, out, payload),
                )
            case f.RefusePeer():
                asker, out, index = self._asked.pop(answer.request_id)
                world.after(0.005, lambda: asker._fetch(out, index + 1))

    def _copied(self, answer: f.AcceptCopy, origin: SimNode, buffer: int, payload: object) -> None:
        ok = origin.alive and self.alive
        if ok:
            self.contents[answer.buffer] = payload  # type: ignore[assignment]
        self.feed(f.CopyDone(answer.copy_id, ok))
        origin.feed(f.PushDone(buffer, "" if self.alive else "the buddy went away"))

    def _served(
        self, request: int, asker: SimNode, out: f.FetchFromPeer, payload: Payload | None
    ) -> None:
        self.feed(f.ServeDone(request))
        worker = asker.workers.get((out.generation, out.rank))
        if worker is not None and asker.alive and self.alive:
            worker.received(worker_protocol.Shard(shard=out.wanted.shard, num_bytes=1), payload)
        elif worker is not None and asker.alive:
            worker.received(
                worker_protocol.NoShard(shard=out.wanted.shard, detail="the peer died"), None
            )

    # -- the link -----------------------------------------------------------------------------
    def dial(self) -> None:
        """Until it has a link, with back-off."""
        if not self.alive or self.link is not None:
            return
        self.link = self.world.connect(self)
        if self.link is None:
            self.world.after(self._backoff_s, self.dial)
            self._backoff_s = min(self._backoff_s * 2, limits.RECONNECT_MAX_S)
            return
        self._backoff_s = limits.RECONNECT_MIN_S
        facts = NodeFacts(
            hostname=self.name, address=f"ip-{self.name}", data_port=1, slots=self.slots
        )
        self._port += 1
        self.feed(f.LinkUp(facts, self._port))

    def link_down(self, link: Link) -> None:
        if self.link is link:
            self.link = None
            self.feed(f.LinkDown())
            self.world.after(self._backoff_s, self.dial)

    def die(self) -> None:
        """All processes and all memory of the node are gone, at once."""
        self.alive = False
        for worker in self.workers.values():
            if worker.alive:
                worker.alive = False
                worker.ready = False
                worker.gang.broken(worker)
        self.contents.clear()
