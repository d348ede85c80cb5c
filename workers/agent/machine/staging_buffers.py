"""Staging buffers: which may be written, and which must be kept. Pure bookkeeping, no memory.

A version is (generation, step). Kept are the two newest versions that are complete on this node,
newer ones that can still become complete, `agreed` ones (of the buddy tier, see copy_round.py), and
pinned ones (being uploaded, pushed or served). Two, because nodes may differ by one step at a
failure, and a restore needs the same step everywhere.

Where memory is short (`most`), a worker that waits for a buffer gets the older of the two: on other
nodes its step is complete by then, because all ranks have met in the collectives of the next one.

A buffer always belongs to the same slot, so that a fast worker cannot take the buffers that the
previous generation left to its neighbour. A slot is one local rank, or all that have the same shard
("twins"); it has the number of the lowest one.

Twins stage a shard together: one buffer for a step, of which each writes a part. A twin asks for
the buffer of a step when it stages that step, so twins need not stage the same steps: a step that
only some of them stage never becomes complete, and its buffer is free again as soon as none of them
writes it. Twins whose state is not the same (an optimizer that keeps a part of its state on each
rank, replicas that are averaged now and then) do not share buffers: each stages the whole shard.
Layouts of files tell it, and checksums of the same few bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import StagedShard

from .buffer_states import NOTHING, STEPS_KNOWN, Ask, Change, Differ, Filling, Slot
from .buffer_states import Give as Give
from .buffer_states import StagingBuffer as StagingBuffer
from .buffer_states import Version as Version
from .commands import FreeBuffer, MakeBuffer


def _last(steps: deque[int]) -> int:
    return steps[-1] if steps else -1


def _reached(slot: Slot, rank: int) -> int:
    """The last step that this twin stages or has staged."""
    ask = slot.asks.get(rank)
    return max(slot.newest.get(rank, -1), ask.step if ask is not None else -1)


def _give(buffer: StagingBuffer, slot: Slot, rank: int, ask: Ask) -> Give:
    if buffer.filling is None:
        buffer.filling = Filling(ask.step, ask.layout, set(slot.members))
    buffer.filling.writing.add(rank)
    is_known = rank in buffer.sharers
    buffer.sharers.add(rank)
    del slot.asks[rank]
    part = (slot.members.index(rank), len(slot.members))
    return Give(buffer.number, rank, buffer.num_bytes, is_known, *part)


class StagingBuffers:
    """All staging buffers of a node. Every change returns the buffers to give and to free."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.buffers: dict[int, StagingBuffer] = {}
        self.slots: dict[int, Slot] = {}
        self.agreed: frozenset[Version] = frozenset()
        """Versions that the buddy tier needs on all nodes."""
        self.most: int | None = None
        """Buffers of a slot that the node has memory for; None: not limited."""
        self._seats: dict[int, int] = {}
        """Generation -> its workers on this node."""
        self._slot_of: dict[int, int] = {}
        self._numbers = numbers
        self._restored: Version | None = None

    # -- generations --------------------------------------------------------------------------
    def launch(
        self, generation: int, slots: Sequence[tuple[int, ...]], restored: Version | None
    ) -> list[Change]:
        """A generation starts that resumes from `restored`: later steps are discarded. `slots`: the
        local ranks of each."""
        after_step = restored[1] if restored else -1
        self._restored = restored
        self.slots = {
            members[0]: Slot(generation, members, by_step=len(members) > 1) for members in slots
        }
        self._slot_of = {rank: members[0] for members in slots for rank in members}
        self._seats[generation] = len(self._slot_of)
        done: list[Change] = []
        for buffer in list(self.buffers.values()):
            self._take_back(buffer)
            if buffer.content is not None and buffer.content.step > after_step:
                buffer.content = None
            if buffer.slot not in self.slots and buffer.content is None and not buffer.pins:
                done.append(self.drop(buffer))
        present = {buffer.version[0] for buffer in self.buffers.values()}
        self._seats = {g: n for g, n in self._seats.items() if g in present or g == generation}
        return done

    def stop(self) -> None:
        """The workers have ended."""
        self.slots = {}
        for buffer in self.buffers.values():
            self._take_back(buffer)

    def _take_back(self, buffer: StagingBuffer) -> None:
        buffer.holder, buffer.writable, buffer.filling, buffer.sharers = 0, False, None, set()

    # -- workers ------------------------------------------------------------------------------
    def request(self, rank: int, num_bytes: int, shared: Ask | None = None) -> list[Change]:
        """A worker requests one more buffer. `shared`: it writes a part; of which step, or (-1)
        that there be buffers when it does. Without it, `separate_twins` comes before."""
        slot = self.slots[self.slot_of(rank)]
        if shared is None:
            slot.by_step = False
            slot.wanted.append(num_bytes)
        elif shared.step < 0:
            slot.reserve_bytes = max(slot.reserve_bytes, num_bytes)
            slot.early.add(rank)
        else:
            slot.asks[rank] = shared
        slot.requested = True
        return self.settle()

    def separate_twins(self, rank: int) -> bool:
        """A worker stages alone because its state is small, which all its twins do then. Whether
        they shared a slot until now."""
        members = self.slots[self.slot_of(rank)].members
        if len(members) > 1:
            self.separate(members[0])
        return len(members) > 1

    def wait(self, slot: int) -> list[Change]:
        """A worker cannot continue without a buffer."""
        self.slots[slot].waits = True
        return self.settle()

    def staged(self, rank: int, number: int, content: StagedShard, sample: int = 0) -> bool:
        """A worker has filled a buffer, or its part of one; whether the buffer is complete. The
        caller pins it if needed and calls `settle`. Raises ValueError when the worker may not write
        that buffer."""
        buffer, slot = self.buffers.get(number), self.slots[self.slot_of(rank)]
        if buffer is not None and buffer.filling is not None:
            if not self._staged_part(buffer, rank, content, sample):
                return False
        elif buffer is None or buffer.slot != rank or not buffer.writable:
            raise ValueError(f"buffer {number} is not writable by slot {rank}")
        else:
            buffer.content, buffer.writable, buffer.ranks = content, False, (rank,)
        slot.latest = buffer.version
        slot.steps.append(content.step)
        return True

    def returned(self, rank: int, number: int) -> list[Change]:
        """A twin has not staged its part of a buffer."""
        buffer = self.buffers.get(number)
        if buffer is not None and buffer.filling is not None:
            buffer.filling.writing.discard(rank)
        return self.settle()

    def separate(self, number: int) -> Differ:
        """Each twin of a slot has a slot of its own from now on."""
        before = self.slots.pop(number)
        for rank in before.members:
            asks = {rank: before.asks[rank]} if rank in before.asks else {}
            newest = {rank: before.newest.get(rank, -1)}
            self.slots[rank] = Slot(
                generation=before.generation,
                members=(rank,),
                by_step=True,
                asks=asks,
                reserve_bytes=before.reserve_bytes,
                newest=newest,
                latest=before.latest,
                steps=before.steps.copy(),
            )
            self._slot_of[rank] = rank
        before.asks = {}
        return Differ(before.members)

    # -- pins ---------------------------------------------------------------------------------
    def pin(self, number: int) -> None:
        self.buffers[number].pins += 1

    def unpin(self, number: int) -> list[Change]:
        buffer = self.buffers.get(number)
        if buffer is None:
            return []
        buffer.pins -= 1
        assert buffer.pins >= 0
        return self.settle()

    # -- queries ------------------------------------------------------------------------------
    def inventory(self) -> tuple[StagedShard, ...]:
        contents = {b.content for b in self.buffers.values() if b.content is not None}
        return tuple(sorted(contents, key=lambda s: (s.generation, s.step, s.shard)))

    def first_staged(self, wanted: int) -> tuple[int | None, bool]:
        """(first step >= `wanted` that a worker of this generation has staged, whether that is
        certain: earlier ones may be forgotten)."""
        steps = max((slot.steps for slot in self.slots.values()), key=_last, default=deque())
        step = next((at for at in steps if at >= wanted), None)
        return step, len(steps) < STEPS_KNOWN or steps[0] < wanted

    def newest_staged(self) -> int:
        return max((_last(slot.steps) for slot in self.slots.values()), default=-1)

    def slot_of(self, rank: int) -> int:
        """The slot of a local rank."""
        return self._slot_of.get(rank, rank)

    def has_staged(self, rank: int, key: Version) -> bool:
        """True if this is the newest version that the worker of this local rank has staged."""
        slot = self.slots.get(self.slot_of(rank))
        if slot is None or not slot.by_step:
            return slot is not None and slot.latest == key
        return (slot.generation, slot.newest.get(rank, -1)) == key

    def of_slot(self, slot: int) -> Iterator[StagingBuffer]:
        return (buffer for buffer in self.buffers.values() if buffer.slot == slot)

    def complete(self) -> list[Version]:
        """Versions that every worker of this node has staged, newest first."""
        count = Counter[Version]()
        for buffer in self.buffers.values():
            if buffer.content is not None:
                count[buffer.version] += len(buffer.ranks)
        # The restored version is complete over all nodes, even if this node has only a part.
        whole = [
            v for v, n in count.items() if v == self._restored or n >= self._seats.get(v[0], 1)
        ]
        return sorted(whole, reverse=True)

    # -- the rule -----------------------------------------------------------------------------
    def settle(self) -> list[Change]:
        """Release versions that need not be kept, then answer waiting requests."""
        self._discard_old()
        done: list[Change] = []
        for number, slot in list(self.slots.items()):
            if slot.by_step:
                done += self._settle_twins(number, slot)
                if number not in self.slots or self.slots[number] is not slot:
                    return [*done, *self.settle()]
                continue
            if slot.waits:
                done += self.make_room(number, slot)
            for buffer in list(self.of_slot(number)):
                if buffer.content is not None or buffer.pins or buffer.writable:
                    continue
                if buffer.holder == slot.generation:
                    buffer.writable, slot.waits = True, False
                    done.append(Give(buffer.number, number, buffer.num_bytes, sent=True))
            if not slot.wanted and self._stuck(number):
                slot.wanted.append(max(b.num_bytes for b in self.of_slot(number)))
            done += self._answer(number, slot)
        for buffer in list(self.buffers.values()):
            unused = not (buffer.content or buffer.pins or buffer.writable or buffer.filling)
            if unused and buffer.slot not in self.slots and self.slots:
                done.append(self.drop(buffer))
        return done

    def _answer(self, number: int, slot: Slot) -> list[Change]:
        done: list[Change] = []
        while slot.wanted and not self._too_early(number, slot):
            num_bytes = slot.wanted[0]
            fitting, dropped = self.fitting(number, num_bytes)
            done += dropped
            if fitting:
                buffer = min(fitting, key=lambda b: b.num_bytes)
            elif self._may_grow(number):
                done.append(new := self.make(number, num_bytes))
                buffer = self.buffers[new.buffer]
            else:
                break
            buffer.holder, buffer.writable, slot.waits = slot.generation, True, False
            slot.wanted.pop(0)
            done.append(Give(buffer.number, number, buffer.num_bytes, sent=False))
        return done

    def _too_early(self, number: int, slot: Slot) -> bool:
        """True until every worker has asked and the memory left is known: each gets one buffer
        until then, and more only if it cannot continue."""
        if self.knows_memory or slot.waits:
            return False
        return any(b.holder == slot.generation for b in self.of_slot(number))

    @property
    def knows_memory(self) -> bool:
        """True if the memory left for buffers is known."""
        return self.most is None or all(slot.requested for slot in self.slots.values())

    def fitting(self, number: int, num_bytes: int) -> tuple[list[StagingBuffer], list[Change]]:
        """Idle buffers of a slot that are large enough; smaller ones are freed."""
        unused = [b for b in self.of_slot(number) if b.is_idle]
        small: list[Change] = [self.drop(b) for b in unused if b.num_bytes < num_bytes]
        return [b for b in unused if b.num_bytes >= num_bytes], small

    def make(self, number: int, num_bytes: int) -> MakeBuffer:
        buffer = StagingBuffer(next(self._numbers), number, num_bytes)
        self.buffers[buffer.number] = buffer
        return MakeBuffer(buffer.number, num_bytes)

    def _may_grow(self, number: int) -> bool:
        owned = len(list(self.of_slot(number)))
        if self.most is not None and owned >= self.most:
            return False
        return owned < limits.STAGING_BUFFERS or self._stuck(number)

    def make_room(self, number: int, slot: Slot) -> list[Change]:
        """The worker of this slot waits, and there is no memory for one more buffer: the oldest
        step that it keeps is given up, but not the newest one that is complete."""
        owned = list(self.of_slot(number))
        if any(b.writable for b in owned):
            slot.waits = False  # its message and that buffer have crossed
        free = any(not (b.content or b.pins or b.filling) for b in owned)
        if not slot.waits or self.most is None or len(owned) < self.most or free:
            return []
        whole = self.complete()
        newest = whole[0] if whole else NOTHING
        spare = [b for b in owned if b.content and not (b.pins or self.is_agreed(b))]
        spare = [b for b in spare if self.most == 1 or b.version < newest]
        if not spare:
            return []
        oldest = min(spare, key=lambda b: b.version)
        oldest.content = None
        if len(owned) > self.most and not oldest.holder:
            return [self.drop(oldest), *self.make_room(number, slot)]
        if not (oldest.holder or slot.wanted or slot.by_step):
            slot.wanted.append(oldest.num_bytes)
        return []

    def _stuck(self, number: int) -> bool:
        """All buffers of a slot's worker are kept or pinned. Training must not wait for an upload,
        so the worker gets one more without a request; a new worker, which holds none yet, gets it
        on request. It may be an unused buffer of an earlier generation."""
        owned = list(self.of_slot(number))
        most = limits.STAGING_BUFFERS + len(self.agreed)
        return (
            (limits.STAGING_BUFFERS <= len(owned) <= most or any(b.is_idle for b in owned))
            and any(b.pins or self.is_agreed(b) for b in owned)
            and not any(b.writable for b in owned)
            and (any(b.holder for b in owned) or bool(self.slots[number].wanted))
        )

    def is_agreed(self, buffer: StagingBuffer) -> bool:
        return buffer.version in self.agreed

    def _discard_old(self) -> None:
        whole = self.complete()
        kept, newest = {*whole[:2], *self.agreed}, whole[0] if whole else NOTHING
        for buffer in self.buffers.values():
            if buffer.filling is not None:
                self._release(buffer)
            key = buffer.version
            if not (key in kept or (key > newest and self.may_complete(key))):
                buffer.content = None

    def may_complete(self, key: Version) -> bool:
        """True if each slot has staged this version or may still stage it."""
        for number, slot in self.slots.items():
            if slot.by_step:
                if not self._twins_may_complete(number, slot, key):
                    return False
                continue
            passed = slot.latest is not None and slot.latest >= key
            has = any(buffer.version == key for buffer in self.of_slot(number))
            if passed and not has:
                return False
        return True

    def drop(self, buffer: StagingBuffer) -> FreeBuffer:
        del self.buffers[buffer.number]
        return FreeBuffer(buffer.number)

    # -- twins --------------------------------------------------------------------------------
    def _staged_part(
        self, buffer: StagingBuffer, rank: int, content: StagedShard, sample: int
    ) -> bool:
        """A twin has written its part; whether the buffer is complete. Raises ValueError when the
        twin may not write that buffer."""
        filling = buffer.filling
        if filling is None or rank not in filling.writing or filling.step != content.step:
            raise ValueError(f"buffer {buffer.number} is not writable by slot {rank}")
        filling.writing.discard(rank)
        filling.waiting.discard(rank)
        slot = self.slots[self.slot_of(rank)]
        slot.newest[rank] = content.step
        filling.samples.add(sample)
        if len(filling.samples) > 1:
            filling.void = slot.differ = True
        if filling.waiting or filling.void:
            return False
        buffer.content, buffer.filling, buffer.ranks = content, None, slot.members
        return True

    def _release(self, buffer: StagingBuffer) -> None:
        """Free the buffer of a step that cannot become complete, once none writes it."""
        filling, slot = buffer.filling, self.slots.get(buffer.slot)
        if filling is None or slot is None:
            return
        filling.void = filling.void or any(
            _reached(slot, rank) > filling.step
            or (rank not in filling.writing and slot.newest.get(rank, -1) >= filling.step)
            for rank in filling.waiting
        )
        if filling.void and not filling.writing:
            buffer.filling = None

    def _twins_may_complete(self, number: int, slot: Slot, key: Version) -> bool:
        """True if the twins have staged this version or may still stage it."""
        late = set(slot.members)
        for buffer in self.of_slot(number):
            filling = buffer.filling
            if buffer.version == key:
                return True
            if filling is not None and not filling.void and filling.step == key[1]:
                late = filling.waiting
        return all((slot.generation, slot.newest.get(rank, -1)) < key for rank in late)

    def _settle_twins(self, number: int, slot: Slot) -> list[Change]:
        """Answer waiting requests, then allocate the buffers that will be needed."""
        if slot.differ:
            return [self._void_and_separate(number)]
        done: list[Change] = []
        for rank, ask in list(slot.asks.items()):
            buffer, changes = self._for_step(number, slot, rank, ask)
            done += changes
            if buffer is None and self.slots.get(number) is slot:
                slot.waits = True
                done += self.make_room(number, slot)
                slot.waits = False
                buffer, changes = self._for_step(number, slot, rank, ask)
                done += changes
            if self.slots.get(number) is not slot:
                return done  # it was separated
            if buffer is not None:
                done.append(_give(buffer, slot, rank, ask))
        if slot.reserve_bytes:
            _, small = self.fitting(number, slot.reserve_bytes)
            done += small
            wanted = limits.STAGING_BUFFERS if self.knows_memory else 1
            wanted = wanted if self.most is None else min(wanted, self.most)
            for _ in range(wanted - len(list(self.of_slot(number)))):
                done.append(self.make(number, slot.reserve_bytes))
        for rank in sorted(slot.early):
            for buffer in self.of_slot(number):
                if rank not in buffer.sharers and buffer.num_bytes >= slot.reserve_bytes:
                    buffer.sharers.add(rank)
                    done.append(Give(buffer.number, rank, buffer.num_bytes, False, 0, 0))
        return done

    def _for_step(
        self, number: int, slot: Slot, rank: int, ask: Ask
    ) -> tuple[StagingBuffer | None, list[Change]]:
        """The buffer of this step; None: the twin has to wait for one."""
        for buffer in self.of_slot(number):
            filling = buffer.filling
            if filling is None or filling.void or filling.step != ask.step:
                continue
            if rank not in filling.waiting or rank in filling.writing:
                continue
            if filling.layout != ask.layout or buffer.num_bytes < ask.num_bytes:
                return None, [self._void_and_separate(number)]
            return buffer, []
        slot.reserve_bytes = max(slot.reserve_bytes, ask.num_bytes)
        fitting, done = self.fitting(number, ask.num_bytes)
        if fitting:
            return min(fitting, key=lambda one: one.num_bytes), done
        if not self._twins_may_grow(number):
            return None, done
        new = self.make(number, ask.num_bytes)
        return self.buffers[new.buffer], [*done, new]

    def _void_and_separate(self, number: int) -> Change:
        """Drop what the twins are writing now, which does not become complete."""
        for buffer in self.of_slot(number):
            if buffer.filling is not None:
                buffer.filling.void = True
        return self.separate(number)

    def _twins_may_grow(self, number: int) -> bool:
        """Same as for one worker: one more for each upload and each step of the buddy tier."""
        owned = list(self.of_slot(number))
        if self.most is not None and len(owned) >= self.most:
            return False
        kept = any(buffer.pins or self.is_agreed(buffer) for buffer in owned)
        most = limits.STAGING_BUFFERS + (len(self.agreed) + 1 if kept else 0)
        return len(owned) < most
