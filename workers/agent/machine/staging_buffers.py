"""Which staging buffer may be written and which must be kept. Pure bookkeeping, no memory.

A version is (generation, step). Kept are the two newest versions that are complete on this node,
newer ones that can still become complete, `agreed` ones (of the buddy tier, see copy_round.py), and
pinned ones (being uploaded, pushed or served). Two, because nodes may differ by one step at a
failure, and a restore needs the same step everywhere.

Where memory is short (`most`), a worker that waits for a buffer gets the older of the two: on other
nodes its step is complete by then, because all ranks have met in the collectives of the next one.

A buffer always belongs to the same slot (local rank), so that a fast worker cannot take the buffers
that the previous generation left to its neighbour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import StagedShard

Version = tuple[int, int]
"""(generation, step); a later version compares greater."""
STEPS_KNOWN = 64
"""Staged steps remembered per slot. An order that names an older one is answered: too late."""


@dataclass
class StagingBuffer:
    number: int
    slot: int
    num_bytes: int
    holder: int = 0
    """Generation of the worker that has the descriptor; 0: none."""
    writable: bool = False
    """The holder may write it now."""
    content: StagedShard | None = None
    pins: int = 0


@dataclass
class Slot:
    """One local rank of the running generation."""

    generation: int = 0
    wanted: list[int] = field(default_factory=list)
    """Sizes of unanswered requests."""
    asked: bool = False
    """Its worker has requested buffers."""
    waits: bool = False
    """Its worker waits for a buffer."""
    latest: Version | None = None
    """Newest version that the worker of this generation has staged."""
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_KNOWN))
    """The last steps that it has staged, held or not."""


@dataclass(frozen=True)
class Give:
    """Give a buffer to the worker of its slot. `fresh`: it must be allocated first. `known`: the
    worker already has the descriptor."""

    buffer: int
    slot: int
    num_bytes: int
    fresh: bool
    known: bool


@dataclass(frozen=True)
class Drop:
    """Free the memory of a buffer."""

    buffer: int


def _idle(buffer: StagingBuffer) -> bool:
    """Empty, not pinned, and without a holder."""
    return buffer.content is None and not buffer.pins and not buffer.holder


def _last(steps: deque[int]) -> int:
    return steps[-1] if steps else -1


def version(staged: StagedShard) -> Version:
    return (staged.generation, staged.step)


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
        self._numbers = numbers
        self._restored: Version | None = None

    # -- generations --------------------------------------------------------------------------
    def launch(
        self, generation: int, num_slots: int, restored: Version | None
    ) -> list[Give | Drop]:
        """A generation starts that resumes from `restored`: later steps are discarded."""
        after_step = restored[1] if restored else -1
        self._restored = restored
        self.slots = {slot: Slot(generation) for slot in range(num_slots)}
        self._seats[generation] = num_slots
        done: list[Give | Drop] = []
        for buffer in list(self.buffers.values()):
            buffer.holder, buffer.writable = 0, False
            if buffer.content is not None and buffer.content.step > after_step:
                buffer.content = None
            if buffer.slot not in self.slots and buffer.content is None and not buffer.pins:
                done.append(self._drop(buffer))
        present = {version(b.content)[0] for b in self.buffers.values() if b.content}
        self._seats = {g: n for g, n in self._seats.items() if g in present or g == generation}
        return done

    def stop(self) -> None:
        """The workers have ended."""
        self.slots = {}
        for buffer in self.buffers.values():
            buffer.holder, buffer.writable = 0, False

    # -- workers ------------------------------------------------------------------------------
    def request(self, slot: int, num_bytes: int) -> list[Give | Drop]:
        """A worker requests one more buffer."""
        self.slots[slot].wanted.append(num_bytes)
        self.slots[slot].asked = True
        return self.settle()

    def wait(self, slot: int) -> list[Give | Drop]:
        """A worker cannot go on without a buffer."""
        self.slots[slot].waits = True
        return self.settle()

    def staged(self, slot: int, number: int, content: StagedShard) -> None:
        """A worker has filled a buffer. The caller pins it if needed and calls `settle`. Raises
        ValueError when the worker may not write that buffer."""
        buffer = self.buffers.get(number)
        if buffer is None or buffer.slot != slot or not buffer.writable:
            raise ValueError(f"buffer {number} is not writable by slot {slot}")
        buffer.content, buffer.writable = content, False
        self.slots[slot].latest = version(content)
        self.slots[slot].steps.append(content.step)

    # -- pins ---------------------------------------------------------------------------------
    def pin(self, number: int) -> None:
        self.buffers[number].pins += 1

    def unpin(self, number: int) -> list[Give | Drop]:
        buffer = self.buffers.get(number)
        if buffer is None:
            return []
        buffer.pins -= 1
        assert buffer.pins >= 0
        return self.settle()

    # -- queries ------------------------------------------------------------------------------
    def inventory(self) -> tuple[StagedShard, ...]:
        found = {b.content for b in self.buffers.values() if b.content is not None}
        return tuple(sorted(found, key=lambda s: (s.generation, s.step, s.shard)))

    def find(self, step: int, generation: int, shard: int) -> StagingBuffer | None:
        for buffer in self.buffers.values():
            held = buffer.content
            if held and (held.step, held.generation, held.shard) == (step, generation, shard):
                return buffer
        return None

    def first_staged(self, wanted: int) -> tuple[int | None, bool]:
        """(first step >= `wanted` that a worker of this generation has staged, whether that is
        certain: earlier ones may be forgotten)."""
        steps = max((slot.steps for slot in self.slots.values()), key=_last, default=deque())
        step = next((at for at in steps if at >= wanted), None)
        return step, len(steps) < STEPS_KNOWN or steps[0] < wanted

    def newest_staged(self) -> int:
        return max((_last(slot.steps) for slot in self.slots.values()), default=-1)

    def of_slot(self, slot: int) -> Iterator[StagingBuffer]:
        return (buffer for buffer in self.buffers.values() if buffer.slot == slot)

    def complete(self) -> list[Version]:
        """Versions that every worker of this node has staged, newest first."""
        count: dict[Version, int] = {}
        for buffer in self.buffers.values():
            if buffer.content is not None:
                key = version(buffer.content)
                count[key] = count.get(key, 0) + 1
        # The restored version is complete over all nodes, even if this node has only a part.
        whole = [
            v for v, n in count.items() if v == self._restored or n >= self._seats.get(v[0], 1)
        ]
        return sorted(whole, reverse=True)

    # -- the rule -----------------------------------------------------------------------------
    def settle(self) -> list[Give | Drop]:
        """Release versions that need not be kept, then answer waiting requests."""
        self._discard_old()
        done: list[Give | Drop] = []
        for number, slot in self.slots.items():
            if slot.waits:
                done += self._make_room(number, slot)
            for buffer in list(self.of_slot(number)):
                if buffer.content is not None or buffer.pins or buffer.writable:
                    continue
                if buffer.holder == slot.generation:
                    buffer.writable, slot.waits = True, False
                    done.append(Give(buffer.number, number, buffer.num_bytes, False, known=True))
            if not slot.wanted and self._stuck(number):
                slot.wanted.append(max(b.num_bytes for b in self.of_slot(number)))
            done += self._answer(number, slot)
        for buffer in list(self.buffers.values()):
            idle = buffer.content is None and not buffer.pins and not buffer.writable
            if idle and buffer.slot not in self.slots and self.slots:
                done.append(self._drop(buffer))
        return done

    def _answer(self, number: int, slot: Slot) -> list[Give | Drop]:
        done: list[Give | Drop] = []
        while slot.wanted and not self._too_early(number, slot):
            num_bytes = slot.wanted[0]
            idle = [b for b in self.of_slot(number) if _idle(b)]
            fitting = [b for b in idle if b.num_bytes >= num_bytes]
            for buffer in idle:
                if buffer not in fitting:
                    done.append(self._drop(buffer))
            if fitting:
                buffer, fresh = min(fitting, key=lambda b: b.num_bytes), False
            elif self._may_grow(number):
                buffer, fresh = StagingBuffer(next(self._numbers), number, num_bytes), True
                self.buffers[buffer.number] = buffer
            else:
                break
            buffer.holder, buffer.writable, slot.waits = slot.generation, True, False
            slot.wanted.pop(0)
            done.append(Give(buffer.number, number, buffer.num_bytes, fresh, known=False))
        return done

    def _too_early(self, number: int, slot: Slot) -> bool:
        """How much memory is left is known when every worker has asked: each gets one buffer until
        then, and more only if it cannot go on."""
        if self.most is None or slot.waits or all(one.asked for one in self.slots.values()):
            return False
        return any(b.holder == slot.generation for b in self.of_slot(number))

    def _may_grow(self, number: int) -> bool:
        owned = len(list(self.of_slot(number)))
        if self.most is not None and owned >= self.most:
            return False
        return owned < limits.STAGING_BUFFERS or self._stuck(number)

    def _make_room(self, number: int, slot: Slot) -> list[Give | Drop]:
        """The worker of this slot waits, and there is no memory for one more buffer: the oldest
        step that it keeps is given up, but not the newest one that is complete."""
        owned = list(self.of_slot(number))
        if any(b.writable for b in owned):
            slot.waits = False  # its message and that buffer have crossed
        free = any(b.content is None and not b.pins for b in owned)
        if not slot.waits or self.most is None or len(owned) < self.most or free:
            return []
        whole = self.complete()
        newest = whole[0] if whole else (0, -1)
        spare = [
            b
            for b in owned
            if b.content is not None and not b.pins and not self._is_agreed(b)
            and (self.most == 1 or version(b.content) < newest)
        ]  # fmt: skip
        if not spare:
            return []
        oldest = min(spare, key=lambda b: version(b.content) if b.content else (0, 0))
        oldest.content = None
        if len(owned) > self.most and not oldest.holder:
            return [self._drop(oldest), *self._make_room(number, slot)]
        if not oldest.holder and not slot.wanted:
            slot.wanted.append(oldest.num_bytes)
        return []

    def _stuck(self, number: int) -> bool:
        """All buffers of a slot's worker are kept or pinned. Training must not wait for an upload,
        so the worker gets one more without a request; a new worker, which holds none yet, gets it
        on request. It may be an unused buffer of an earlier generation."""
        owned = list(self.of_slot(number))
        most = limits.STAGING_BUFFERS + len(self.agreed)
        return (
            (limits.STAGING_BUFFERS <= len(owned) <= most or any(_idle(b) for b in owned))
            and any(b.pins or self._is_agreed(b) for b in owned)
            and not any(b.writable for b in owned)
            and (any(b.holder for b in owned) or bool(self.slots[number].wanted))
        )

    def _is_agreed(self, buffer: StagingBuffer) -> bool:
        return buffer.content is not None and version(buffer.content) in self.agreed

    def _discard_old(self) -> None:
        whole = self.complete()
        kept, newest = set(whole[:2]), whole[0] if whole else (0, -1)
        for buffer in self.buffers.values():
            if buffer.content is None:
                continue
            key = version(buffer.content)
            if key in kept or key in self.agreed or (key > newest and self.may_complete(key)):
                continue
            buffer.content = None

    def may_complete(self, key: Version) -> bool:
        """Whether each slot has staged this version or may still stage it."""
        for number, slot in self.slots.items():
            passed = slot.latest is not None and slot.latest >= key
            has = any(b.content and version(b.content) == key for b in self.of_slot(number))
            if passed and not has:
                return False
        return True

    def _drop(self, buffer: StagingBuffer) -> Drop:
        del self.buffers[buffer.number]
        return Drop(buffer.number)
