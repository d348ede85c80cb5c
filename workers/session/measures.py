"""Measurements of a worker beside the clock: the peak of its memory, and the bytes that it sends in
a step. `holdfast spec plan` predicts both."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from .inspection import from_recorders

STATUS = Path("/proc/self/status")
READ_EVERY_S = 2.0
"""Reading STATUS takes up to half a millisecond, and the kernel keeps the peak."""


class PeakMemory:
    """The most memory that torch's tensors took, in bytes.

    On CUDA that of torch's allocator. On a CPU what the process grew by since this object was made,
    which includes what the C allocator keeps, threads, and buffers of libraries: the kernel's peak
    of resident memory, less pages of files and shared memory (code, staged checkpoints), less the
    process's own pages at the beginning.
    """

    def __init__(self, device: torch.device, status: Path = STATUS) -> None:
        self._device, self._status = device, status
        self._peak, self._others, self._reads, self._read_s = 0, 0, 0, -READ_EVERY_S
        self._before = self._pages().get("RssAnon", 0) if device.type == "cpu" else 0

    def read(self) -> int:
        """0: not known."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        now = time.monotonic()
        if self._reads < 2 or now - self._read_s >= READ_EVERY_S:
            self._reads, self._read_s = self._reads + 1, now
            pages = self._pages()
            # The kernel keeps one peak of all kinds of pages; these do not come and go in a step.
            shared = pages.get("RssFile", 0) + pages.get("RssShmem", 0)
            self._others = max(self._others, shared)
            if "VmHWM" in pages and self._before:
                self._peak = max(self._peak, pages["VmHWM"] - self._others - self._before)
        return self._peak

    def _pages(self) -> dict[str, int]:
        """Bytes by kind; empty where the kernel does not show them."""
        kinds = ("VmHWM", "RssAnon", "RssFile", "RssShmem")
        try:
            lines = [line.partition(":") for line in self._status.read_text().splitlines()]
            return {k: int(value.split()[0]) * 1024 for k, _, value in lines if k in kinds}
        except (OSError, ValueError, IndexError):
            return {}


class SentBytes:
    """The bytes that this rank sends in one step, from torch's flight recorder.

    The recorder is read once in a generation, after its second step; if that step had more
    collectives than the recorder keeps, or phases, a later one is tried. `complete`: the recorder
    sees all that is sent; gloo shows it no sends between two ranks.
    """

    ATTEMPTS = 3

    def __init__(self, complete: bool) -> None:
        self._left = self.ATTEMPTS if complete else 0
        self._began_ns: int | None = None
        self._steps = 0
        self.num_bytes = 0
        """Bytes of one step; 0: nothing, or not known."""

    def begin(self) -> None:
        """A step begins."""
        self._began_ns = time.time_ns()

    def skip(self) -> None:
        """Leave this step out: a phase in it had collectives of its own."""
        self._began_ns = None

    def end(self) -> None:
        """The step is over."""
        self._steps += 1
        if not self._left or self._steps < 2 or self._began_ns is None:
            return
        self._left -= 1
        sent = from_recorders(partial(_recorded_bytes, since_ns=self._began_ns))
        if sent is not None:
            self.num_bytes, self._left = sent, 0


def _recorded_bytes(dumps: list[Any], since_ns: int) -> int | None:
    logs, sizes = [json.loads(dump).get("entries", ()) for dump in dumps], _group_sizes()
    sent = [sent_since(since_ns, entries, sizes) for entries in logs]
    return None if not sent or None in sent else sum(filter(None, sent))


def _group_sizes() -> dict[str, int]:
    """Name of a process group -> ranks."""
    from torch.distributed import distributed_c10d

    return {name: group.size() for group, name in distributed_c10d._world.pg_names.items()}


_WIDTHS = {
    "Bool": 1, "Byte": 1, "Char": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4,
    "Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
_ENDINGS = ("_coalesced", "_base", "_oop", "_into_tensor", "_tensor")


def sent_since(
    since_ns: int, entries: Iterable[Mapping[str, Any]], sizes: Mapping[str, int]
) -> int | None:
    """Bytes that a rank has sent in the collectives begun since then, as rings send them. None: the
    recorder has lost some of them, or has an operation that is not known here. `sizes`: ranks of a
    process group by its name."""
    recorded = list(entries)
    kept = [entry for entry in recorded if entry["time_created_ns"] >= since_ns]
    if kept and len(kept) == len(recorded) and recorded[0]["record_id"] > 0:
        return None
    sent = [_sent(call, sizes[call["process_group"][0]]) for call in kept]
    return None if None in sent else round(sum(filter(None, sent)))


def _sent(entry: Mapping[str, Any], ranks: int) -> float | None:
    name = entry["profiling_name"].partition(":")[2].split(" ")[0].lstrip("_")
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    ring = (ranks - 1) / ranks
    match name.replace("_", ""):
        case "allgather":
            # Results have other sizes than on all ranks where a tensor stands for a list.
            return _bytes(entry) * (ranks - 1)
        case "reducescatter" | "alltoall":
            return _bytes(entry) * ring
        case "allreduce":
            return _bytes(entry) * 2 * ring
        case "broadcast" | "send" | "reduce" | "gather":
            return _bytes(entry)
        case "recv" | "barrier" | "coalesced":
            return 0.0
    return None


def _bytes(entry: Mapping[str, Any]) -> int:
    """Bytes of the tensors that go in. Raises KeyError for a format that is not known."""
    pairs = zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
    return sum(
        prod(size) * (1 if dtype.startswith("Float8") else _WIDTHS[dtype]) for size, dtype in pairs
    )
