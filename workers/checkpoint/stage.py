"""Staging: copies this rank's training state into a staging buffer of the agent. It is the only
part of a checkpoint that delays the training loop.

On the CPU the training thread copies and hashes in one pass. On CUDA the buffers are page-locked
and the copy runs on its own stream, beside the next forward and backward; the next optimizer step
waits for it, and a thread hashes and reports when it is complete (async_copy.py). The model's
buffers are copied first, and the next forward, which may write them, waits for those only.

A parameter with requires_grad False (the base of a LoRA) is copied to each buffer once, then only
compared: on the CPU by its checksum, on a device by the sum of its bits. Each staged file is whole.

Of a shard that several ranks of the node hold, each stages a part (twin_parts.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.orchestrator.errors import UserError, few
from holdfast.orchestrator.protocol.facts import steps_done

from .async_copy import AsyncCopier, CopiedTensor, CopySet
from .device import CudaDevice, PageLocks
from .layout import (
    MODEL,
    Bytes,
    Entry,
    Layout,
    copy_and_hash,
    encode_extra,
    hash_bytes,
    make_layout,
)
from .state import TrainingState
from .tensors import storage_type
from .twin_parts import SAMPLE_ROOM, WritableBuffer, divide, sample

_SLACK_BYTES = 64 * 1024
"""Room for extra state that grows: buffers are requested once and keep their size."""


class BufferSource(Protocol):
    """Provides staging buffers; the agent does, over the worker's socket."""

    def prepare_with(self, prepare: Callable[[Bytes], None]) -> None:
        """Call `prepare` with the memory of each buffer, in another thread, before it is taken."""

    def request_buffers(self, num_bytes: int) -> None:
        """Request all buffers with a new size, without waiting."""

    def take_buffer(self, step: int, num_bytes: int, layout: int) -> WritableBuffer:
        """Wait for a free buffer of at least this size, for a file of this step whose layout has
        this digest."""

    def staged(self, buffer: int, step: int, num_bytes: int, sample: int = 0) -> None:
        """Report that the buffer is complete, with the checksum of what twins compare."""

    def put_back(self, buffer: int) -> None:
        """The buffer holds nothing and may be taken again. Called in any thread."""


class _StagedPart:
    """One rank's part of the file of a layout: its entries, in the order of the layout."""

    def __init__(
        self,
        layout: Layout,
        tensors: list[Tensor],
        owners: list[Tensor],
        may_differ: frozenset[str],
        part: int,
        parts: int,
    ) -> None:
        """Tensors named in `may_differ` (batch norm statistics) are not the same on twins: the
        first one stages all of them."""
        self.layout, self.whole = layout, parts == 1
        self.indices = indices = divide(layout.entries, parts, may_differ)[part]
        self.names = [layout.entries[index].name for index in indices]
        self.tensors = [tensors[index] for index in indices]
        self.owners = [owners[index] for index in indices]
        self.header_ranges = layout.header_ranges(indices, first=part == 0)
        self._sample: tuple[int, int] | None = None
        """Place in the buffer of the bytes that twins compare; their tensor is the last one."""
        at = sample(layout.entries, may_differ) if parts > 1 else None
        if at is not None and tensors[at].is_contiguous():
            room = SAMPLE_ROOM // parts
            self.names.append(layout.entries[at].name)
            self.tensors.append(tensors[at].reshape(-1).view(torch.uint8)[:room])
            self.owners.append(owners[at])
            begin = layout.num_bytes + part * room
            self._sample = (begin, begin + self.tensors[-1].numel())
        self.sources: list[Bytes | None] = []
        """The tensors' memory, on the CPU."""

    def positions(self, numbers: Iterable[int]) -> list[int]:
        """Positions in the lists of these entries' tensors; others' entries have none."""
        places = {number: place for place, number in enumerate(self.indices)}
        return [places[number] for number in numbers if number in places]

    def find_sources(self) -> None:
        # Flattening copies a tensor that is not contiguous, so it is done at every staging.
        self.sources = [flat_bytes(t) if t.is_contiguous() else None for t in self.tensors]

    def targets(self, view: Bytes) -> list[Bytes]:
        """The piece of a buffer for each tensor."""
        at, entries = self.layout.data_start, self.layout.entries
        ranges = [(at + entries[i].begin, at + entries[i].end) for i in self.indices]
        ranges += [self._sample] if self._sample is not None else []
        return [view[begin:end] for begin, end in ranges]

    def complete(
        self, buffers: BufferSource, buffer: WritableBuffer, step: int, extra: bytes,
        checksums: list[int],
    ) -> None:  # fmt: skip
        """Write the header, and report the buffer with the checksum of what twins compare."""
        if self.whole:
            header = self.layout.render(step, checksums, extra)
        else:
            numbers = dict(zip(self.indices, checksums, strict=False))
            header = self.layout.render_part(step, numbers, extra)
        for begin, end in self.header_ranges:
            buffer.memory[begin:end] = header[begin:end]
        compared = 0 if self._sample is None else checksums[-1]
        buffers.staged(buffer.number, step, self.layout.num_bytes, compared)


