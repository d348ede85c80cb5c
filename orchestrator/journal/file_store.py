"""The journal of a local job in a directory that one controller writes and anyone may read.

    lock       held by the controller that writes (flock)
    00000018   a file for each snapshot: the chunk 18 and those after it. The newest one is the
               journal; older ones are history for `debug events`, and the oldest are deleted

A file is a header (16 bytes magic, 4 bytes format version) and frames (core/journal.py). The body
of a frame is the name of a chunk and its data. A new file is durable with its first chunk before it
gets its name.

A killed writer leaves a prefix of what it wrote; a machine that loses power may also leave zeros at
the end. Both are a torn tail: no action was taken on it yet, so the next writer cuts it off.
Anything else that cannot be read is damage and is reported with its offset.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import logging
import os
import struct
import zlib
from pathlib import Path

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.journal import (
    FRAME,
    JournalDamaged,
    JournalError,
    JournalLost,
    frame,
)
from holdfast.orchestrator.protocol.files import sync_directory

from .chunk_journal import SNAPSHOT, TAIL, Chunk, StoreFull, number, read

MAGIC = b"holdfast journal"
VERSION = 1
HEADER = MAGIC + struct.pack("<I", VERSION)
NAME_BYTES = len(TAIL) + 8
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that end when space is freed. The controller of a job that trains continues."""
ZERO_TAIL_BYTES = 16
"""This many zero bytes at the end of a file are blocks that never reached the disk; no event ends
with that many."""

log = logging.getLogger("holdfast")


class FileStore:
    """A Store in a directory. Reading needs no claim."""

    prompt = keeps_history = True

    def __init__(
        self,
        directory: Path,
        *,
        bound_bytes: int = limits.JOURNAL_BYTES,
        keep_files: int = limits.JOURNAL_FILES,
    ) -> None:
        self.place = str(directory)
        self._directory, self._keep_files = directory, keep_files
        self._bound_bytes = bound_bytes
        self._files: dict[str, _File] = {}
        self._lock_fd = self._fd = -1
        self._end = self._durable_end = 0

    # -- reading --------------------------------------------------------------------------------
    def list(self, *, history: bool = False) -> builtins.list[str]:
        paths = self._paths() if history else self._paths()[-1:]
        for name in self._files.keys() - {path.name for path in paths}:
            self._files.pop(name).close()
        names: builtins.list[str] = []
        for path in paths:
            try:
                if path.name not in self._files:
                    self._files[path.name] = _File(path)
            except FileNotFoundError:
                continue  # just deleted: the next file begins with a snapshot
            except OSError as error:
                raise JournalError(f"{path}: cannot be read ({error.strerror})") from None
            self._files[path.name].scan()
            names += self._files[path.name].chunks
        return names

    def get(self, name: str) -> bytes | None:
        chunks = (file.get(name) for file in self._files.values() if name in file.chunks)
        return next(chunks, None)

    def _paths(self) -> builtins.list[Path]:
        try:
            return sorted(path for path in self._directory.iterdir() if path.name.isdigit())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise JournalError(f"{self.place}: cannot be read ({error.strerror})") from None

    # -- writing --------------------------------------------------------------------------------
    async def claim(self) -> builtins.list[Chunk]:
        """Cuts off a torn tail."""
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._lock_fd = os.open(self._directory / "lock", flags, 0o600)
        except OSError as error:
            raise JournalError(f"{self.place}: cannot be opened ({error.strerror})") from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalLost(f"{self.place}: another controller writes it") from None
        chunks = read(self)
        try:
            self._new_path.unlink(missing_ok=True)
            if paths := self._paths():
                self._continue(paths[-1])
        except OSError as error:
            raise self._failed(error) from None
        return chunks

    def _continue(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._end = self._durable_end = self._files[path.name].end
        size = os.fstat(self._fd).st_size
        if size != self._end:
            log.warning("cut off an incomplete record of %d bytes", size - self._end)
            os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)  # a killed controller may have left them in the page cache

    async def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Short on a local disk, and therefore runs in the event loop."""
        content = frame(name.encode() + data)
        if self._fd < 0 or name.startswith(SNAPSHOT):
            self._begin(name, content)
            return
        try:
            _write(self._fd, content, self._end)
            self._end += len(content)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise self._failed(error) from None
        if durable:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                # NFS and file systems that allocate late report a full disk here; which of the
                # chunks are on it is unknown, so all are written again.
                self._end = self._durable_end
                os.ftruncate(self._fd, self._end)
                raise self._failed(error, cut=True) from None
            self._durable_end = self._end

    def _begin(self, name: str, content: bytes) -> None:
        """Start a new file. If it cannot be written, the old one stays in use."""
        path, fd = self._directory / f"{number(name):08d}", -1
        try:
            self._new_path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(self._new_path, flags, 0o600)
            _write(fd, HEADER + content, 0)
            os.fsync(fd)
            self._new_path.rename(path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self._new_path.unlink(missing_ok=True)
            raise StoreFull(self._unwritten(error)) from None
        try:
            sync_directory(self._directory)
        except OSError as error:
            # The next writer continues the file that has a name then.
            os.close(fd)
            raise JournalError(self._unwritten(error)) from None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._end = fd, len(HEADER) + len(content)
        self._durable_end = self._end
        for old in self._paths()[: -self._keep_files - 1]:
            old.unlink(missing_ok=True)

    def full_at(self, snapshot_bytes: int) -> int:
        """Bytes at which to compact: at least the snapshot's, so that appending costs more."""
        return max(self._bound_bytes, snapshot_bytes)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._files, self._fd, self._lock_fd = {}, -1, -1

    @property
    def _new_path(self) -> Path:
        return self._directory / "new"

    def _failed(self, error: OSError, *, cut: bool = False) -> JournalError:
        if error.errno in NO_ROOM:
            return StoreFull(self._unwritten(error), cut=cut)
        return JournalError(
            f"{self.place}: cannot be written ({error.strerror}); training continues without a "
            f"controller; mend the disk, then attach again"
        )

    def _unwritten(self, error: OSError) -> str:
        return (
            f"{self.place}: cannot be written ({error.strerror}). The newest records are in the "
            f"controller's memory only, until there is room; free disk space"
        )


