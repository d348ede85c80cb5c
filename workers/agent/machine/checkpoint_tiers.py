"""The memory and storage tiers of one node: what is staged, written, pushed, fetched and served.

Pure bookkeeping: memory and files are touched only by the commands that it returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from holdfast.orchestrator.protocol.facts import StagedShard, WorkerSeat, state_after
from holdfast.orchestrator.protocol.host_memory import too_little
from holdfast.orchestrator.protocol.manifest import directory_name, shard_file_name
from holdfast.orchestrator.protocol.messages import (
    AgentEvent,
    Committed,
    CopyStep,
    NodeMemoryPlanned,
    Persist,
    PersistFailed,
    ShardPersisted,
)
from holdfast.workers import worker_protocol

from . import commands, inputs
from .buffer_states import Ask, Change, Differ, Give, StagingBuffer, Version
from .commands import Command
from .copy_round import CopyRounds
from .generation import Generation, Worker
from .host_memory import MemoryPlan
from .peer_copies import PeerCopies, PeerCopy
from .staging_buffers import StagingBuffers

Key = tuple[int, int, int]
"""(generation, step, shard)."""


def key(staged: StagedShard) -> Key:
    return (staged.generation, staged.step, staged.shard)


class CheckpointTiers:
    """All training state in the memory of this node."""

    def __init__(self) -> None:
        numbers = itertools.count(1)
        self.buffers = StagingBuffers(numbers)
        self.copies = PeerCopies(numbers)
        self.rounds = CopyRounds()
        self.memory = MemoryPlan()
        self.unacknowledged: dict[Key, ShardPersisted] = {}
        """Durable, but not committed: sent again after a reconnect."""
        self._written: set[Key] = set()
        self._writing: dict[int, Key] = {}
        """Slot -> the newest step of it that is being written to storage."""
        self._marks: dict[int, list[int]] = {}
        """Rank -> requested steps: the first staged step at or after one is written."""
        self._pushing: dict[int, tuple[int, StagedShard]] = {}
        """Slot -> the buffer that this generation pushes to the buddy, and its content. A push of
        an earlier generation may still be under way beside it."""

    # -- generations --------------------------------------------------------------------------
    def launch(self, group: Generation) -> list[Command]:
        self._marks = {}
        self._pushing = {}
        restore = group.membership.restore
        restored = (restore.generation, restore.step) if restore else None
        self.rounds.launch(group)
        self.memory.launch()
        self._keep(group)
        slots = list(group.twins().values())
        changes = self.buffers.launch(group.generation, slots, restored)
        freed = self.copies.abandon(group.after_step, group.generation)
        return [*self._carry_out(group, changes), *map(commands.FreeBuffer, freed)]

    def stop(self) -> None:
        self._marks = {}
        self.rounds.stop()
        self.buffers.stop()

    def inventory(self) -> tuple[StagedShard, ...]:
        return (*self.buffers.inventory(), *self.copies.inventory())

    def staged_step(self) -> int:
        whole = self.buffers.complete()
        return whole[0][1] if whole else -1

    # -- workers ------------------------------------------------------------------------------
    def request(
        self, group: Generation, seat: WorkerSeat, asked: worker_protocol.BufferRequest
    ) -> list[Command]:
        num_bytes, planned = asked.num_bytes, []
        separated = not asked.shared and self.buffers.separate_twins(seat.local_rank)
        if asked.step < 0 or separated:
            planned = self._plan_memory(group, num_bytes)
        if self.buffers.most == 0 and self.memory.current is not None:
            refusal = worker_protocol.NoBuffer(detail=too_little(self.memory.current))
            return [*planned, commands.ToRank(group.generation, seat.rank, refusal)]
        shared = Ask(asked.step, asked.layout, num_bytes) if asked.shared else None
        num_slots = len(self.buffers.slots)
        changes = self.buffers.request(seat.local_rank, num_bytes, shared)
        if len(self.buffers.slots) > num_slots:  # twins that do not share need more memory
            planned += self._plan_memory(group, num_bytes)
        return [*planned, *self._carry_out(group, changes)]

    def without_buffer(
        self,
        group: Generation,
        seat: WorkerSeat,
        message: worker_protocol.BufferWanted | worker_protocol.BufferReturned,
    ) -> list[Command]:
        """A worker cannot continue without a buffer, or a twin has not staged its part of one."""
        if isinstance(message, worker_protocol.BufferReturned):
            changes = self.buffers.returned(seat.local_rank, message.buffer)
        else:
            changes = self.buffers.wait(self.buffers.slot_of(seat.local_rank))
        return self._carry_out(group, changes)

    def _plan_memory(self, group: Generation, num_bytes: int) -> list[Command]:
        """Plan what this node can hold, before it holds more."""
        memory = self.memory.plan(group, num_bytes, len(self.buffers.slots))
        if memory is None:
            return []
        self.buffers.most = memory.grant.buffers
        out: list[Command] = []
        if not memory.grant.buddy:
            self.rounds.give_up()
            self._keep(group)
            out += self._release_copies(group)
        report = self.memory.unreported()
        if report is not None:
            message = NodeMemoryPlanned(generation=group.generation, memory=report)
            out.append(commands.Send(message))
        return out

    def _release_copies(self, group: Generation) -> list[Command]:
        """Release older copies; those that the generation began with stay until it has staged."""
        restore = group.membership.restore
        kept = (restore.generation, restore.step) if restore else None
        newest = next(iter(self.buffers.complete()), None)
        if newest is not None and newest[0] == group.generation:
            kept = None
        return [commands.FreeBuffer(old) for old in self.copies.release(kept)]

    def staged(
        self, group: Generation, seat: WorkerSeat, message: worker_protocol.Staged
    ) -> list[Command]:
        shards = group.membership.mesh.num_shards
        content = StagedShard(message.step, group.generation, seat.shard, shards, message.num_bytes)
        number = self.buffers.slot_of(seat.local_rank)
        slot = self.buffers.slots[number]
        before = slot.latest[1] if slot.latest else group.after_step
        try:
            place = (seat.local_rank, message.buffer)
            complete = self.buffers.staged(*place, content, message.sample)
        except ValueError as error:
            return [commands.Note(f"rank {seat.rank} staged {state_after(message.step)}: {error}")]
        if not complete:
            return self._carry_out(group, self.buffers.settle())
        out: list[Command] = []
        seats = [worker.seat for worker in self._slot_workers(group, seat)]
        if len(seats) > 1:
            out.append(commands.SealBuffer(message.buffer))
        requested = [twin for twin in seats if self._requested(twin, message.step)]
        persists = any(twin.persists for twin in seats)
        if requested or (persists and _is_due(group, before, message.step)):
            slow = self._writing.get(number)
            if requested or slow is None:
                out += self._write(self.buffers.buffers[message.buffer])
            else:
                # Storage is slower than the interval: skip this step rather than stall training.
                detail = f"{state_after(slow[1])} is still being written"
                out.append(_cannot_persist(group.generation, message.step, seat.shard, detail))
        out += self._follow_round(group)
        out += self._carry_out(group, self.buffers.settle())
        if self.copies.copies and self.memory.current and not self.memory.current.grant.buddy:
            out += self._release_copies(group)
        return out

    def finished(self, group: Generation, seat: WorkerSeat) -> list[Command]:
        """The training loop is complete: persist the last staged step, whatever the interval. Of
        twins, when all have staged their part of it."""
        twins = self._slot_workers(group, seat)
        if not all(worker.finished or worker.ended for worker in twins):
            return []
        keepers = [worker.seat for worker in twins if worker.seat.persists]
        return [command for twin in keepers for command in self._write_last(group, twin)]

    def _write_last(self, group: Generation, seat: WorkerSeat) -> list[Command]:
        marks = self._marks.pop(seat.rank, [])
        newest = max(self._own(group, seat), key=lambda buffer: buffer.version, default=None)
        if newest is not None:
            return self._write(newest)
        detail = "the worker ended first"
        return [_cannot_persist(group.generation, step, seat.shard, detail) for step in marks]

    def fetch(self, group: Generation, rank: int, shard: int) -> list[Command]:
        restore = group.membership.restore
        if restore is None:
            return [_no_shard(group, rank, shard, "this generation restores nothing")]
        buffer = self._find(restore.step, restore.generation, shard)
        if buffer is not None and buffer.content is not None:
            if buffer.content.num_shards == restore.num_shards:
                answer = worker_protocol.Shard(shard=shard, num_bytes=buffer.content.num_bytes)
                return [commands.ToRank(group.generation, rank, answer, buffer.number)]
            return [_no_shard(group, rank, shard, "it was staged by another mesh")]
        sources = tuple(source for source in restore.sources if source.shard == shard)
        if not sources:
            return [_no_shard(group, rank, shard, "it is in no node's memory")]
        # The replicas of a shard begin at different nodes, and so do the ranks of a node.
        replica = group.membership.mesh.coordinates(rank)["replicate"]
        first = (replica + shard) % len(sources)
        sources = sources[first:] + sources[:first]
        wanted = StagedShard(restore.step, restore.generation, shard, restore.num_shards, 0)
        # On another mesh a rank may need any shard, and it is not known which.
        own = restore.num_shards == group.membership.mesh.num_shards
        twins = sum(worker.seat.shard == shard for worker in group.workers.values()) if own else 1
        return [commands.FetchFromPeer(group.generation, rank, wanted, sources, max(1, twins))]

    # -- storage ------------------------------------------------------------------------------
    def persist(self, group: Generation | None, order: Persist) -> list[Command]:
        """Write the first step >= order.step, which is the same on every node. If that generation
        does not run any more, write exactly that step."""
        if group is None or group.stopped:
            return self._persist_held(order)
        out: list[Command] = []
        for worker in group.workers.values():
            seat = worker.seat
            if not seat.persists:
                continue
            staged = [b for b in self._own(group, seat) if b.version[1] >= order.step]
            if staged:
                out += self._write(min(staged, key=lambda buffer: buffer.version))
            elif not worker.ended:
                self._marks.setdefault(seat.rank, []).append(order.step)
            else:
                detail = "no such step is staged here"
                out.append(_cannot_persist(group.generation, order.step, seat.shard, detail))
        return out

    def _persist_held(self, order: Persist) -> list[Command]:
        """Write all shards of a step in memory, of any rank, and buddy copies too. The controller
        requests this of as few nodes as it needs."""
        wanted = (order.generation, order.step)
        held = [buffer for buffer in self._all() if buffer.version == wanted]
        if not held:
            detail = f"{state_after(order.step)} of generation {order.generation} is not held here"
            return [_cannot_persist(order.generation, order.step, -1, detail)]
        # The controller may have refused an earlier report as one of an old generation.
        done = [self.unacknowledged.get(key(b.content)) for b in held if b.content]
        reports = [commands.Send(report) for report in done if report is not None]
        return [*reports, *(command for buffer in held for command in self._write(buffer))]

    def save(self) -> list[Command]:
        """The node will be taken away and has no controller: write the newest complete step. It
        counts if a controller reconnects in time to get the report."""
        newest = next(iter(self.buffers.complete()), None)
        held = [b for b in self.buffers.buffers.values() if b.version == newest]
        return [command for buffer in held for command in self._write(buffer)]

    def save_last(self, group: Generation | None) -> list[Command]:
        """No controller will return: write the two newest complete steps, of which every node has
        one in common, also those whose report no controller has acknowledged."""
        own = None
        if group is not None:
            keepers = [w.seat for w in group.workers.values() if w.seat.persists]
            own = {self.buffers.slot_of(seat.local_rank) for seat in keepers}
        last = list(self.buffers.complete())[:2]
        out: list[Command] = []
        for buffer in self.buffers.buffers.values():
            if buffer.content is None or buffer.version not in last:
                continue
            at = key(buffer.content)
            is_known = at in self._written and at not in self.unacknowledged
            is_written = is_known or at in self._writing.values()
            if not is_written and (own is None or buffer.slot in own):
                self._written.discard(at)
                out += self._write(buffer)
        return out

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    def write_done(self, group: Generation | None, done: inputs.WriteDone) -> list[Command]:
        out = self.unpin(group, done.buffer)
        staged = done.staged
        self._writing = {s: at for s, at in self._writing.items() if at != key(staged)}
        if done.detail:
            self._written.discard(key(staged))
            failed = PersistFailed(
                generation=staged.generation,
                step=staged.step,
                shard=staged.shard,
                detail=done.detail,
            )
            return [*out, commands.Send(failed)]
        file = staged.written(done.file, done.checksum, done.coverage)
        report = ShardPersisted(generation=staged.generation, shard=file, seconds=done.seconds)
        self.unacknowledged[key(staged)] = report
        return [*out, commands.Send(report)]

    def committed(self, message: Committed) -> None:
        """Forget the reports up to this commit."""
        self.unacknowledged = {
            at: report
            for at, report in self.unacknowledged.items()
            if at[:2] > (message.generation, message.step)
        }
        self._written = {at for at in self._written if at[0] >= message.generation}

    # -- other agents -------------------------------------------------------------------------
    def push_done(self, group: Generation | None, done: inputs.PushDone) -> list[Command]:
        out = self.unpin(group, done.buffer)
        buffer = self.buffers.buffers.get(done.buffer)
        if buffer is not None:
            number, staged = self._pushing.get(buffer.slot, (None, None))
            if staged is not None and number == done.buffer:
                del self._pushing[buffer.slot]
                if group is not None and not group.stopped:
                    report = self.rounds.pushed(group, self.buffers, buffer.slot, staged, done)
                    out += [commands.Send(report)] if report is not None else []
                    out += self._follow_round(group)
                    out += self._carry_out(group, self.buffers.settle())
        return [*out, *([commands.Note(f"buddy copy: {done.detail}")] if done.detail else [])]

    def copy_step(self, group: Generation | None, order: CopyStep) -> list[Command]:
        """The next step of the buddy tier; and what is confirmed need not be kept any longer."""
        if group is None or group.stopped:
            return []
        begun = self.rounds.order(group, order)
        self._keep(group)
        out = self._follow_round(group)
        last = self.rounds.report
        if not begun and last is not None and last.wanted >= order.step:
            out += [commands.Send(last)]
        return [*out, *self._carry_out(group, self.buffers.settle())]

    def accept_copy(
        self, group: Generation | None, staged: StagedShard, confirmed: int
    ) -> tuple[int | str, list[Command]]:
        """(buffer, or why the copy is refused; commands before its use)."""
        running = group.generation if group is not None else 0
        if staged.generation < running:
            return f"generation {staged.generation} is over; {running} runs here", []
        out: list[Command] = []
        if group is not None and staged.generation == running:
            if self.memory.current is None:  # its workers have not asked for buffers yet
                out = self._plan_memory(group, staged.num_bytes)
            if self.memory.current is not None and not self.memory.current.grant.buddy:
                return "it has no memory for copies", out
            # The order that confirmed it may not have reached this node.
            self.rounds.raise_confirmed((running, confirmed))
            self._keep(group)
        number, fresh, freed = self.copies.begin(staged)
        out += [commands.FreeBuffer(old) for old in freed]
        if fresh:
            out.append(commands.MakeBuffer(number, staged.num_bytes))
        return number, out

    def copy_done(self, done: inputs.CopyDone) -> list[Command]:
        return [commands.FreeBuffer(old) for old in self.copies.end(done.buffer, done.ok)]

    def lend(self, step: int, generation: int, shard: int) -> tuple[int, StagedShard] | None:
        """(buffer, content) of a shard in memory, kept until ServeDone; None: it is not here."""
        buffer = self._find(step, generation, shard)
        if buffer is None or buffer.content is None:
            return None
        buffer.pins += 1
        return buffer.number, buffer.content

    def unpin(self, group: Generation | None, number: int) -> list[Command]:
        """A transfer of this buffer is over."""
        copy = self.copies.copies.get(number)
        if copy is not None:
            copy.pins -= 1
        return self._carry_out(group, self.buffers.unpin(number))

    # -- helpers ------------------------------------------------------------------------------
    def _all(self) -> list[StagingBuffer | PeerCopy]:
        return [*self.buffers.buffers.values(), *self.copies.copies.values()]

    def _find(self, *wanted: int) -> StagingBuffer | PeerCopy | None:
        """`wanted`: step, generation and shard."""
        for buffer in self._all():
            held = buffer.content
            if held and (held.step, held.generation, held.shard) == wanted:
                return buffer
        return None

    def _requested(self, seat: WorkerSeat, step: int) -> bool:
        """True if a Persist waits for this step or for an earlier one."""
        marks = self._marks.get(seat.rank, [])
        self._marks[seat.rank] = [mark for mark in marks if mark > step]
        return len(self._marks[seat.rank]) < len(marks)

    def _slot_workers(self, group: Generation, seat: WorkerSeat) -> list[Worker]:
        """The worker of a seat, and those that share its buffers."""
        slot = self.buffers.slot_of(seat.local_rank)
        workers = group.workers.values()
        return [w for w in workers if self.buffers.slot_of(w.seat.local_rank) == slot]

    def _own(self, group: Generation, seat: WorkerSeat) -> list[StagingBuffer]:
        """Buffers that this generation's worker of that seat has staged."""
        own = self.buffers.of_slot(self.buffers.slot_of(seat.local_rank))
        return [buffer for buffer in own if buffer.version[0] == group.generation]

    def _write(self, buffer: StagingBuffer | PeerCopy) -> list[Command]:
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
        return [commands.WriteStorage(buffer.number, staged, directory, name)]

    def _keep(self, group: Generation) -> None:
        self.buffers.agreed = self.rounds.kept(group)
        self.copies.confirmed = self.rounds.confirmed

    def _follow_round(self, group: Generation) -> list[Command]:
        """Push the step of the round from every slot that holds it."""
        missed = self.rounds.choose(group, self.buffers)
        self._keep(group)
        if missed is not None:
            return [commands.Send(missed)]
        current = self.rounds.current
        if current is None or current.step is None or group.stopped:
            return []
        out: list[Command] = []
        for slot in sorted(current.waiting):
            if slot not in self._pushing:
                out += self._push(group, slot, (group.generation, current.step))
        return out

    def _push(self, group: Generation, slot: int, wanted: Version) -> list[Command]:
        buffer = next((b for b in self.buffers.of_slot(slot) if b.version == wanted), None)
        if buffer is None or buffer.content is None:
            return []  # it is staged a moment later
        staged, launch = buffer.content, group.launch
        self._pushing[slot] = (buffer.number, staged)
        self.buffers.pin(buffer.number)
        return [
            commands.PushToBuddy(
                buffer=buffer.number,
                staged=staged,
                node=launch.buddy,
                address=launch.buddy_address,
                port=launch.buddy_port,
                confirmed=self.rounds.confirmed_step(group),
            )
        ]

    def _carry_out(self, group: Generation | None, changes: Iterable[Change]) -> list[Command]:
        out: list[Command] = []
        ranks = {w.seat.local_rank: r for r, w in group.workers.items()} if group else {}
        for change in changes:
            if isinstance(change, Differ):
                text = _differ_text([ranks[rank] for rank in change.ranks])
                out.append(commands.Send(AgentEvent(text=text)))
            elif isinstance(change, Give):
                assert group is not None
                out.append(_given(group.generation, ranks[change.slot], change))
            else:
                out.append(change)
        return out


