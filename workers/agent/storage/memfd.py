"""The memory of the memory tier: anonymous memory files (memfd), which end with the agent."""

from __future__ import annotations

import os

MAX_BUFFER_SHARE = 0.7
"""Share of a node's memory in buffers above which a worker's own tensors and torch rarely fit."""


class MemfdPool:
    """Buffers by number, reused over generations."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes.values())

    def make(self, number: int, num_bytes: int) -> int:
        """A new buffer; its pages exist after `touch` or after they are written."""
        fd = os.memfd_create(f"holdfast-{number}", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        self._fds[number] = fd
        self._sizes[number] = num_bytes
        return fd

    def fd(self, number: int) -> int:
        return self._fds[number]

    def copy_of_fd(self, number: int) -> int:
        """For a thread: it stays valid when the buffer is freed. The caller closes it."""
        return os.dup(self._fds[number])

    def free(self, number: int) -> None:
        del self._sizes[number]
        os.close(self._fds.pop(number))


def memory_warning(total_bytes: int, memory_bytes: int) -> str:
    """A warning if buffers leave too little memory to the workers; empty: they fit.

    The kernel counts buffers to the container and kills a process of it when it is full."""
    if not memory_bytes or total_bytes <= MAX_BUFFER_SHARE * memory_bytes:
        return ""
    return (
        f"memory: the staged state takes {total_bytes / 1e9:.1f} GB of the "
        f"{memory_bytes / 1e9:.1f} GB that this node may use; give the node more "
        f"(spec.resources.memory), or spread the state over more nodes (spec.parallelism.shard)"
    )


def touch(fd: int, num_bytes: int) -> None:
    """Allocate all pages: staging into fresh pages takes 4-5x the time of a warm copy. Takes over
    `fd`. Raises OSError when the memory is not there."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    finally:
        os.close(fd)
