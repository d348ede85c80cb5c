"""The memory of the memory tier: anonymous memory files (memfd), which end with the agent."""

from __future__ import annotations

import os

from holdfast.workers.checkpoint import layout


class MemfdPool:
    """Buffers by number, reused over generations."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    @property
    def allocated_bytes(self) -> int:
        """Pages that exist."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._fds.values())

    def make(self, number: int, num_bytes: int) -> int:
        """A new buffer; its pages exist after `touch` or after they are written."""
        fd = os.memfd_create(f"holdfast-{number}", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        self._fds[number] = fd
        return fd

    def fd(self, number: int) -> int:
        return self._fds[number]

    def copy_of_fd(self, number: int) -> int:
        """A copy for a thread: it stays valid when the buffer is freed. The caller closes it."""
        return os.dup(self._fds[number])

    def free(self, number: int) -> None:
        os.close(self._fds.pop(number))


def touch(fd: int, num_bytes: int) -> None:
    """Allocate all pages: staging into fresh pages takes 4-5x the time of a warm copy. Takes over
    `fd`. Raises OSError when the memory is not there."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    finally:
        os.close(fd)


def seal(fd: int) -> None:
    """Write the checksum of the header, of which several workers have written parts. Raises
    DamagedCheckpoint if there is no header."""
    header = bytearray(os.pread(fd, layout.header_length(os.pread(fd, 8, 0), "the buffer"), 0))
    layout.seal_header(header)
    os.pwrite(fd, header, 0)
