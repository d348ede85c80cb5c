"""Copies the training state from a device beside the training, and finds out whether it was written
meanwhile.

The next step of an optimizer waits for the copy, on the device. Whatever else writes a tensor
between `session.step` and that step (a moving average, a normalisation in place) would be copied in
part, under a valid checksum. So the version counters of torch are read when the copy begins, and
again before the optimizer's step or when the copy is complete, whichever is first. After a change
the copy is thrown away, and from then on the training stream waits for the copy of these tensors
before it goes on, as it does for the model's buffers.

A version counts each write in place that torch sees, also under no_grad. It does not count writes
through `.data`, through memory that is shared with something else than a tensor, by a CUDA graph
that is replayed, or, in torch 2.11 to 2.15, by `torch._foreach_*` over DTensors. So the bits of the
parameters are also summed on the device, where the training stream stands when the copy begins and
once more behind the copy: two reads at the speed of the device's memory, beside one over its bus.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from .device import CudaDevice, Event, as_integers

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class CopiedTensor:
    """One tensor of the state on its way to a staging buffer."""

    name: str
    source: Tensor
    target: Tensor
    """Bytes of the buffer."""
    owner: Tensor
    """The parameter, buffer or state that `source` is the local memory of."""
    urgent: bool
    """The training stream waits for its copy before anything else."""
    on_device: bool = True
    """Else its copy is complete when `start` returns."""
    parameter: bool = False
    """True for the model's parameters; other tensors are written by the optimizer's step only,
    which waits."""

    @property
    def watched(self) -> list[Tensor]:
        """The tensors whose versions count writes of it: a DTensor has one of its own."""
        if self.urgent or not self.on_device or self.source.is_inference():
            return []
        return [self.source] if type(self.owner) in _PLAIN else [self.owner, self.source]


class CopySet:
    """All tensors that are copied to one buffer. Made once for all stagings into it: a model has
    thousands of tensors."""

    def __init__(self, tensors: Iterable[CopiedTensor]) -> None:
        copies = list(tensors)
        self.urgent = [copy for copy in copies if copy.urgent]
        self.others = [copy for copy in copies if not copy.urgent]
        self._watched = [tensor for copy in copies for tensor in copy.watched]
        self._names = [copy.name for copy in copies for _ in copy.watched]
        summed = [copy for copy in self.others if copy.parameter and copy.on_device]
        self._summed = [copy.name for copy in summed]
        self.sources = [
            as_integers(c.source) if c.source.is_contiguous() else c.source for c in summed
        ]
        """Tensors whose bits are summed."""

    def versions(self) -> list[int]:
        return [tensor._version for tensor in self._watched]

    def written_since(self, before: list[int]) -> list[str]:
        """Names of the tensors that have been written since they had these versions."""
        now = self.versions()
        if now == before:
            return []
        changed = zip(self._names, before, now, strict=True)
        return list(dict.fromkeys(name for name, old, new in changed if old != new))

    def changed(self, before: list[int], after: list[int]) -> list[str]:
        """Names of the tensors whose bits have other sums."""
        sums = zip(self._summed, before, after, strict=True)
        return [name for name, old, new in sums if old != new]


@dataclass
class _Copy:
    """The copy under way."""

    done: Callable[[list[int]], list[str]]
    thrown_away: Callable[[list[str]], None]
    tensors: CopySet
    versions: list[int]
    copied: Event
    sums: Callable[[], list[int]]
    changed: Callable[[], list[str]]
    """Names of the parameters that were written, when `copied` is reached."""
    checked: bool = False
    """True if the writes of an optimizer may have begun, or the copy is complete."""
    written: list[str] = field(default_factory=list)

    def check(self) -> None:
        if not self.checked:
            self.written, self.checked = self.tensors.written_since(self.versions), True


class AsyncCopier:
    """Copies on the device's second stream, one copy at a time; a thread completes them."""

    def __init__(
        self, device: CudaDevice, before_each_step: Callable[[Callable[[], None]], None]
    ) -> None:
        self._device = device
        self._current: _Copy | None = None
        self._check = threading.Lock()
        """Held to read the versions: an optimizer does not begin to write meanwhile."""
        self._jobs: queue.SimpleQueue[_Copy] = queue.SimpleQueue()
        self._began = self.copy_s = self.staging_s = 0.0
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._kept = True
        self.in_graph = False
        """A CUDA graph has captured a step of an optimizer: no hook runs when it is replayed, so
        everything waits for the copy."""
        # The next step of an optimizer overwrites the copied tensors: the device waits for the
        # copy, not the host.
        before_each_step(self._delay_optimizer)
        threading.Thread(target=self._complete_all, name="holdfast-stage", daemon=True).start()

    def start(
        self,
        tensors: CopySet,
        done: Callable[[list[int]], list[str]],
        thrown_away: Callable[[list[str]], None],
        summed: Sequence[Tensor] = (),
    ) -> None:
        """Starts the copy. Work that is queued on the training stream from now on waits for the
        urgent tensors only. Calls `done` in the thread, with the sums of the bits of `summed`, and
        if tensors were written, or `done` returns their names, `thrown_away` with the names."""
        self._idle.clear()
        self._began = time.perf_counter()
        versions = tensors.versions()
        before = self._sums(tensors.sources, training=True)
        self._device.follow_training()
        if tensors.urgent:
            self._copy(tensors.urgent)
            self._device.delay_training(self._device.record())
        sums = self._sums(summed)
        self._copy(tensors.others)
        after = self._sums(tensors.sources)
        copied = self._device.record()
        if self.in_graph:
            self._device.delay_training(copied)

        def changed() -> list[str]:
            return tensors.changed(before(), after())

        self._current = _Copy(done, thrown_away, tensors, versions, copied, sums, changed)
        self._jobs.put(self._current)

    def _copy(self, tensors: list[CopiedTensor]) -> None:
        self._device.copy([copy.target for copy in tensors], [copy.source for copy in tensors])

    def _sums(self, tensors: Sequence[Tensor], training: bool = False) -> Callable[[], list[int]]:
        return self._device.bit_sums(tensors, training) if tensors else list

    def finish(self) -> bool:
        """Waits for the current copy; raises the thread's error. False: it was thrown away."""
        self._idle.wait()
        if self._error is not None:
            raise self._error
        return self._kept

    def _delay_optimizer(self) -> None:
        if self._device.capturing():
            self.in_graph = True
            return
        current = self._current
        if current is None:
            return
        with self._check:
            current.check()
        self._device.delay_training(current.copied)
        self._current = None

    def _complete_all(self) -> None:
        self._device.use()
        while True:
            current = self._jobs.get()
            try:
                self._device.wait(current.copied)
                self.copy_s = time.perf_counter() - self._began
                with self._check:
                    current.check()
                written = current.written or current.changed() or current.done(current.sums())
                self._kept = not written
                if written:
                    current.thrown_away(written)
                self.staging_s = time.perf_counter() - self._began
            except BaseException as error:
                self._error = error
            finally:
                self._idle.set()
