"""The journal of a local job: an append-only file that one controller writes and anyone may read.

A file is a 20-byte header (16 bytes magic, 4 bytes format version) and frames (core/journal.py). In
version 1 every frame is a record. A compaction starts a file of version 2, whose first frame is a
snapshot: 8 bytes (number of records that it covers, little-endian) and the snapshot itself.

A killed writer leaves a prefix of what it wrote; a machine that loses power may also leave zeros at
the end. Both are a torn tail: no action was taken on it yet, so the next writer cuts it off.
Anything else that cannot be read is damage and is reported with its offset.

A compaction makes the new file durable before it renames it to `journal`, so that this name is a
complete journal at every moment. The replaced file stays as `journal.000000001234` (the number of
records up to its end): history for `holdfast events`, which no controller needs. The oldest ones
are deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.events import AnyEvent
from holdfast.orchestrator.core.journal import (
    FRAME,
    JournalError,
    JournalLost,
    Record,
    decode_body,
    encode_record,
    frame,
)
from holdfast.orchestrator.errors import Damaged
from holdfast.orchestrator.protocol.files import sync_directory

MAGIC = b"holdfast journal"
PLAIN, COMPACTED = 1, 2
HEADER = MAGIC + struct.pack("<I", PLAIN)
COMPACTED_HEADER = MAGIC + struct.pack("<I", COMPACTED)
COVERED = struct.Struct("<Q")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors that end when space is freed. The controller of a job that trains goes on."""
ZERO_TAIL_BYTES = 16
"""This many zero bytes at the end of a file are blocks that never reached the disk; no event ends
with that many."""


class JournalDamaged(JournalError, Damaged):
    """The file does not hold what was written to it, before its end."""

    def __init__(self, path: Path, offset: int, what: str) -> None:
        self.path, self.offset = path, offset
        super().__init__(
            f"{path}: damaged at byte {offset}: {what}. Nothing was changed and training is not "
            f"affected. Restore the file from a copy, or delete the job and start it again from "
            f"its checkpoint"
        )


class Snapshot(NamedTuple):
    """The controller's state after the first `num_records` records, which it replaces."""

    num_records: int
    data: bytes


def older_files(path: Path) -> list[Path]:
    """The replaced files that are still kept, oldest first."""
    numbered = re.compile(re.escape(path.name) + r"\.\d{12}")
    found = [other for other in path.parent.iterdir() if numbered.fullmatch(other.name)]
    # A killed compaction leaves a second link to the live file.
    return sorted(other for other in found if not _same(other, path))


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return True  # just deleted


class JournalReader:
    """Reads up to the last complete record, also while another process writes and compacts.

    Each call of `read()` continues where the previous one stopped. It yields a Snapshot where the
    records that it covers are gone: at the beginning, or after a compaction that overtook this
    reader. With `history`, reading begins at the oldest file that is kept.
    """

    def __init__(self, path: Path, *, history: bool = False) -> None:
        self._path = path
        self._history = history
        self._file: _JournalFile | None = None
        self.num_records = 0
        """Records from the beginning of the job up to the position of this reader."""

    @property
    def offset(self) -> int:
        """End of the last complete record in the current file."""
        return self._file.offset if self._file is not None else 0

    def read(self) -> Iterator[Record | Snapshot]:
        """New complete records. Raises JournalDamaged, JournalError."""
        if self._file is None:
            self._file = self._file_after(-1) if self._history else _JournalFile(self._path)
        yield from self._new_items(self._file)
        while not self._file.is_at(self._path):
            # Read once more: the writer completed this file before it renamed the next one.
            yield from self._new_items(self._file)
            self._file.close()
            self._file = self._file_after(self.num_records)
            yield from self._new_items(self._file)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _new_items(self, file: _JournalFile) -> Iterator[Record | Snapshot]:
        for item in file.read():
            if isinstance(item, Record):
                self.num_records += 1
                yield item
            elif item.num_records != self.num_records:
                self.num_records = item.num_records
                yield item

    def _file_after(self, num_records: int) -> _JournalFile:
        """The oldest file that holds records after the first `num_records`."""
        for path in older_files(self._path):
            if int(path.name.rpartition(".")[2]) > num_records:
                try:
                    return _JournalFile(path)
                except JournalError:
                    if path.exists():
                        raise
                    # The writer just deleted it; the next file begins with a snapshot.
        return _JournalFile(self._path)


