"""The node's memory tier: anonymous memory files (memfd) that vanish with the agent.

Owns: the descriptors. Must not: know what is in them; buffers.py and copies.py do.
"""

from __future__ import annotations

import os

CROWDED_SHARE = 0.7
"""Of a node's memory, in buffers: with less left a worker's own tensors and torch rarely fit."""


class MemfdPool:
    """Buffers by number. All are allocated once and used again over generations."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes.values())

    def make(self, number: int, num_bytes: int) -> int:
        """A new buffer; its pages exist once `touch` has run (or somebody has written them)."""
        fd = os.memfd_create(f"holdfast-{number}", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        self._fds[number] = fd
        self._sizes[number] = num_bytes
        return fd

    def fd(self, number: int) -> int:
        return self._fds[number]

    def copy_of_fd(self, number: int) -> int:
        """For a thread: stays valid when the buffer is freed. The caller closes it."""
        return os.dup(self._fds[number])

    def free(self, number: int) -> None:
        del self._sizes[number]
        os.close(self._fds.pop(number))


def crowding(total_bytes: int, memory_bytes: int) -> str:
    """What to say of buffers that leave too little to the workers themselves; empty: they fit.

    The kernel counts them to the container, and ends whoever asks for memory when it is full."""
    if not memory_bytes or total_bytes <= CROWDED_SHARE * memory_bytes:
        return ""
    return (
        f"memory: the staged state takes {total_bytes / 1e9:.1f} GB of the "
        f"{memory_bytes / 1e9:.1f} GB that this node may use; give the node more "
        f"(spec.resources.memory), or spread the state over more nodes (spec.parallelism.shard)"
    )


def touch(fd: int, num_bytes: int) -> None:
    """Allocate all pages now: fresh pages in the middle of a staging cost 4-5x a warm copy. Takes
    over `fd`. Raises OSError when there is not that much memory."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    finally:
        os.close(fd)
