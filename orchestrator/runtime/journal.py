"""The journal of a job on this machine: a file that only grows at its end.

Owns: the file format, what "durable" means, and telling a torn tail from damage. Must not: know
what an event means, or repair damage by leaving something out.

A file is a 20-byte header (16 bytes magic, 4 bytes format version) and records (core/journal.py).

A writer that dies leaves a prefix of what it wrote; a machine that dies may also leave zeros at the
end. Both are a torn tail: nothing was done on its account yet, so it is cut off. Everything else
that cannot be read is damage, and reported with its offset.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..core.events import AnyEvent
from ..core.journal import (
    FRAME,
    JournalError,
    JournalLost,
    Record,
    decode_body,
    encode_record,
)

MAGIC = b"holdfast journal"
VERSION = 1
HEADER = MAGIC + struct.pack("<I", VERSION)
ZERO_TAIL_BYTES = 16
"""So many zero bytes at the end of a file are blocks that never reached the disk; no event ends in
them."""


class JournalDamaged(JournalError):
    """Something before the end of the file is not what was written."""

    def __init__(self, path: Path, offset: int, what: str) -> None:
        self.path, self.offset = path, offset
        super().__init__(
            f"{path}: damaged at byte {offset}: {what}. Nothing was changed. Training is not "
            f"affected; restore the file from a copy, or remove the job and start it again from "
            f"its checkpoint"
        )


class JournalReader:
    """Reads from the beginning to the last whole record; usable while another process writes.

    `read()` may be called again and then goes on where it stopped. `offset` is the end of the last
    whole record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0

    def read(self) -> Iterator[Record]:
        """The records that are whole by now. Raises JournalDamaged, JournalError."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError as error:
            raise JournalError(f"{self._path}: cannot be read ({error.strerror})") from None
        base, at = self.offset, 0
        if base == 0:
            if not self._check_header(data):
                return
            at = self.offset = len(HEADER)
        while (end := self._record_end(data, at, base)) is not None:
            body = data[at + FRAME.size : end]
            try:
                record = decode_body(body)
            except ValueError as error:
                raise JournalDamaged(self._path, base + at, str(error)) from None
            at = end
            self.offset = base + end
            yield record

    def _check_header(self, data: bytes) -> bool:
        """False when the header is not whole yet."""
        if data[: len(HEADER)] == HEADER:
            return True
        if HEADER.startswith(data) or not data.strip(b"\0"):
            return False
        if data.startswith(MAGIC):
            (version,) = struct.unpack_from("<I", data.ljust(len(HEADER), b"\0"), len(MAGIC))
            raise JournalError(
                f"{self._path}: got format version {version}; expected {VERSION}; use the "
                f"Holdfast that wrote it"
            )
        raise JournalDamaged(self._path, 0, "this is not the header of a journal")

    def _record_end(self, data: bytes, at: int, base: int) -> int | None:
        """Where the record at `at` ends; None for a tail that is not whole."""
        if len(data) - at < FRAME.size:
            return None
        length, length_crc, body_crc = FRAME.unpack_from(data, at)
        zeros = data.endswith(bytes(ZERO_TAIL_BYTES))
        written = len(data.rstrip(b"\0")) if zeros else len(data)
        if zlib.crc32(data[at : at + 4]) != length_crc:
            if written < at + FRAME.size:
                return None
            raise JournalDamaged(self._path, base + at, "the length of a record is wrong")
        end: int = at + FRAME.size + length
        if end > len(data):
            return None
        if zlib.crc32(data[at + FRAME.size : end]) != body_crc:
            if written < end:
                return None
            raise JournalDamaged(self._path, base + at, "the checksum of a record does not match")
        return end


class FileJournal:
    """The one writer (core.journal.Journal). `append` buffers in the kernel, `commit` makes
    durable: an fdatasync, which is short on one machine and so done in the loop."""

    snapshot: bytes | None = None
    full = False

    def __init__(self, path: Path) -> None:
        """Open or create, read what is there into `records` and cut off a torn tail.

        Raises JournalError when somebody else writes it or it cannot be opened, JournalDamaged when
        it cannot be trusted.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{path}: cannot be opened ({error.strerror})") from None
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalLost(f"{path}: another controller writes it") from None
            self.records, self.cut_bytes = self._recover()
        except BaseException:
            os.close(self._fd)
            raise
        self._dirty = False

    def _recover(self) -> tuple[list[Record], int]:
        reader = JournalReader(self.path)
        records = list(reader.read())
        size = os.fstat(self._fd).st_size
        if reader.offset == 0:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, HEADER, 0)
            self._end = len(HEADER)
        else:
            self._end = reader.offset
            os.ftruncate(self._fd, self._end)
        if size != self._end:
            os.fsync(self._fd)
            sync_directory(self.path.parent)
        return records, max(0, size - self._end)

    def append(self, now_ns: int, event: AnyEvent) -> None:
        """Add a record. It survives this process from now on, the machine after `commit`.

        Raises JournalError, leaving the file as it was, when it cannot be written.
        """
        data = encode_record(now_ns, event)
        try:
            written = os.pwrite(self._fd, data, self._end)
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._end + written)
        except OSError as error:
            self._fail(error)
        self._end += len(data)
        self._dirty = True

    async def commit(self) -> None:
        """Make everything appended durable. Raises JournalError."""
        self.sync()

    async def compact(self, snapshot: bytes) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        """As `commit`."""
        if not self._dirty:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._fail(error)
        self._dirty = False

    def _fail(self, error: OSError) -> None:
        os.ftruncate(self._fd, self._end)
        raise JournalError(
            f"{self.path}: cannot be written ({error.strerror}); training goes on without a "
            f"controller; make room, then attach again"
        ) from None

    def close(self) -> None:
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._fd = -1


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