class _File:
    """One file, kept open: the writer may delete it while it is read. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open = path.open("rb")
        self.end = 0
        """End of the last complete frame."""
        self.chunks: dict[str, tuple[int, int]] = {}
        """Name -> where its data begins and ends."""

    def close(self) -> None:
        self._open.close()

    def get(self, name: str) -> bytes:
        begin, end = self.chunks[name]
        return os.pread(self._open.fileno(), end - begin, begin)

    def scan(self) -> None:
        """Find the chunks that were written since the last scan. Raises JournalError."""
        try:
            self._open.seek(self.end)
            data = self._open.read()
        except OSError as error:
            raise JournalError(f"{self._path}: cannot be read ({error.strerror})") from None
        base, at = self.end, 0
        if not base:
            self._check_header(data)
            at = len(HEADER)
        while (end := self._frame_end(data, at, base)) is not None:
            begin = at + FRAME.size
            name = data[begin : begin + NAME_BYTES].decode("ascii", "replace")
            self.chunks[name] = base + begin + NAME_BYTES, base + end
            at = end
        self.end = base + at
        if not self.chunks:
            # The writer renames a file only after its first chunk is durable.
            raise self._damaged(at, "its first chunk is incomplete")

    def _check_header(self, data: bytes) -> None:
        if data.startswith(HEADER):
            return
        if data.startswith(MAGIC) and len(data) > len(HEADER):
            (version,) = struct.unpack_from("<I", data, len(MAGIC))
            raise JournalError(
                f"{self._path}: got format version {version}; expected {VERSION}; use the Holdfast "
                f"that wrote it"
            )
        raise self._damaged(0, "this is not the header of a journal")

    def _frame_end(self, data: bytes, at: int, base: int) -> int | None:
        """End of the frame at `at`; None for an incomplete tail."""
        if len(data) - at < FRAME.size:
            return None
        length, length_crc, body_crc = FRAME.unpack_from(data, at)
        zeros = data.endswith(bytes(ZERO_TAIL_BYTES))
        written = len(data.rstrip(b"\0")) if zeros else len(data)
        if zlib.crc32(data[at : at + 4]) != length_crc:
            if written < at + FRAME.size:
                return None
            raise self._damaged(base + at, "the length of a chunk is wrong")
        end: int = at + FRAME.size + length
        if end > len(data):
            return None
        if zlib.crc32(data[at + FRAME.size : end]) != body_crc:
            if written < end:
                return None
            raise self._damaged(base + at, "the checksum of a chunk does not match")
        return end

    def _damaged(self, offset: int, what: str) -> JournalDamaged:
        return JournalDamaged(str(self._path), f"byte {offset}: {what}")


def _write(fd: int, data: bytes, at: int) -> None:
    """Write all of `data`. Raises OSError."""
    written = os.pwrite(fd, data, at)
    while written < len(data):
        written += os.pwrite(fd, data[written:], at + written)
