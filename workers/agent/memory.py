"""The node's memory tier: anonymous memory files (memfd) that vanish with the agent.

Owns: the descriptors. Must not: know what is in them; buffers.py and copies.py do.
"""

from __future__ import annotations

import os


class Memory:
    """Buffers by number. All are allocated once and used again over generations."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def make(self, number: int, num_bytes: int) -> int:
        """A new buffer; its pages exist once `touch` has run (or somebody has written them)."""
        fd = os.memfd_create(f"holdfast-{number}", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        self._fds[number] = fd
        return fd

    def fd(self, number: int) -> int:
        return self._fds[number]

    def copy_of_fd(self, number: int) -> int:
        """For a thread: stays valid when the buffer is freed. The caller closes it."""
        return os.dup(self._fds[number])

    def free(self, number: int) -> None:
        os.close(self._fds.pop(number))


def touch(fd: int, num_bytes: int) -> None:
    """Allocate all pages now: fresh pages in the middle of a staging cost 4-5x a warm copy. Takes
    over `fd`. Raises OSError when there is not that much memory."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    finally:
        os.close(fd)
