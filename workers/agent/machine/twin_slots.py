"""Workers of a node with the same shard ("twins") stage it together: one buffer for a step, of
which each writes a part. Pure bookkeeping, no memory.

A twin asks for the buffer of a step when it stages that step, so twins need not stage the same
steps: a step that only some of them stage never becomes complete, and its buffer is free again as
soon as none of them writes it. Twins whose state is not the same (an optimizer that keeps a part of
its state on each rank, replicas that are averaged now and then) do not share buffers: each stages
the whole shard. Layouts of files tell it, and checksums of the same few bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import StagedShard

from .buffer_states import Ask, Change, Filling, Give, Make, Slot, StagingBuffer, Version

if TYPE_CHECKING:
    from .staging_buffers import StagingBuffers


def staged(
    held: StagingBuffers, buffer: StagingBuffer, rank: int, content: StagedShard, sample: int
) -> bool:
    """A twin has written its part; whether the buffer is complete. Raises ValueError when it may
    not write that buffer."""
    filling = buffer.filling
    if filling is None or rank not in filling.writing or filling.step != content.step:
        raise ValueError(f"buffer {buffer.number} is not writable by slot {rank}")
    filling.writing.discard(rank)
    filling.waiting.discard(rank)
    slot = held.slots[held.slot_of(rank)]
    slot.newest[rank] = content.step
    filling.samples.add(sample)
    if len(filling.samples) > 1:
        filling.void = slot.differ = True
    if filling.waiting or filling.void:
        return False
    buffer.content, buffer.filling, buffer.ranks = content, None, slot.members
    return True


def release(held: StagingBuffers, buffer: StagingBuffer) -> None:
    """Free the buffer of a step that cannot become complete, once none writes it."""
    filling, slot = buffer.filling, held.slots.get(buffer.slot)
    if filling is None or slot is None:
        return
    filling.void = filling.void or any(
        _reached(slot, rank) > filling.step
        or (rank not in filling.writing and slot.newest.get(rank, -1) >= filling.step)
        for rank in filling.waiting
    )
    if filling.void and not filling.writing:
        buffer.filling = None


def _reached(slot: Slot, rank: int) -> int:
    """The last step that this twin stages or has staged."""
    ask = slot.asks.get(rank)
    return max(slot.newest.get(rank, -1), ask.step if ask is not None else -1)


def may_complete(held: StagingBuffers, number: int, slot: Slot, key: Version) -> bool:
    """Whether the twins have staged this version or may still stage it."""
    late = set(slot.members)
    for buffer in held.of_slot(number):
        content, filling = buffer.content, buffer.filling
        if content is not None and (content.generation, content.step) == key:
            return True
        if filling is not None and not filling.void and filling.step == key[1]:
            late = filling.waiting
    return all((slot.generation, slot.newest.get(rank, -1)) < key for rank in late)


def settle(held: StagingBuffers, number: int, slot: Slot) -> list[Change]:
    """Answer waiting requests, then allocate the buffers that will be needed."""
    if slot.differ:
        return [_separate(held, number)]
    done: list[Change] = []
    for rank, ask in list(slot.asks.items()):
        buffer, changes = _for_step(held, number, slot, rank, ask)
        done += changes
        if buffer is None and held.slots.get(number) is slot:
            slot.waits = True
            done += held.make_room(number, slot)
            slot.waits = False
            buffer, changes = _for_step(held, number, slot, rank, ask)
            done += changes
        if held.slots.get(number) is not slot:
            return done  # it was separated
        if buffer is not None:
            done.append(_give(buffer, slot, rank, ask))
    if slot.reserve_bytes:
        _, small = held.fitting(number, slot.reserve_bytes)
        done += small
        wanted = limits.STAGING_BUFFERS if held.knows_memory else 1
        wanted = wanted if held.most is None else min(wanted, held.most)
        for _ in range(wanted - len(list(held.of_slot(number)))):
            done.append(_make(held, number, slot.reserve_bytes))
    for rank in sorted(slot.early):
        for buffer in held.of_slot(number):
            if rank not in buffer.known and buffer.num_bytes >= slot.reserve_bytes:
                buffer.known.add(rank)
                done.append(Give(buffer.number, rank, buffer.num_bytes, False, False, 0, 0))
    return done


def _for_step(
    held: StagingBuffers, number: int, slot: Slot, rank: int, ask: Ask
) -> tuple[StagingBuffer | None, list[Change]]:
    """The buffer of this step; None: the twin has to wait for one."""
    for buffer in held.of_slot(number):
        filling = buffer.filling
        if filling is None or filling.void or filling.step != ask.step:
            continue
        if rank not in filling.waiting or rank in filling.writing:
            continue
        if filling.layout != ask.layout or buffer.num_bytes < ask.num_bytes:
            return None, [_separate(held, number)]
        return buffer, []
    slot.reserve_bytes = max(slot.reserve_bytes, ask.num_bytes)
    found, done = held.fitting(number, ask.num_bytes)
    if found:
        return min(found, key=lambda one: one.num_bytes), done
    if not _may_grow(held, number):
        return None, done
    made = _make(held, number, ask.num_bytes)
    return held.buffers[made.buffer], [*done, made]


def _separate(held: StagingBuffers, number: int) -> Change:
    """What the twins are writing now does not become complete."""
    for buffer in held.of_slot(number):
        if buffer.filling is not None:
            buffer.filling.void = True
    return held.separate(number)


def _may_grow(held: StagingBuffers, number: int) -> bool:
    """As for one worker: one more for each upload and for each step that the buddy tier keeps."""
    owned = list(held.of_slot(number))
    if held.most is not None and len(owned) >= held.most:
        return False
    kept = any(buffer.pins or held.is_agreed(buffer) for buffer in owned)
    most = limits.STAGING_BUFFERS + (len(held.agreed) + 1 if kept else 0)
    return len(owned) < most


def _make(held: StagingBuffers, number: int, num_bytes: int) -> Make:
    return Make(held.make(number, num_bytes).number, num_bytes)


def _give(buffer: StagingBuffer, slot: Slot, rank: int, ask: Ask) -> Give:
    if buffer.filling is None:
        buffer.filling = Filling(ask.step, ask.layout, set(slot.members))
    buffer.filling.writing.add(rank)
    is_known = rank in buffer.known
    buffer.known.add(rank)
    del slot.asks[rank]
    part = (slot.members.index(rank), len(slot.members))
    return Give(buffer.number, rank, buffer.num_bytes, False, is_known, *part)
