"""Copies values of a checkpoint to a device, through a few page-locked places.

One pass copies a part of a shard into such a place and hashes it, while the device fetches the part
before. Copying from the mapped shard itself would need all of it page-locked, which takes longer
than the whole restore (0.5 to 1 s per GB); without page locks the driver copies by itself, slowly,
and the host waits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from .layout import Bytes, copy_and_update

PLACE_BYTES = 8 * 2**20
"""Fetched by a device in 0.3 ms, against about 10 us to start a copy; and page-locked quickly."""
NUM_PLACES = 3


class CudaUpload:
    """torch's CUDA, on the current stream. Tests have a counter in its place."""

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def page_locked(self, num_bytes: int) -> Tensor:
        """New host memory from which copies are asynchronous. Raises RuntimeError."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy from host memory; it may be pageable."""
        target.copy_(source, non_blocking=True)

    def record(self) -> torch.cuda.Event:
        """An event after the queued copies."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """The host waits, without using its core."""
        event.synchronize()


@dataclass
class _Place:
    memory: Tensor
    event: torch.cuda.Event | None = None

    @property
    def bytes(self) -> Bytes:
        array: Bytes = self.memory.numpy()
        return array


class Uploader:
    """Fills tensors of a device. `finish` waits until the device has everything."""

    def __init__(self, device: CudaUpload, place_bytes: int = PLACE_BYTES) -> None:
        self._device, self._place_bytes = device, place_bytes
        self._places: list[_Place] = []
        self._next = 0

    def holds(self, tensor: Tensor) -> bool:
        return self._device.holds(tensor)

    def copy_and_hash(self, target: Tensor, data: Bytes) -> int:
        """Copies all bytes of a contiguous tensor; returns their xxh3_64."""
        flat = target.reshape(-1).view(torch.uint8)
        state = xxhash.xxh3_64()
        for begin in range(0, len(data), self._place_bytes):
            part = data[begin : begin + self._place_bytes]
            place = self._take()
            copy_and_update(place.bytes[: len(part)], part, state)
            self._send(flat[begin : begin + len(part)], place, place.memory[: len(part)])
        return state.intdigest()

    def copy_part(self, target: Tensor, values: np.ndarray[Any, Any]) -> None:
        """Copies values of the target's shape, in the integers of the same size as its elements;
        neither has to be contiguous."""
        if values.nbytes > self._place_bytes and values.ndim:
            axis = int(np.argmax(values.shape))
            middle = values.shape[axis] // 2
            for piece in (slice(0, middle), slice(middle, None)):
                index = (*(slice(None),) * axis, piece)
                self.copy_part(target[index], values[index])
            return
        place = self._take()
        np.copyto(place.bytes[: values.nbytes].view(values.dtype).reshape(values.shape), values)
        source = place.memory[: values.nbytes].view(target.dtype).reshape(values.shape)
        self._send(target, place, source)

    def finish(self) -> None:
        for place in self._places:
            self._wait_for(place)

    def _take(self) -> _Place:
        """The place that was sent longest ago."""
        if len(self._places) < NUM_PLACES:
            self._places.append(_Place(self._new_memory()))
        place = self._places[self._next % NUM_PLACES]
        self._next += 1
        self._wait_for(place)
        return place

    def _new_memory(self) -> Tensor:
        try:
            return self._device.page_locked(self._place_bytes)
        except RuntimeError as error:
            if not self._places:
                print(
                    f"holdfast: memory cannot be page-locked ({error}), so this restore is slower",
                    file=sys.stderr,
                )
            return torch.empty(self._place_bytes, dtype=torch.uint8)

    def _send(self, target: Tensor, place: _Place, source: Tensor) -> None:
        self._device.upload(target, source)
        place.event = self._device.record()

    def _wait_for(self, place: _Place) -> None:
        if place.event is not None:
            self._device.wait(place.event)
            place.event = None
