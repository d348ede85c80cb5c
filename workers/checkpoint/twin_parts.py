"""Division of a shard over several ranks of a node that hold the same one ("twins"). No torch.

All write the same file, in one buffer of their agent: each the data and checksums of its entries,
the first one also the rest of the header and the entries that may differ between twins. So a
reader of the shard need not know that several ranks wrote it.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from typing import NamedTuple

from .layout import MODEL, OPTIMIZER, Entry

MIN_SHARED_BYTES = 8 * 2**20
"""A smaller state is copied whole in less time than twins need to agree on a buffer."""


class WritableBuffer(NamedTuple):
    """A buffer that may be written, and what of the file is to be written: part `part` of
    `parts`."""

    number: int
    memory: mmap.mmap
    part: int = 0
    parts: int = 1


def divide(entries: Sequence[Entry], parts: int, first: Collection[str]) -> list[list[int]]:
    """The indices of the entries of each part: runs of about equal bytes. Those named in `first`
    are in the first part."""
    total = sum(entry.num_bytes for entry in entries)
    at = sum(entry.num_bytes for entry in entries if entry.name in first)
    indices: list[list[int]] = [[] for _ in range(parts)]
    for index, entry in enumerate(entries):
        part = 0
        if entry.name not in first and total:
            middle = at + entry.num_bytes / 2
            part = min(parts - 1, int(middle * parts / total))
            at += entry.num_bytes
        indices[part].append(index)
    return indices


SAMPLE_ROOM = 64 * 1024
"""Bytes at the end of a buffer, for the samples of all twins."""


def sample(entries: Sequence[Entry], first: Collection[str]) -> int | None:
    """The index of the entry that twins compare: a small one that every step changes."""
    for prefix in (OPTIMIZER, MODEL):
        candidates = [
            (entry.num_bytes, index)
            for index, entry in enumerate(entries)
            if entry.name.startswith(prefix) and entry.name not in first and entry.num_bytes > 8
        ]
        if candidates:
            return min(candidates)[1]
    return None
