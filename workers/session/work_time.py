"""Differences of ranks that wait for each other: the CPU time of the training thread in a step, and
on GPUs, for which the host waits actively, the speed of the GPU."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from holdfast.orchestrator import limits


class WorkMeter:
    """Median over the last steps. Waits for peers, for storage and for a CPU are not in the CPU
    time of a thread. `clock` is a parameter for tests."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=limits.STRAGGLER_WINDOW)
        self._began_s = self._clock()

    def begin(self) -> None:
        """The next step begins now: what was done since the last one does not count."""
        self._began_s = self._clock()

    def end(self) -> float:
        """A step ends, and the next one begins. 0 until there are enough steps."""
        now_s = self._clock()
        self._recent.append(now_s - self._began_s)
        self._began_s = now_s
        full = len(self._recent) == limits.STRAGGLER_WINDOW
        return median(self._recent) if full else 0.0


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GpuProbe:
    """The time that matrix products of one size take on the GPU of this rank.

    They are queued where a step ends, so nothing else of the training stream runs beside them, and
    read when they are done, so the host never waits. A probe follows the one before after 1,000
    times what that took: at most 0.1 % of the time of the GPU.

    A GPU is slower for all work if its clock is (heat, power, a fault), which is what this finds. A
    slow host, and a slow link, it does not find. `clock`, `make_event` and `multiply` are
    parameters for tests.
    """

    WIDTH, PRODUCTS = 2048, 4
    """69 GFLOP: 0.1 ms on an H100, 1 ms on a T4."""
    UNMEASURED = 2
    """The first probes: libraries load their kernels."""

    def __init__(
        self,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.monotonic,
        make_event: Callable[[], Any] | None = None,
        multiply: Callable[[], None] | None = None,
    ) -> None:
        self._device, self._clock = device, clock
        self._make_event = make_event or _timed_event
        self._multiply = multiply or self._products
        self._matrices: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pending: tuple[Any, Any] | None = None
        self._recent: deque[float] = deque(maxlen=limits.STRAGGLER_WINDOW)
        self._done = 0
        self._next_s = 0.0
        self._failed = False

    def end(self) -> float:
        """A step ends. Returns seconds, the median over the last probes; 0 until there are
        enough."""
        try:
            if not self._failed:
                self._read()
                self._begin()
        except RuntimeError as error:  # also for want of memory
            self._failed, self._pending, self._matrices = True, None, None
            self._recent.clear()
            print(f"holdfast: the speed of the GPU is not measured: {error}", file=sys.stderr)
        full = len(self._recent) == limits.STRAGGLER_WINDOW
        return median(self._recent) if full else 0.0

    def _read(self) -> None:
        if self._pending is None or not self._pending[1].query():
            return
        begun, ended = self._pending
        self._pending = None
        took_s = begun.elapsed_time(ended) / 1e3
        self._done += 1
        self._next_s = self._clock() + limits.PROBE_PAUSE * took_s
        if self._done > self.UNMEASURED:
            self._recent.append(took_s)

    def _begin(self) -> None:
        if self._pending is not None or self._clock() < self._next_s:
            return
        begun, ended = self._make_event(), self._make_event()
        begun.record()
        self._multiply()
        ended.record()
        self._pending = begun, ended

    def _products(self) -> None:
        """Multiply matrices without the script's random numbers; zeros would take less power and
        time."""
        if self._matrices is None:
            size = (self.WIDTH, self.WIDTH)
            count = self.WIDTH**2
            values = torch.arange(count, dtype=torch.int32, device=self._device)
            values.remainder_(251).sub_(125)
            source = values.view(size).to(torch.bfloat16).div_(125)
            self._matrices = source, torch.empty_like(source)
        source, product = self._matrices
        for _ in range(self.PRODUCTS):
            torch.mm(source, source, out=product)