class Stager:
    """Stages one TrainingState, step after step, into the same few buffers."""

    def __init__(
        self,
        state: TrainingState,
        buffers: BufferSource,
        *,
        generation: int,
        shard: int,
        num_shards: int,
        device: torch.device | CudaDevice,
    ) -> None:
        self._state, self._buffers = state, buffers
        self._identity = {"generation": generation, "shard": shard, "num_shards": num_shards}
        self._layout: Layout | None = None
        self._capacity = 0
        self._addresses: list[int] = []
        self._tensors: list[Tensor] = []
        """Tensors in the order of the layout, like their owners."""
        self._owners: list[Tensor] = []
        self._parts: dict[tuple[int, int], _StagedPart] = {}
        """(part, parts) -> what is staged."""
        self._targets: dict[WritableBuffer, list[Bytes]] = {}
        """The piece of the buffer's memory for each tensor."""
        self._buffer_names = state.buffers()
        self._urgent = set(self._buffer_names)
        """Names of tensors that are written between two optimizer steps: what follows waits for
        their copy. Also those whose write was found once."""
        self.num_thrown_away = 0
        """Copies that were written meanwhile."""
        self._device = _with_memory_of_its_own(device)
        self._copier = (
            AsyncCopier(self._device, state.before_each_step) if self._device is not None else None
        )
        self._copies: dict[WritableBuffer, CopySet] = {}
        self._parameters: list[tuple[int, str, Tensor]] = []
        """Entries that are parameters: (number in the layout, name, parameter)."""
        self._frozen: tuple[int, ...] = ()
        """Entries of the layout whose parameters are not trained now."""
        self._not_frozen: set[str] = set()
        """Names of parameters without a gradient that a later step has changed."""
        self._held: dict[WritableBuffer, dict[int, _Held]] = {}
        """Buffer -> frozen tensors that it has, by their place in the part."""
        if self._device is not None:
            buffers.prepare_with(PageLocks(self._device))
        self._on_cpu_s = 0.0

    @property
    def copy_s(self) -> float:
        """Time of the last copy from the device."""
        return self._copier.copy_s if self._copier is not None else 0.0

    @property
    def staging_s(self) -> float:
        """Time from the beginning of the last staging to its end."""
        return self._copier.staging_s if self._copier is not None else self._on_cpu_s

    def prepare(self) -> None:
        """Requests buffers before the first staging if the state already has its full size."""
        if self._state.has_full_size:
            self._plan(encode_extra(self._state.export_extra()))

    def stage(self, step: int) -> float:
        """Copies the state after `step`; returns the seconds that it delayed the training loop."""
        begin = time.perf_counter()
        self.finish()
        self._state.collect(step)
        extra = encode_extra(self._state.export_extra())
        moved = self._state.addresses() != self._addresses
        if self._layout is None or moved or not self._layout.fits(extra):
            self._plan(extra)
        layout = self._layout
        assert layout is not None
        self._find_frozen()
        buffer = self._buffers.take_buffer(step, self._capacity, layout.digest)
        part = self._part(layout, buffer)
        targets = self._targets.get(buffer)
        if targets is None:
            view = np.frombuffer(buffer.memory, dtype=np.uint8)
            targets = self._targets[buffer] = part.targets(view)
        if self._copier is not None:
            self._start(self._copier, part, targets, buffer, step, extra)
        else:
            checksums = self._copy_now(buffer, part, targets)
            part.complete(self._buffers, buffer, step, extra, checksums)
            self._on_cpu_s = time.perf_counter() - begin
        return time.perf_counter() - begin

    def _find_frozen(self) -> None:
        entries = tuple(
            number
            for number, name, owner in self._parameters
            if not owner.requires_grad and name not in self._not_frozen
        )
        if entries != self._frozen:
            self._frozen = entries
            self._held.clear()
            self._copies.clear()

    def _copy_now(
        self, buffer: WritableBuffer, part: _StagedPart, targets: list[Bytes]
    ) -> list[int]:
        """Copy on the CPU; returns the checksums."""
        held, frozen = self._held.setdefault(buffer, {}), set(part.positions(self._frozen))
        checksums = []
        pairs = zip(targets, part.sources, part.tensors, strict=True)
        for number, (target, source, tensor) in enumerate(pairs):
            data = flat_bytes(tensor) if source is None else source
            if number in held and hash_bytes(data) == held[number].checksum:
                checksums.append(held[number].checksum)
                continue
            checksums.append(copy_and_hash(target, data))
            if number in frozen:
                held[number] = _Held(checksums[-1])
        return checksums

    def finish(self) -> bool:
        """Waits until the last staging has been reported. False: its copy was thrown away."""
        return self._copier is None or self._copier.finish()

    def _start(
        self,
        copier: AsyncCopier,
        part: _StagedPart,
        targets: list[Bytes],
        buffer: WritableBuffer,
        step: int,
        extra: bytes,
    ) -> None:
        device, held = self._device, self._held.get(buffer, {})
        assert device is not None
        frozen = [n for n in part.positions(self._frozen) if device.holds(part.tensors[n])]

        changed: list[str] = []

        def done(sums: list[int]) -> list[str]:
            now = dict(zip(frozen, sums, strict=True))
            changed.extend(part.names[n] for n, taken in held.items() if taken.bits != now[n])
            if changed:
                self._not_frozen.update(changed)
                return changed
            checksums = [
                held[number].checksum if number in held else hash_bytes(target)
                for number, target in enumerate(targets)
            ]
            if frozen and not held:
                self._held[buffer] = {n: _Held(checksums[n], now[n]) for n in frozen}
                self._copies.pop(buffer, None)
            part.complete(self._buffers, buffer, step, extra, checksums)
            return []

        def thrown_away(written: list[str]) -> None:
            self.num_thrown_away += 1
            names = [name.removeprefix(MODEL) for name in written]
            if changed:
                print(_not_frozen(step, names), file=sys.stderr)
            else:
                self._urgent.update(written)
                print(_torn(step, names), file=sys.stderr)
            self._copies.clear()
            self._buffers.put_back(buffer.number)

        if buffer not in self._copies:
            self._copies[buffer] = self._copy_set(part, targets, held)
        summed = [part.tensors[number] for number in frozen]
        copier.start(self._copies[buffer], done, thrown_away, summed)

    def _copy_set(
        self, part: _StagedPart, targets: list[Bytes], held: Mapping[int, _Held]
    ) -> CopySet:
        """Copies of all tensors that the buffer does not have."""
        device = self._device
        assert device is not None
        parameters = {name for _, name, _ in self._parameters}
        return CopySet(
            CopiedTensor(
                name,
                source,
                torch.from_numpy(target),
                owner,
                name in self._urgent,
                device.holds(source),
                name in parameters,
            )
            for number, (name, source, target, owner) in enumerate(
                zip(part.names, part.tensors, targets, part.owners, strict=True)
            )
            if number not in held
        )

    def _plan(self, extra: bytes) -> None:
        """Makes the layout of the file, and requests buffers the first time."""
        held = {h.name: h for h in self._state.tensors()}
        entries = [Entry(h.name, storage_type(h.name, h.local.dtype), h.box) for h in held.values()]
        layout = make_layout(entries, extra=extra, **self._identity)
        self._reserve(layout, entries)
        self._layout = layout
        self._targets.clear()
        self._parts.clear()
        self._copies.clear()
        self._held.clear()
        self._addresses = self._state.addresses()
        self._tensors = [held[entry.name].local for entry in layout.entries]
        self._owners = [held[entry.name].owner for entry in layout.entries]
        names = {MODEL + name for name in self._state.parameters}
        numbered = enumerate(zip(layout.entries, self._owners, strict=True))
        self._parameters = [(n, e.name, owner) for n, (e, owner) in numbered if e.name in names]

    def _reserve(self, layout: Layout, entries: list[Entry]) -> None:
        if not self._capacity:
            full, later = layout, self._state.entries_to_come()
            if later:  # each of them also takes room in the header
                extra = encode_extra(self._state.export_extra(in_full=True))
                full = make_layout(entries + later, extra=extra, **self._identity)
            self._capacity = full.num_bytes + _SLACK_BYTES + SAMPLE_ROOM
            self._buffers.request_buffers(self._capacity)
        most = self._capacity - SAMPLE_ROOM
        if layout.num_bytes > most:
            raise UserError(
                f"checkpoint: the training state grew to {layout.num_bytes} bytes; expected at "
                f"most {most} as of the first staging; give all parameters, optimizer "
                "state and extra state their full size before the first step"
            )

    def _part(self, layout: Layout, buffer: WritableBuffer) -> _StagedPart:
        key = (buffer.part, buffer.parts)
        part = self._parts.get(key)
        if part is None:
            held = (layout, self._tensors, self._owners, self._buffer_names)
            part = self._parts[key] = _StagedPart(*held, *key)
            if self._copier is None:
                part.find_sources()
        return part


def _with_memory_of_its_own(device: torch.device | CudaDevice) -> CudaDevice | None:
    if not isinstance(device, torch.device):
        return device
    return CudaDevice(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class _Held:
    """A frozen entry in a buffer."""

    checksum: int
    bits: int = 0
    """Sum of its bits on the device."""


def _not_frozen(step: int, written: list[str]) -> str:
    return (
        f"holdfast: the copy after {steps_done(step)} is discarded: {few(written, 1)} has "
        "requires_grad False, but was written. From now on it is copied with every step"
    )


def _torn(step: int, written: list[str]) -> str:
    return (
        f"holdfast: the copy after {steps_done(step)} is discarded: {few(written)} was "
        "written after session.step, while it was copied. From now on the device waits for the "
        "copy of such tensors before it continues; write them before session.step to avoid it"
    )


def flat_bytes(tensor: Tensor) -> Bytes:
    """The bytes of a CPU tensor; a copy if it is not contiguous."""
    array: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return array
