"""The memory of the memory tier: anonymous memory files (memfd), which end with the agent."""

from __future__ import annotations

import os
import weakref

from holdfast.workers.checkpoint import layout


class Memfd:
    """A memory file, which is closed with the last reference to it: a thread that uses a buffer
    keeps its memory when the buffer is freed."""

    def __init__(self, name: str, num_bytes: int) -> None:
        """Pages exist after `touch` or after they are written."""
        self.num_bytes, self.fd = num_bytes, os.memfd_create(f"holdfast-{name}", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, num_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Pages that exist."""
        return os.fstat(self.fd).st_blocks * 512

    def touch(self) -> None:
        """Allocate all pages: staging into fresh pages takes 4-5x the time of a warm copy. Raises
        OSError when the memory is not there."""
        os.posix_fallocate(self.fd, 0, self.num_bytes)


def seal(fd: int) -> None:
    """Write the checksum of the header, of which several workers have written parts. Raises
    DamagedCheckpoint if there is no header."""
    header = bytearray(os.pread(fd, layout.header_length(os.pread(fd, 8, 0), "the buffer"), 0))
    layout.seal_header(header)
    os.pwrite(fd, header, 0)
