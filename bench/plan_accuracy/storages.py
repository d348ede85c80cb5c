"""Live bytes of a training step, storage by storage.

A dispatch mode sees the result of every operator; each storage counts once, from the operator that
makes it until Python frees it. Storages that FSDP2 resizes (its gathered parameters) count by their
size at each moment. The log of allocations and frees is evaluated after the step, so that a storage
has the category that is known by then: a gradient is one from its first byte on.

FakeTensors have sizes and no data, so a step of any model costs only the time of its dispatch.
What the log cannot have is memory that a kernel allocates within itself, and the allocator's
rounding and fragments.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WRAPPERS = (DTensor, AsyncCollectiveTensor)
HOST = "host"
"""Category of storages in main memory, which are none of the device's bytes."""


@dataclass
class Block:
    """One storage: what made it, and what it was found to be."""

    made_by: str
    shape: tuple[int, ...]
    dtype: str
    module: str
    phase: str
    num_bytes: int = 0
    category: str = ""


@dataclass
class Peak:
    """The largest number of live bytes within one phase, and what they were."""

    num_bytes: int
    blocks: list[tuple[Block, int]]
    """Each live storage with its bytes at that moment."""

    def by_category(self) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for block, size in self.blocks:
            sums[block.category or "activations and rest"] += size
        return dict(sums)


@dataclass
class _Change:
    block: Block
    delta: int
    phase: str


Observer = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


@dataclass
class StorageTracker(TorchDispatchMode):
    """Use it as a context around everything that allocates; `phase` and `module` label what is
    allocated meanwhile. `observers` are called with each operator and its arguments."""

    observers: list[Observer] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.phase, self.prefix = "build", ""
        self.modules: list[str] = []
        self.region = ""
        """Category of what is allocated now; "": found out later."""
        self.paused = False
        """Nothing is recorded."""
        self._log: list[_Change] = []
        self._live: dict[int, Block] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> StorageTracker:
        self._stack.enter_context(_resizes_reported(self._resized))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, _WRAPPERS) for kind in types):
            return NotImplemented  # their handlers come back with the plain tensors inside
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        for observe in self.observers:
            observe(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as the real one does; that of fake tensors makes another storage
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._seen(leaf, str(func))
        return result

    # -- what is known of a storage -------------------------------------------------------------
    def block_of(self, tensor: Tensor) -> Block | None:
        """The block of a tensor's storage; None for a storage that no operator made under this
        mode."""
        plain = _plain(tensor)
        return None if plain is None else self._live.get(plain.untyped_storage()._cdata)

    def mark(self, tensor: Tensor | None, category: str) -> None:
        """The storage of `tensor` is of this category."""
        block = None if tensor is None else self.block_of(tensor)
        if block is not None:
            block.category = category

    def peaks(self, phases: Callable[[str], bool] = lambda phase: True) -> dict[str, Peak]:
        """The peak of each phase that `phases` takes, without storages of the host."""
        best: dict[str, tuple[int, int]] = {}
        live = 0
        for at, change in enumerate(self._log):
            if phases(change.phase) and change.phase not in best:
                best[change.phase] = live, at - 1  # what the phase before leaves
            if change.block.category != HOST:
                live += change.delta
            if phases(change.phase) and live > best[change.phase][0]:
                best[change.phase] = live, at
        return {phase: Peak(size, self._alive_at(at)) for phase, (size, at) in best.items()}

    def _alive_at(self, at: int) -> list[tuple[Block, int]]:
        sizes: dict[int, tuple[Block, int]] = {}
        for change in self._log[: at + 1]:
            before = sizes.get(id(change.block), (change.block, 0))[1]
            sizes[id(change.block)] = change.block, before + change.delta
        return [(b, n) for b, n in sizes.values() if n and b.category != HOST]

    # -- the log --------------------------------------------------------------------------------
    def _seen(self, tensor: Tensor, made_by: str) -> None:
        plain = _plain(tensor)
        if plain is None or plain.device.type == "meta":
            return
        storage = plain.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        block = Block(
            made_by,
            tuple(plain.shape),
            str(plain.dtype).removeprefix("torch."),
            self.modules[-1] if self.modules else "",
            self.prefix + self.phase,
            category=self.region,
        )
        self._live[key] = block
        self._change(block, storage.nbytes())
        weakref.finalize(storage, self._freed, key, block)

    def _resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        block = self._live.get(storage._cdata)
        if block is not None:
            self._change(block, num_bytes - block.num_bytes)

    def _freed(self, key: int, block: Block) -> None:
        if self._live.get(key) is block:
            del self._live[key]
        self._change(block, -block.num_bytes)

    def _change(self, block: Block, delta: int) -> None:
        if delta:
            block.num_bytes += delta
            self._log.append(_Change(block, delta, self.prefix + self.phase))


def _plain(tensor: Tensor) -> Tensor | None:
    if isinstance(tensor, DTensor):
        return _plain(tensor._local_tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        return _plain(tensor.elem)
    return tensor


@contextlib.contextmanager
def _resizes_reported(report: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """UntypedStorage.resize_ is no operator."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = original(storage, num_bytes)
        report(storage, num_bytes)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
