"""Staging: copies this rank's training state into a staging buffer of the agent. It is the only
part of a checkpoint that delays the training loop.

On the CPU the training thread copies and hashes in one pass. On CUDA the buffers are page-locked
and the copy runs on its own stream, beside the next forward and backward; the next optimizer step
waits for it, and a thread hashes and reports when it is complete. The model's buffers are copied
first, and the next forward, which may write them, waits for those only.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.orchestrator.errors import UserError

from .layout import (
    Bytes,
    Entry,
    Layout,
    copy_and_hash,
    encode_extra,
    hash_bytes,
    make_layout,
)
from .state import DTYPES, TrainingState

_SLACK_BYTES = 64 * 1024
"""Room for extra state that grows: buffers are requested once and keep their size."""


class BufferSource(Protocol):
    """Provides staging buffers; the agent does, over the worker's socket."""

    def request_buffers(self, num_bytes: int) -> None:
        """Request all buffers with a new size, without waiting."""

    def take_buffer(self) -> tuple[int, mmap.mmap]:
        """Wait for a free buffer; (its number, its memory)."""

    def staged(self, buffer: int, step: int, num_bytes: int) -> None:
        """Report that the buffer is complete."""


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
        device: torch.device,
    ) -> None:
        self._state, self._buffers = state, buffers
        self._identity = {"generation": generation, "shard": shard, "num_shards": num_shards}
        self._layout: Layout | None = None
        self._capacity = 0
        self._addresses: list[int] = []
        self._tensors: list[Tensor] = []
        """In the order of the layout, like the sources, which are their memory on the CPU."""
        self._sources: list[Bytes | None] = []
        self._views: dict[int, tuple[Bytes, list[Bytes]]] = {}
        self._buffer_names = state.buffers()
        self._urgent: list[bool] = []
        """Whether the next forward waits for the copy of the tensor."""
        self._cuda = _CudaCopier(state, device) if device.type == "cuda" else None
        self._on_cpu_s = 0.0

    @property
    def copy_s(self) -> float:
        """Time of the last copy from the device."""
        return self._cuda.copy_s if self._cuda is not None else 0.0

    @property
    def staging_s(self) -> float:
        """Time from the beginning of the last staging to its end."""
        return self._cuda.staging_s if self._cuda is not None else self._on_cpu_s

    def prepare(self) -> None:
        """Requests buffers before the first staging if the optimizer already has its state."""
        if self._state.has_optimizer_state:
            self._plan(encode_extra(self._state.export_extra()))

    def stage(self, step: int) -> float:
        """Copies the state after `step`; returns the seconds that it delayed the training loop."""
        begin = time.perf_counter()
        if self._cuda is not None:
            self._cuda.finish()
        extra = encode_extra(self._state.export_extra())
        moved = self._state.addresses() != self._addresses
        if self._layout is None or moved or not self._layout.fits(extra):
            self._plan(extra)
        layout = self._layout
        assert layout is not None
        buffer, memory = self._buffers.take_buffer()
        view, targets = self._view(buffer, memory, layout)
        if self._cuda is not None:
            done = _Completion(self._buffers, layout, view, targets, buffer, step, extra)
            self._cuda.start(self._tensors, targets, self._urgent, done)
        else:
            checksums = [
                copy_and_hash(target, flat_bytes(tensor) if source is None else source)
                for target, source, tensor in zip(
                    targets, self._sources, self._tensors, strict=True
                )
            ]
            _complete(self._buffers, layout, view, buffer, step, extra, checksums)
            self._on_cpu_s = time.perf_counter() - begin
        return time.perf_counter() - begin

    def finish(self) -> None:
        """Waits until the last staging has been reported."""
        if self._cuda is not None:
            self._cuda.finish()

    def _plan(self, extra: bytes) -> None:
        """Makes the layout of the file, and requests buffers the first time."""
        held = {h.name: h for h in self._state.tensors()}
        entries = [Entry(h.name, DTYPES[h.local.dtype], h.box) for h in held.values()]
        layout = make_layout(entries, extra=extra, **self._identity)
        self._reserve(layout, entries)
        self._layout = layout
        self._views.clear()
        self._addresses = self._state.addresses()
        self._tensors = [held[entry.name].local for entry in layout.entries]
        self._urgent = [entry.name in self._buffer_names for entry in layout.entries]
        if self._cuda is None:
            # Flattening copies a tensor that is not contiguous, so it is done at every staging.
            self._sources = [flat_bytes(t) if t.is_contiguous() else None for t in self._tensors]

    def _reserve(self, layout: Layout, entries: list[Entry]) -> None:
        if not self._capacity:
            full, later = layout, self._state.entries_to_come()
            if later:  # each of them also takes room in the header
                extra = encode_extra(self._state.export_extra(in_full=True))
                full = make_layout(entries + later, extra=extra, **self._identity)
            self._capacity = full.num_bytes + _SLACK_BYTES
            self._buffers.request_buffers(self._capacity)
        if layout.num_bytes > self._capacity:
            raise UserError(
                f"checkpoint: the training state grew to {layout.num_bytes} bytes; expected at "
                f"most {self._capacity} as of the first staging; give all parameters, optimizer "
                "state and extra state their full size before the first step"
            )

    def _view(self, buffer: int, memory: mmap.mmap, layout: Layout) -> tuple[Bytes, list[Bytes]]:
        """A buffer's memory, and the part of it for each tensor."""
        known = self._views.get(buffer)
        if known is None:
            view = np.frombuffer(memory, dtype=np.uint8)
            if self._cuda is not None:
                self._cuda.lock_pages(buffer, view)
            at = layout.data_start
            known = view, [view[at + e.begin : at + e.end] for e in layout.entries]
            self._views[buffer] = known
        return known


