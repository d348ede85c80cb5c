"""The loss of a step as a number, without making the host wait for the device.

`float(loss)` waits until the device has computed the step, so the host could not queue the next one
meanwhile. Instead the value is copied to page-locked memory behind the step, and read at the next
report, when that step is complete or soon will be: a step's report has the loss of the step before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Pending = Any
"""A value on its way to the host."""


class CudaScalars:
    """Reads scalars of torch's CUDA: copies on the current stream, to two places in turn: one is
    read while the other is written. Tests have one that counts."""

    def __init__(self) -> None:
        self._places: list[Tensor] = []
        self._next = 0

    def start(self, scalar: Tensor) -> Pending:
        """Queue the copy; the host does not wait."""
        if not self._places:
            self._places = [torch.empty((), dtype=torch.float64, pin_memory=True) for _ in range(2)]
        place = self._places[self._next]
        self._next = 1 - self._next
        with torch.no_grad():
            place.copy_(scalar.detach().reshape(()).double(), non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(scalar.device))
        return place, event

    def value(self, pending: Pending) -> float:
        """Wait for the copy, without using a core."""
        place, event = pending
        event.synchronize()
        return float(place)


class LossReport:
    """The loss in a step report. On the CPU it belongs to its own step."""

    def __init__(self, device_type: str, reader: CudaScalars | None = None) -> None:
        self._device_type = device_type
        self._reader = reader or (CudaScalars() if device_type == "cuda" else None)
        self._pending: Pending | None = None

    def swap(self, loss: float | Tensor | None) -> float | None:
        """Takes the loss of a step; returns the one to report with it."""
        if self._reader is None or not self._is_later(loss):
            self._pending = None
            return None if loss is None else float(loss)
        assert isinstance(loss, Tensor)
        before = self.last()
        self._pending = self._reader.start(loss)
        return before

    def last(self) -> float | None:
        """The loss that no report has had yet."""
        if self._reader is None or self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return self._reader.value(pending)

    def _is_later(self, loss: float | Tensor | None) -> bool:
        """Subclasses, such as DTensor, have a `float` of their own; more than one value is refused
        there."""
        if not isinstance(loss, Tensor) or type(loss) not in (Tensor, torch.nn.Parameter):
            return False
        return loss.numel() == 1 and loss.device.type == self._device_type
