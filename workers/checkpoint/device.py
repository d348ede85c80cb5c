"""A device with memory of its own, as far as staging needs one. Tests have one in the place of
CudaDevice that records its calls and their threads.

Every call that queues work returns at once; the device carries out the work in order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .layout import Bytes

Event = torch.cuda.Event
"""An event of the device: reached when all work that was queued before its record is complete."""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(tensor: Tensor) -> Tensor:
    """Sum of the tensor's memory as integers, modulo 2**64."""
    return as_integers(tensor).sum(dtype=torch.int64)


def as_integers(tensor: Tensor) -> Tensor:
    """Tensor's memory as integers, (N); a copy if it is not contiguous. Of 8 bytes where it can be
    divided so, else of its element size: torch copies smaller ones to 8 bytes each to sum them."""
    flat = tensor.reshape(-1)
    whole = not (flat.nbytes % 8 or flat.storage_offset() * flat.element_size() % 8)
    return flat.view(torch.int64 if whole else _INTEGERS[flat.element_size()])


class CudaDevice:
    """torch's CUDA: a device, its training stream (the current one of the calling thread), and a
    second stream for copies. Made in the training thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def use(self) -> None:
        """Make it the current device of the calling thread."""
        torch.cuda.set_device(self._device)

    def holds(self, tensor: Tensor) -> bool:
        """True if the tensor is in the memory of the device."""
        return tensor.is_cuda

    def lock_pages(self, memory: Bytes) -> None:
        """Page-lock host memory, so that copies into it are asynchronous; also makes its pages
        present. Takes 0.5 to 1 s per GB. Raises RuntimeError if the system refuses."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes failed: {status}")

    def follow_training(self) -> None:
        """Copies wait for what is queued on the training stream."""
        self._copies.wait_stream(self._training())

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies of whole tensors to bytes of host memory. A copy from host memory is
        complete when this returns."""
        with torch.cuda.stream(self._copies):
            for target, source in zip(targets, sources, strict=True):
                flat = source.reshape(-1).view(torch.uint8)
                target.copy_(flat, non_blocking=True)
                if flat.is_cuda and flat.data_ptr() != source.data_ptr():
                    flat.record_stream(self._copies)

    def bit_sums(
        self, sources: Sequence[Tensor], training: bool = False
    ) -> Callable[[], list[int]]:
        """Queue, beside the copies or on the training stream, the sum of the bits of each tensor as
        integers; what is returned gives them when an event that was recorded later is reached."""
        host = torch.empty(len(sources), dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._training() if training else self._copies):
            host.copy_(torch.stack([bit_sum(source) for source in sources]), non_blocking=True)
        return host.tolist

    def record(self) -> Event:
        """An event after the queued copies."""
        # Without `blocking` the thread that waits for it would use a whole core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._copies)
        return event

    def delay_training(self, event: Event) -> None:
        """Have work that is queued on the training stream from now on wait for `event`; the host
        does not."""
        self._training().wait_event(event)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def capturing(self) -> bool:
        """True if the training stream is being captured into a graph, which cannot wait for an
        event from outside."""
        return torch.cuda.is_current_stream_capturing()

    def _training(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


class PageLocks:
    """Page-locks buffers; if the system does not allow it, prints that once and does without."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.refused = ""

    def __call__(self, memory: Bytes) -> None:
        self._device.use()
        try:
            if not self.refused:
                self._device.lock_pages(memory)
        except RuntimeError as error:
            self.refused = str(error)
            print(
                f"holdfast: staging buffers are not page-locked ({error}), so training waits for "
                "each copy from the device; raise the limit of locked memory (ulimit -l), or allow "
                "it in the sandbox of the container",
                file=sys.stderr,
            )