def _given(generation: int, rank: int, give: Give) -> Command:
    part = {"part": give.part, "parts": give.parts}
    if give.sent:
        free = worker_protocol.BufferFree(buffer=give.buffer, **part)
        return commands.ToRank(generation, rank, free)
    buffer = worker_protocol.Buffer(buffer=give.buffer, num_bytes=give.num_bytes, **part)
    return commands.ToRank(generation, rank, buffer, give.buffer)


def _no_shard(group: Generation, rank: int, shard: int, detail: str) -> Command:
    message = worker_protocol.NoShard(shard=shard, detail=detail)
    return commands.ToRank(group.generation, rank, message)


def _cannot_persist(generation: int, step: int, shard: int, detail: str) -> Command:
    message = PersistFailed(
        generation=generation, step=step, shard=shard, detail=detail, tried=False
    )
    return commands.Send(message)


def _is_due(group: Generation, before: int, step: int) -> bool:
    """Steps count from 0, so "every 10 steps" is after steps 9, 19, ...; if not every step is
    staged, the first staged one at or after such a step."""
    interval = group.launch.persist_every_steps
    return interval > 0 and (step + 1) // interval > (before + 1) // interval


def _differ_text(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return (
        f"memory: ranks {listed} have one shard index and different state; each stages all of "
        "its own, which takes as many times the memory"
    )