def flat_bytes(tensor: Tensor) -> Bytes:
    """The bytes of a CPU tensor; a copy if it is not contiguous."""
    array: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def _complete(
    buffers: BufferSource,
    layout: Layout,
    view: Bytes,
    buffer: int,
    step: int,
    extra: bytes,
    checksums: list[int],
) -> None:
    header = layout.render(step, checksums, extra)
    view[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    buffers.staged(buffer, step, layout.num_bytes)


class _Completion:
    """Finishes a staged buffer, in the thread, when its CUDA copy is complete."""

    def __init__(
        self,
        buffers: BufferSource,
        layout: Layout,
        view: Bytes,
        targets: list[Bytes],
        buffer: int,
        step: int,
        extra: bytes,
    ) -> None:
        self._args = (buffers, layout, view, buffer, step, extra)
        self._targets = targets

    def __call__(self) -> None:
        _complete(*self._args, [hash_bytes(target) for target in self._targets])


class _CudaCopier:
    """Copies from the device to page-locked host memory on its own stream, one copy at a time."""

    def __init__(self, state: TrainingState, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._locked: set[int] = set()
        self._jobs: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]]] = (
            queue.SimpleQueue()
        )
        self._began = self.copy_s = self.staging_s = 0.0
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        # The next step of an optimizer overwrites the copied tensors: the device waits for the
        # copy, not the host.
        state.before_each_step(self._delay_optimizer)
        threading.Thread(target=self._complete_all, name="holdfast-stage", daemon=True).start()

    def lock_pages(self, buffer: int, view: Bytes) -> None:
        """Page-locks a mapped buffer once, so that copies into it are asynchronous."""
        if buffer in self._locked:
            return
        self._locked.add(buffer)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(view.ctypes.data, view.nbytes, 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {view.nbytes} bytes failed: {status}")

    def start(
        self,
        sources: list[Tensor],
        targets: list[Bytes],
        urgent: list[bool],
        done: Callable[[], None],
    ) -> None:
        """Starts the copy. Work that is queued on the training stream from now on waits for the
        `urgent` tensors only."""
        self._idle.clear()
        self._began = time.perf_counter()
        training = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(training)
        pairs = list(zip(targets, sources, urgent, strict=True))
        if any(urgent):
            training.wait_event(self._copy([(t, s) for t, s, now in pairs if now]))
        copied = self._copied = self._copy([(t, s) for t, s, now in pairs if not now])
        self._jobs.put((copied, done))

    def _copy(self, pairs: list[tuple[Bytes, Tensor]]) -> torch.cuda.Event:
        """The event is reached when these copies and all earlier ones are complete."""
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                flat = source.reshape(-1).view(torch.uint8)
                torch.from_numpy(target).copy_(flat, non_blocking=True)
                if flat.is_cuda and flat.data_ptr() != source.data_ptr():
                    flat.record_stream(self._stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return copied

    def finish(self) -> None:
        """Waits for the current copy; raises the thread's error."""
        self._idle.wait()
        if self._error is not None:
            raise self._error

    def _delay_optimizer(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def _complete_all(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            copied, done = self._jobs.get()
            try:
                copied.synchronize()
                self.copy_s = time.perf_counter() - self._began
                done()
                self.staging_s = time.perf_counter() - self._began
            except BaseException as error:
                self._error = error
            finally:
                self._idle.set()
