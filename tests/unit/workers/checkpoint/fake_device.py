"""A device of which a test decides when its work is done. It runs on the CPU, works only in
`run()`, and records the calls with the names of their threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from holdfast.workers.checkpoint.device import bit_sum
from holdfast.workers.checkpoint.layout import Bytes

TRAINING, STAGING = "MainThread", "holdfast-stage"


@dataclass
class FakeEvent:
    reached: threading.Event = field(default_factory=threading.Event)


class FakeDevice:
    """Copies are queued; `run()` carries out all of them."""

    def __init__(self, *, refuses_pages: bool = False) -> None:
        self.calls: list[tuple[str, str]] = []
        """(call, thread), in order."""
        self.delays: list[FakeEvent] = []
        """Events that the training stream waits for."""
        self.captures = False
        self.locked_bytes = self.copied_bytes = self.summed_bytes = 0
        self._refuses = refuses_pages
        self._queue: list[Callable[[], None]] = []

    def run(self) -> None:
        """The device does all that is queued."""
        for work in self._queue:
            work()
        self._queue.clear()

    def threads_of(self, call: str) -> set[str]:
        return {thread for name, thread in self.calls if name == call}

    def _note(self, call: str) -> None:
        self.calls.append((call, threading.current_thread().name))

    # -- CudaDevice ---------------------------------------------------------------------------
    def use(self) -> None:
        self._note("use")

    def holds(self, tensor: Tensor) -> bool:
        return True

    def lock_pages(self, memory: Bytes) -> None:
        self._note("lock_pages")
        if self._refuses:
            raise RuntimeError("cudaHostRegister failed: operation not supported")
        self.locked_bytes += memory.nbytes

    def follow_training(self) -> None:
        self._note("follow_training")

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._note("copy")

        def work() -> None:
            self.copied_bytes += sum(target.nbytes for target in targets)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source.reshape(-1).view(torch.uint8))

        self._queue.append(work)

    def bit_sums(
        self, sources: Sequence[Tensor], training: bool = False
    ) -> Callable[[], list[int]]:
        """The training stream has no queue here: what the test does is done at once."""
        sums: list[int] = []

        def work() -> None:
            self.summed_bytes += sum(source.nbytes for source in sources)
            sums.extend(int(bit_sum(one)) for one in sources)

        if training:
            work()
        else:
            self._queue.append(work)
        return lambda: sums

    def record(self) -> FakeEvent:
        self._note("record")
        event = FakeEvent()
        self._queue.append(event.reached.set)
        return event

    def delay_training(self, event: FakeEvent) -> None:
        """Do what is queued up to `event` before the test goes on, as before training does."""
        self._note("delay_training")
        self.delays.append(event)
        self.run()

    def wait(self, event: FakeEvent) -> None:
        self._note("wait")
        assert event.reached.wait(30), "the test forgot to run the device"

    def capturing(self) -> bool:
        return self.captures


class FakeUpload:
    """A device that copies when the host waits for it: memory used too early has wrong values."""

    def __init__(self, *, refuses_pages: bool = False) -> None:
        self.locked_bytes = self.num_uploads = self.longest_queue = 0
        self._refuses = refuses_pages
        self._queue: list[Callable[[], None]] = []

    def holds(self, tensor: Tensor) -> bool:
        return True

    def page_locked(self, num_bytes: int) -> Tensor:
        if self._refuses:
            raise RuntimeError("CUDA error: operation not supported")
        self.locked_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, target: Tensor, source: Tensor) -> None:
        self.num_uploads += 1
        self._queue.append(lambda: target.copy_(source))
        self.longest_queue = max(self.longest_queue, len(self._queue))

    def record(self) -> int:
        return self.num_uploads

    def wait(self, event: int) -> None:
        """Everything up to the event, in order."""
        done = self.num_uploads - len(self._queue)
        for _ in range(max(0, event - done)):
            with torch.no_grad():
                self._queue.pop(0)()
