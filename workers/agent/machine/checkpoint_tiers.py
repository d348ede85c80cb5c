"""The memory and storage tiers of one node, as the agent's machine sees them. Pure.

Owns: what is staged here, what is being written, pushed, fetched and served. Must not: touch memory
or files; it says what is to be done and hears how it went.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from holdfast.orchestrator.protocol.facts import ShardFile, StagedShard, WorkerSeat
from holdfast.orchestrator.protocol.manifest import directory_name, shard_file_name
from holdfast.orchestrator.protocol.messages import (
    Committed,
    Persist,
    Persisted,
    ShardPersistFailed,
)
from holdfast.workers import worker_protocol

from . import inputs as f
from . import outbound
from .generation import Generation
from .peer_copies import PeerCopies, PeerCopy
from .staging_buffers import Drop, Give, StagingBuffer, StagingBuffers, version

Key = tuple[int, int, int]
"""(generation, step, shard)."""


def key(staged: StagedShard) -> Key:
    return (staged.generation, staged.step, staged.shard)


class CheckpointTiers:
    """All state of training that this node keeps for others."""

    def __init__(self) -> None:
        numbers = itertools.count(1)
        self.buffers = StagingBuffers(numbers)
        self.copies = PeerCopies(numbers)
        self.unacknowledged: dict[Key, Persisted] = {}
        """Durable, but no Committed yet: told again to a controller that comes back."""
        self._written: set[Key] = set()
        self._writing: dict[int, Key] = {}
        """Slot -> the newest step of it that is being written to storage."""
        self._marks: dict[int, list[int]] = {}
        """Rank -> steps at or after which the next staged one is to be written."""
        self._pushing: dict[int, Key] = {}
        """Slot -> what is on its way to the buddy."""
        self._arriving: dict[int, int] = {}
        self._serving: dict[int, int] = {}

    # -- generations --------------------------------------------------------------------------
    def launch(self, group: Generation) -> list[f.Output]:
        self._marks = {}
        self._pushing = {}
        restore = group.membership.restore
        restored = (restore.generation, restore.step) if restore else None
        changes = self.buffers.launch(group.generation, len(group.workers), restored)
        freed = self.copies.abandon(group.after_step, group.generation)
        return [*self._carry_out(group, changes), *map(f.FreeBuffer, freed)]

    def stop(self) -> None:
        self._marks = {}
        self.buffers.stop()

    def inventory(self) -> tuple[StagedShard, ...]:
        return (*self.buffers.inventory(), *self.copies.inventory())

    def staged_step(self) -> int:
        whole = self.buffers.complete()
        return whole[0][1] if whole else -1

    # -- workers ------------------------------------------------------------------------------
    def request(self, group: Generation, seat: WorkerSeat, num_bytes: int) -> list[f.Output]:
        return self._carry_out(group, self.buffers.request(seat.local_rank, num_bytes))

    def staged(
        self, group: Generation, seat: WorkerSeat, message: worker_protocol.Staged
    ) -> list[f.Output]:
        shards = group.membership.mesh.num_shards
        content = StagedShard(message.step, group.generation, seat.shard, shards, message.num_bytes)
        slot = self.buffers.slots[seat.local_rank]
        before = slot.latest[1] if slot.latest else group.after_step
        try:
            self.buffers.staged(seat.local_rank, message.buffer, content)
        except ValueError as error:
            return [f.Note(f"rank {seat.rank} staged step {message.step}: {error}")]
        out: list[f.Output] = []
        ordered = self._ordered(seat, message.step)
        if ordered or (seat.persists and _on_modulo(group, before, message.step)):
            slow = self._writing.get(seat.local_rank)
            if ordered or slow is None:
                out += self._write(self.buffers.buffers[message.buffer])
            else:
                # Storage is slower than the cadence: pass this one over rather than stall training.
                detail = f"step {slow[1]} is still being written"
                out.append(self._cannot(group, seat, message.step, detail))
        out += self._push(group, seat.local_rank)
        return [*out, *self._carry_out(group, self.buffers.settle())]

    def finished(self, group: Generation, seat: WorkerSeat) -> list[f.Output]:
        """The loop is through: the last staged step becomes durable, modulo or not."""
        marks = self._marks.pop(seat.rank, [])
        if not seat.persists:
            return []
        newest = max(self._own(group, seat), key=lambda b: version(_content(b)), default=None)
        if newest is not None:
            return self._write(newest)
        return [self._cannot(group, seat, step, "the worker ended first") for step in marks]

    def fetch(self, group: Generation, rank: int, shard: int) -> list[f.Output]:
        restore = group.membership.restore
        if restore is None:
            return [self._no_shard(group, rank, shard, "this generation restores nothing")]
        found = self.buffers.find(restore.step, restore.generation, shard) or self.copies.find(
            restore.step, restore.generation, shard
        )
        if found is not None and found.content is not None:
            if found.content.num_shards == restore.num_shards:
                answer = worker_protocol.Shard(shard=shard, num_bytes=found.content.num_bytes)
                return [f.ToRank(group.generation, rank, answer, found.number)]
            return [self._no_shard(group, rank, shard, "it was staged by another mesh")]
        sources = tuple(source for source in restore.sources if source.shard == shard)
        if not sources:
            return [self._no_shard(group, rank, shard, "it is in no node's memory")]
        wanted = StagedShard(restore.step, restore.generation, shard, restore.num_shards, 0)
        return [f.FetchFromPeer(group.generation, rank, wanted, sources)]

    # -- storage ------------------------------------------------------------------------------
    def persist(self, group: Generation | None, order: Persist) -> list[f.Output]:
        """Write the first step >= order.step: on every node the same one. Where nothing of that
        generation runs any more, exactly that step."""
        if group is None or group.stopped:
            return self._persist_held(order)
        out: list[f.Output] = []
        for worker in group.workers.values():
            seat = worker.seat
            if not seat.persists:
                continue
            staged = [b for b in self._own(group, seat) if _content(b).step >= order.step]
            if staged:
                out += self._write(min(staged, key=lambda b: _content(b).step))
            elif not worker.ended:
                self._marks.setdefault(seat.rank, []).append(order.step)
            else:
                out.append(self._cannot(group, seat, order.step, "no such step is staged here"))
        return out

    def _persist_held(self, order: Persist) -> list[f.Output]:
        """Whatever memory holds of a step, whoever's seat it was, and buddy copies too. The
        controller asks as few nodes as it needs."""
        kept: list[StagingBuffer | PeerCopy] = [
            *self.buffers.buffers.values(), *self.copies.copies.values()
        ]  # fmt: skip
        wanted = (order.step, order.generation)
        held = [b for b in kept if b.content and (b.content.step, b.content.generation) == wanted]
        if not held:
            detail = f"step {order.step} of generation {order.generation} is not held here"
            return [f.Send(outbound.cannot_persist(order, detail))]
        # What was written before the order may have been refused then, as of an old generation.
        done = [self.unacknowledged.get(key(b.content)) for b in held if b.content]
        told = [f.Send(report) for report in done if report is not None]
        return [*told, *(output for buffer in held for output in self._write(buffer))]

    def save(self) -> list[f.Output]:
        """The node leaves and nobody says what with: write the newest step that it holds whole,
        unasked. It counts if a controller comes back in time to be told."""
        newest = next(iter(self.buffers.complete()), None)
        held = [b for b in self.buffers.buffers.values() if b.content]
        return [
            output
            for buffer in held
            if version(_content(buffer)) == newest
            for output in self._write(buffer)
        ]

    def write_done(self, group: Generation | None, done: f.WriteDone) -> list[f.Output]:
        copy = self.copies.copies.get(done.buffer)
        if copy is not None:
            copy.pins -= 1
        out = self._carry_out(group, self.buffers.unpin(done.buffer))
        staged = done.staged
        self._writing = {s: at for s, at in self._writing.items() if at != key(staged)}
        if done.detail:
            self._written.discard(key(staged))
            failed = ShardPersistFailed(
                generation=staged.generation,
                step=staged.step,
                shard=staged.shard,
                detail=done.detail,
            )
            return [*out, f.Send(failed)]
        report = Persisted(
            generation=staged.generation,
            shard=_shard_file(done),
            seconds=done.seconds,
        )
        self.unacknowledged[key(staged)] = report
        return [*out, f.Send(report)]

    def committed(self, message: Committed) -> None:
        """Nothing up to this commit is waited for any more."""
        self.unacknowledged = {
            at: report
            for at, report in self.unacknowledged.items()
            if at[:2] > (message.generation, message.step)
        }
        self._written = {at for at in self._written if at[0] >= message.generation}

    # -- other agents -------------------------------------------------------------------------
    def push_done(self, group: Generation | None, done: f.PushDone) -> list[f.Output]:
        out = self._carry_out(group, self.buffers.unpin(done.buffer))
        buffer = self.buffers.buffers.get(done.buffer)
        if buffer is not None:
            pushed = self._pushing.pop(buffer.slot, None)
            if pushed and group is not None and not done.detail:
                out += self._push(group, buffer.slot)
        return [*out, *([f.Note(f"buddy copy: {done.detail}")] if done.detail else [])]

    def copy_offered(self, generation: int, offer: f.CopyOffered) -> list[f.Output]:
        if offer.staged.generation < generation:
            detail = f"generation {offer.staged.generation} is over; {generation} runs here"
            return [f.RefuseCopy(offer.copy_id, detail)]
        number, fresh, freed = self.copies.begin(offer.staged)
        self._arriving[offer.copy_id] = number
        out: list[f.Output] = [f.FreeBuffer(old) for old in freed]
        if fresh:
            out.append(f.MakeBuffer(number, offer.staged.num_bytes))
        return [*out, f.AcceptCopy(offer.copy_id, number)]

    def copy_done(self, done: f.CopyDone) -> list[f.Output]:
        number = self._arriving.pop(done.copy_id, None)
        return [] if number is None else [*map(f.FreeBuffer, self.copies.end(number, done.ok))]

    def peer_asked(self, asked: f.PeerAsked) -> list[f.Output]:
        at = (asked.step, asked.generation, asked.shard)
        found = self.buffers.find(*at) or self.copies.find(*at)
        if found is None or found.content is None:
            detail = f"shard {asked.shard} of step {asked.step} is not in this node's memory"
            return [f.RefusePeer(asked.request_id, detail)]
        found.pins += 1
        self._serving[asked.request_id] = found.number
        return [f.ServePeer(asked.request_id, found.number, found.content)]

    def serve_done(self, group: Generation | None, done: f.ServeDone) -> list[f.Output]:
        number = self._serving.pop(done.request_id, None)
        if number is None:
            return []
        copy = self.copies.copies.get(number)
        if copy is not None:
            copy.pins -= 1
            return []
        return self._carry_out(group, self.buffers.unpin(number))

    # -- helpers ------------------------------------------------------------------------------
    def _ordered(self, seat: WorkerSeat, step: int) -> bool:
        """Whether a Persist waits for this step or an earlier one."""
        marks = self._marks.get(seat.rank, [])
        self._marks[seat.rank] = [mark for mark in marks if mark > step]
        return len(self._marks[seat.rank]) < len(marks)

    def _own(self, group: Generation, seat: WorkerSeat) -> list[StagingBuffer]:
        """What this generation's worker of that seat has staged."""
        return [
            buffer
            for buffer in self.buffers.of_slot(seat.local_rank)
            if buffer.content is not None and buffer.content.generation == group.generation
        ]

    def _write(self, buffer: StagingBuffer | PeerCopy) -> list[f.Output]:
        assert buffer.content is not None
        staged = buffer.content
        if key(staged) in self._written:
            return []
        self._written.add(key(staged))
        if isinstance(buffer, StagingBuffer):
            self._writing[buffer.slot] = key(staged)
        buffer.pins += 1
        directory = directory_name(staged.step, staged.generation)
        name = shard_file_name(staged.shard, staged.num_shards)
        return [f.WriteStorage(buffer.number, staged, directory, name)]

    def _push(self, group: Generation, slot: int) -> list[f.Output]:
        """One push at a time for each slot; steps staged meanwhile are passed over."""
        launch = group.launch
        if not launch.buddy or slot in self._pushing or group.stopped:
            return []
        seat = next(w.seat for w in group.workers.values() if w.seat.local_rank == slot)
        newest = max(self._own(group, seat), key=lambda b: version(_content(b)), default=None)
        if newest is None or newest.pushed == version(_content(newest)):
            return []
        newest.pushed = version(_content(newest))
        self._pushing[slot] = key(_content(newest))
        self.buffers.pin(newest.number)
        return [
            f.PushToBuddy(
                newest.number, _content(newest), launch.buddy, launch.buddy_address,
                launch.buddy_port,
            )
        ]  # fmt: skip

    def _carry_out(
        self, group: Generation | None, changes: Iterable[Give | Drop]
    ) -> list[f.Output]:
        out: list[f.Output] = []
        ranks = {w.seat.local_rank: r for r, w in group.workers.items()} if group else {}
        for change in changes:
            if isinstance(change, Drop):
                out.append(f.FreeBuffer(change.buffer))
                continue
            assert group is not None
            rank, number = ranks[change.slot], change.buffer
            if change.fresh:
                out.append(f.MakeBuffer(number, change.num_bytes))
            if change.known:
                out.append(
                    f.ToRank(group.generation, rank, worker_protocol.BufferFree(buffer=number))
                )
            else:
                given = worker_protocol.Buffer(buffer=number, num_bytes=change.num_bytes)
                out.append(f.ToRank(group.generation, rank, given, number))
        return out

    def _no_shard(self, group: Generation, rank: int, shard: int, detail: str) -> f.Output:
        return f.ToRank(group.generation, rank, worker_protocol.NoShard(shard=shard, detail=detail))

    def _cannot(self, group: Generation, seat: WorkerSeat, step: int, detail: str) -> f.Output:
        failed = ShardPersistFailed(
            generation=group.generation, step=step, shard=seat.shard, detail=detail, tried=False
        )
        return f.Send(failed)


def _on_modulo(group: Generation, before: int, step: int) -> bool:
    """Steps count from 0, so "every 10 steps" is after steps 9, 19, ...; a coarser staging writes
    the first staged step at or past the mark."""
    every = group.launch.persist_every_steps
    return every > 0 and (step + 1) // every > (before + 1) // every


def _content(buffer: StagingBuffer) -> StagedShard:
    assert buffer.content is not None
    return buffer.content


def _shard_file(done: f.WriteDone) -> ShardFile:
    staged = done.staged
    return ShardFile(
        step=staged.step,
        generation=staged.generation,
        shard=staged.shard,
        num_shards=staged.num_shards,
        file=done.file,
        num_bytes=staged.num_bytes,
        checksum=done.checksum,
    )