class _JournalFile:
    """One file, kept open: the writer may replace and delete it while it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0
        try:
            self._open: BinaryIO = path.open("rb")
        except OSError as error:
            raise JournalError(f"{path}: cannot be read ({error.strerror})") from None

    def close(self) -> None:
        self._open.close()

    def is_at(self, path: Path) -> bool:
        """Whether `path` is still this file."""
        try:
            return os.path.samestat(os.fstat(self._open.fileno()), path.stat())
        except OSError:
            return True  # deleted with its job: there is no other file to read

    def read(self) -> Iterator[Record | Snapshot]:
        try:
            self._open.seek(self.offset)
            data = self._open.read()
        except OSError as error:
            raise JournalError(f"{self._path}: cannot be read ({error.strerror})") from None
        base, at = self.offset, 0
        version = PLAIN
        if base == 0:
            version = self._check_header(data)
            if not version:
                return
            at = len(HEADER)
            if version == PLAIN:
                self.offset = at
        while (end := self._frame_end(data, at, base)) is not None:
            body = data[at + FRAME.size : end]
            if version == COMPACTED:
                version = PLAIN
                found: Record | Snapshot = self._snapshot(body, at)
            else:
                found = self._record(body, base + at)
            at = end
            self.offset = base + end
            yield found
        if version == COMPACTED:
            # The writer renames a file only after its snapshot is durable.
            raise JournalDamaged(self._path, at, "the snapshot is incomplete")

    def _record(self, body: bytes, offset: int) -> Record:
        try:
            return decode_body(body)
        except ValueError as error:
            # The checksum is right, so this is what was written.
            raise JournalError(
                f"{self._path}: byte {offset}: {error}; use the Holdfast that wrote it"
            ) from None

    def _snapshot(self, body: bytes, offset: int) -> Snapshot:
        if len(body) < COVERED.size:
            raise JournalDamaged(self._path, offset, "the snapshot is too short")
        return Snapshot(COVERED.unpack_from(body)[0], body[COVERED.size :])

    def _check_header(self, data: bytes) -> int:
        """The format version; 0 while the header is incomplete."""
        header = data[: len(HEADER)]
        if header in (HEADER, COMPACTED_HEADER):
            return PLAIN if header == HEADER else COMPACTED
        if HEADER.startswith(data) or not data.strip(b"\0"):
            return 0
        if data.startswith(MAGIC):
            (version,) = struct.unpack_from("<I", data.ljust(len(HEADER), b"\0"), len(MAGIC))
            raise JournalError(
                f"{self._path}: got format version {version}; expected {PLAIN} or {COMPACTED}; "
                f"use the Holdfast that wrote it"
            )
        raise JournalDamaged(self._path, 0, "this is not the header of a journal")

    def _frame_end(self, data: bytes, at: int, base: int) -> int | None:
        """Where the frame at `at` ends; None for an incomplete tail."""
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
    """The one writer (implements core.journal.Journal). `append` writes to the page cache, `commit`
    calls fdatasync, which is short on a local disk and therefore runs in the event loop."""

    def __init__(
        self,
        path: Path,
        *,
        bound_bytes: int = limits.JOURNAL_BYTES,
        keep_files: int = limits.JOURNAL_FILES,
    ) -> None:
        """Open or create the journal, read it into `snapshot` and `records`, cut off a torn tail.

        Raises JournalLost when another process writes it, JournalError when it cannot be opened,
        JournalDamaged when its contents are wrong.
        """
        self.path = path
        self._bound_bytes, self._keep_files = bound_bytes, keep_files
        self._fd = self._open()
        try:
            self._lock(self._fd)
            self.snapshot: bytes | None = None
            self.records: list[Record] = []
            self.cut_bytes = self._recover()
        except BaseException:
            os.close(self._fd)
            raise
        self._unsynced: list[bytes] = []
        """Written, and perhaps in the page cache only."""
        self._unwritten: list[bytes] = []
        self.problem = ""

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be opened ({error.strerror})") from None

    def _lock(self, fd: int) -> None:
        """A lock holds the inode, so check that `path` is still this inode."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(fd), self.path.stat())
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise JournalLost(f"{self.path}: another controller writes it")

    def _recover(self) -> int:
        reader = JournalReader(self.path)
        for item in reader.read():
            if isinstance(item, Snapshot):
                self.snapshot = item.data
            else:
                self.records.append(item)
        self._num_records = reader.num_records
        size = os.fstat(self._fd).st_size
        if reader.offset == 0:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, HEADER, 0)
            self._end = len(HEADER)
        else:
            self._end = reader.offset
            os.ftruncate(self._fd, self._end)
        reader.close()
        snapshot_bytes = 0
        if self.snapshot is not None:
            snapshot_bytes = FRAME.size + COVERED.size + len(self.snapshot)
        self._full_at = len(HEADER) + snapshot_bytes + self._bytes_until_full(self.snapshot)
        if size != self._end:
            os.fsync(self._fd)
            sync_directory(self.path.parent)
        self._new_name.unlink(missing_ok=True)
        return max(0, size - self._end)

    def _bytes_until_full(self, snapshot: bytes | None) -> int:
        """Bytes of records before the next compaction: at least the size of the snapshot, so that
        compacting never costs more than appending."""
        return max(self._bound_bytes, len(snapshot or b""))

    @property
    def _new_name(self) -> Path:
        return self.path.with_name(f".{self.path.name}.new")

    @property
    def full(self) -> bool:
        return self._end >= self._full_at

    def append(self, now_ns: int, event: AnyEvent) -> None:
        """Add a record. From now on it survives this process, and after `commit` the machine too.

        On a full disk it stays in memory, and `problem` is set. Raises JournalError when it cannot
        be written for another reason, and leaves the file as it was.
        """
        self._unwritten.append(encode_record(now_ns, event))
        self._num_records += 1
        self._write_out()

    def _write_out(self) -> None:
        """Write what is in memory only, in order, as far as there is room."""
        try:
            while self._unwritten:
                _write(self._fd, self._unwritten[0], self._end)
                self._end += len(self._unwritten[0])
                self._unsynced.append(self._unwritten.pop(0))
        except OSError as error:
            self._wait_for_room(error)
        else:
            self.problem = ""

    def _wait_for_room(self, error: OSError) -> None:
        """Raises JournalError for an error that does not end with more room."""
        if error.errno not in NO_ROOM:
            self._fail(error)
        os.ftruncate(self._fd, self._end)
        self.problem = (
            f"{self.path}: cannot be written ({error.strerror}). The newest records are in the "
            f"controller's memory only, until there is room; free disk space"
        )

    @property
    def num_unwritten(self) -> int:
        """Records that are in memory only."""
        return len(self._unwritten)

    async def commit(self) -> None:
        """Make everything appended durable. Raises JournalError."""
        self.sync()

    def sync(self) -> None:
        """`commit` for callers without an event loop."""
        if self._unwritten:
            self._write_out()
        if not self._unsynced:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            # NFS and file systems that allocate late report a full disk here; which of the records
            # are on it is unknown, so all are written again.
            self._unwritten[:0] = self._unsynced
            self._end -= sum(map(len, self._unsynced))
            self._wait_for_room(error)
        self._unsynced.clear()

    async def compact(self, snapshot: bytes) -> None:
        """Start a new file with a snapshot of everything so far. If it cannot be written, the old
        file stays in use, and the next attempt follows after another `bound_bytes`."""
        data = COMPACTED_HEADER + frame(COVERED.pack(self._num_records) + snapshot)
        try:
            fd = self._write_new(data)
        except OSError:
            self._full_at = self._end + self._bound_bytes
            self.sync()
            return
        try:
            self._new_name.replace(self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            # Either file may have the name now; the next writer opens the one that does.
            os.close(fd)
            self._fail(error)
        os.close(self._fd)
        self._fd, self._end = fd, len(data)
        self._unwritten.clear()  # the snapshot covers them
        self._unsynced.clear()
        self.problem = ""
        self._full_at = self._end + self._bytes_until_full(snapshot)
        for path in older_files(self.path)[: -self._keep_files or None]:
            path.unlink(missing_ok=True)

    def _write_new(self, data: bytes) -> int:
        """Write the new file under a temporary name, and link the old one as history. Returns the
        new one, durable and locked."""
        self._new_name.unlink(missing_ok=True)
        fd = os.open(self._new_name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, data, 0)
            os.fsync(fd)
            self._keep_replaced()
        except BaseException:
            os.close(fd)
            self._new_name.unlink(missing_ok=True)
            raise
        return fd

    def _keep_replaced(self) -> None:
        """Link the file that is about to be replaced under its number of records."""
        if self._keep_files:
            aside = self.path.with_name(f"{self.path.name}.{self._num_records:012d}")
            aside.unlink(missing_ok=True)
            os.link(self.path, aside)

    def _fail(self, error: OSError) -> None:
        os.ftruncate(self._fd, self._end)
        raise JournalError(
            f"{self.path}: cannot be written ({error.strerror}); training goes on without a "
            f"controller; free disk space, then attach again"
        ) from None

    def close(self) -> None:
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._fd = -1


def _write(fd: int, data: bytes, at: int) -> None:
    """Write all of `data`. Raises OSError."""
    written = os.pwrite(fd, data, at)
    while written < len(data):
        written += os.pwrite(fd, data[written:], at + written)
