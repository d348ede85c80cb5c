"""Stage: copy this rank's training state into node memory. The only stall of a checkpoint.

Owns: the staging buffers as this process sees them, and the copy. Must not: write files, or know
what the agent does with a buffer.

On the CPU the copy and its checksums are made in one pass in the training thread. On CUDA the
buffers are page-locked, the copy runs on a stream of its own beside the next forward and backward,
the optimizer's next step waits for it, and a thread hashes and reports when it is through.
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

from orchestrator.protocol.errors import UserError

from .copying import Bytes, copy_and_hash, hash_bytes
from .layout import Entry, Layout, encode_extra, make_layout
from .state import DTYPES, Held, TrainingState

_SLACK_BYTES = 64 * 1024
"""Room for extra state that grows: buffers are asked for once and keep their size."""


class BufferSource(Protocol):
    """Where buffers come from: the agent, over the wire."""

    def request_buffers(self, num_bytes: int) -> None:
        """Ask for all buffers of a new size without waiting."""

    def take_buffer(self) -> tuple[int, mmap.mmap]:
        """A buffer that may be written; waits for one."""

    def staged(self, buffer: int, step: int, num_bytes: int) -> None:
        """The buffer is complete."""


class Stager:
    """Stages one TrainingState, step after step, always into the same few buffers."""

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
        self._sources: list[Bytes | None] = []
        self._views: dict[int, Bytes] = {}
        self._cuda = _CudaCopier(state.optimizer, device) if device.type == "cuda" else None

    def prepare(self) -> None:
        """Asks for buffers ahead of the first staging, when the optimizer has its state already."""
        if self._state.optimizer.state:
            self._plan({held.name: held for held in self._state.tensors()})

    def stage(self, step: int) -> float:
        """Copies the state after `step`; returns the seconds that it held the training loop up."""
        begin = time.perf_counter()
        if self._cuda is not None:
            self._cuda.finish()
        tensors = {held.name: held for held in self._state.tensors()}
        addresses = [held.local.data_ptr() for held in tensors.values()]
        if self._layout is None or addresses != self._addresses:
            self._plan(tensors)
        extra = encode_extra(self._state.export_extra())
        layout = self._layout_for(tensors, extra)
        buffer, memory = self._buffers.take_buffer()
        view = self._view(buffer, memory)
        if self._cuda is not None:
            ordered = [tensors[entry.name].local for entry in layout.entries]
            done = _Completion(self._buffers, layout, view, buffer, step, extra)
            self._cuda.start(ordered, layout, view, done)
        else:
            at = layout.data_start
            checksums = [
                copy_and_hash(
                    view[at + entry.begin : at + entry.end],
                    flat_bytes(tensors[entry.name].local) if source is None else source,
                )
                for entry, source in zip(layout.entries, self._sources, strict=True)
            ]
            _complete(self._buffers, layout, view, buffer, step, extra, checksums)
        return time.perf_counter() - begin

    def finish(self) -> None:
        """Waits until the last staging is reported."""
        if self._cuda is not None:
            self._cuda.finish()

    def _plan(self, tensors: dict[str, Held]) -> None:
        """Lays the file out, and asks for buffers when the ones there are too small."""
        self._layout = self._make_layout(tensors, encode_extra(self._state.export_extra()))
        self._ask_for_room(self._layout)
        self._addresses = [held.local.data_ptr() for held in tensors.values()]
        if self._cuda is None:
            ordered = [tensors[entry.name].local for entry in self._layout.entries]
            # Flattening copies what is not contiguous: that has to happen at every staging.
            self._sources = [flat_bytes(t) if t.is_contiguous() else None for t in ordered]

    def _make_layout(self, tensors: dict[str, Held], extra: bytes) -> Layout:
        entries = [Entry(h.name, DTYPES[h.local.dtype], h.box) for h in tensors.values()]
        return make_layout(entries, extra=extra, **self._identity)

    def _layout_for(self, tensors: dict[str, Held], extra: bytes) -> Layout:
        assert self._layout is not None
        if not self._layout.fits(extra):
            self._layout = self._make_layout(tensors, extra)
            self._ask_for_room(self._layout)
        return self._layout

    def _ask_for_room(self, layout: Layout) -> None:
        if not self._capacity:
            later = self._state.optimizer_bytes_to_come()
            self._capacity = layout.num_bytes + later + _SLACK_BYTES
            self._buffers.request_buffers(self._capacity)
        if layout.num_bytes > self._capacity:
            raise UserError(
                f"checkpoint: the training state grew to {layout.num_bytes} bytes; expected at "
                f"most {self._capacity} as of the first staging; give all parameters, optimizer "
                "state and extra state their full size before the first step"
            )

    def _view(self, buffer: int, memory: mmap.mmap) -> Bytes:
        if buffer not in self._views:
            view = np.frombuffer(memory, dtype=np.uint8)
            if self._cuda is not None:
                self._cuda.lock_pages(view)
            self._views[buffer] = view
        return self._views[buffer]


def flat_bytes(tensor: Tensor) -> Bytes:
    """The memory of a CPU tensor; a copy of it when it is not contiguous."""
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
    """What is left to do in the thread once a CUDA copy has arrived."""

    def __init__(
        self,
        buffers: BufferSource,
        layout: Layout,
        view: Bytes,
        buffer: int,
        step: int,
        extra: bytes,
    ) -> None:
        self._args = (buffers, layout, view, buffer, step, extra)

    def __call__(self) -> None:
        _buffers, layout, view, *_ = self._args
        at = layout.data_start
        checksums = [hash_bytes(view[at + e.begin : at + e.end]) for e in layout.entries]
        _complete(*self._args, checksums)


class _CudaCopier:
    """Device to page-locked host memory on a stream of its own; at most one copy under way."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._jobs: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]]] = (
            queue.SimpleQueue()
        )
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        # The next optimizer step overwrites what is being copied: the device waits, not the host.
        optimizer.register_step_pre_hook(lambda *_: self._hold_back_optimizer())
        threading.Thread(target=self._complete_all, name="holdfast-stage", daemon=True).start()

    def lock_pages(self, view: Bytes) -> None:
        """Page-locks a mapped buffer, so that copies into it are asynchronous."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(view.ctypes.data, view.nbytes, 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {view.nbytes} bytes failed: {status}")

    def start(
        self, sources: list[Tensor], layout: Layout, view: Bytes, done: Callable[[], None]
    ) -> None:
        self._idle.clear()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        at = layout.data_start
        with torch.cuda.stream(self._stream):
            for entry, source in zip(layout.entries, sources, strict=True):
                target = torch.from_numpy(view[at + entry.begin : at + entry.end])
                flat = source.reshape(-1).view(torch.uint8)
                target.copy_(flat, non_blocking=True)
                if flat.is_cuda and flat.data_ptr() != source.data_ptr():
                    flat.record_stream(self._stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._copied = copied
        self._jobs.put((copied, done))

    def finish(self) -> None:
        """Waits for the copy under way, and raises what went wrong in the thread."""
        self._idle.wait()
        if self._error is not None:
            raise self._error

    def _hold_back_optimizer(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def _complete_all(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            copied, done = self._jobs.get()
            try:
                copied.synchronize()
                done()
            except BaseException as error:
                self._error = error
            finally:
                self._idle.set()
