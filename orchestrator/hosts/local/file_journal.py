"""The journal of a job on this machine: a file that grows at its end, and is compacted.

Owns: writing it, what "durable" means, and that there is one writer. Must not: know what an event
means, or repair damage by leaving something out. The format is in journal_reader.py.

A writer that dies leaves a prefix of what it wrote; a machine that dies may also leave zeros at the
end. Both are a torn tail: nothing was done on its account yet, so it is cut off. Everything else
that cannot be read is damage, and reported with its offset.

A compaction writes a new file that begins with a snapshot, makes it durable and gives it the
journal's name: at every moment that name means a whole journal. The file before stays, under a name
with its number, as history for people.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.events import AnyEvent
from holdfast.orchestrator.core.journal import (
    FRAME,
    JournalError,
    JournalLost,
    Record,
    encode_record,
    frame,
)
from holdfast.orchestrator.protocol.atomic_files import sync_directory

from .file_journal_reader import (
    COMPACTED_HEADER,
    COVERED,
    HEADER,
    JournalDamaged,
    JournalReader,
    Snapshot,
    older_files,
)

__all__ = [
    "HEADER",
    "FileJournal",
    "JournalDamaged",
    "JournalError",
    "JournalLost",
    "JournalReader",
    "Record",
    "Snapshot",
]


class FileJournal:
    """The one writer (core.journal.Journal). `append` buffers in the kernel, `commit` makes
    durable: an fdatasync, which is short on one machine and so done in the loop."""

    def __init__(
        self,
        path: Path,
        *,
        bound_bytes: int = limits.JOURNAL_BYTES,
        keep_files: int = limits.JOURNAL_FILES,
    ) -> None:
        """Open or create, read what is there into `snapshot` and `records` and cut off a torn tail.

        Raises JournalLost when somebody else writes it, JournalError when it cannot be opened,
        JournalDamaged when it cannot be trusted.
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
        self._dirty = False

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be opened ({error.strerror})") from None

    def _lock(self, fd: int) -> None:
        """The lock is on the file, not on its name: it must still be the one with the name."""
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
        self._full_at = self._begin(self.snapshot) + self._room(self.snapshot)
        if size != self._end:
            os.fsync(self._fd)
            sync_directory(self.path.parent)
        self._new_name.unlink(missing_ok=True)
        return max(0, size - self._end)

    @staticmethod
    def _begin(snapshot: bytes | None) -> int:
        """Where the records begin."""
        covered = 0 if snapshot is None else FRAME.size + COVERED.size + len(snapshot)
        return len(HEADER) + covered

    def _room(self, snapshot: bytes | None) -> int:
        """Bytes of records before the next compaction: no less than the snapshot has, so that
        compacting never costs more than appending."""
        return max(self._bound_bytes, len(snapshot or b""))

    @property
    def _new_name(self) -> Path:
        return self.path.with_name(f".{self.path.name}.new")

    @property
    def full(self) -> bool:
        return self._end >= self._full_at

    def append(self, now_ns: int, event: AnyEvent) -> None:
        """Add a record. It survives this process from now on, the machine after `commit`.

        Raises JournalError, leaving the file as it was, when it cannot be written.
        """
        data = encode_record(now_ns, event)
        try:
            _write(self._fd, data, self._end)
        except OSError as error:
            self._fail(error)
        self._end += len(data)
        self._num_records += 1
        self._dirty = True

    async def commit(self) -> None:
        """Make everything appended durable. Raises JournalError."""
        self.sync()

    def sync(self) -> None:
        """As `commit`."""
        if not self._dirty:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._fail(error)
        self._dirty = False

    async def compact(self, snapshot: bytes) -> None:
        """Begin a new file with a snapshot of everything so far. Where that cannot be written, the
        old file goes on, and it is tried again when as much again has been appended."""
        data = COMPACTED_HEADER + frame(COVERED.pack(self._num_records) + snapshot)
        try:
            fd = self._write_new(data)
        except OSError:
            self._full_at = self._end + self._bound_bytes
            self.sync()
            return
        try:
            self._put_aside()
            self._new_name.replace(self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            # Nobody knows which of the two has the name now: whoever opens it will see.
            os.close(fd)
            self._fail(error)
        os.close(self._fd)
        self._fd, self._end, self._dirty = fd, len(data), False
        self._full_at = self._end + self._room(snapshot)
        for path in older_files(self.path)[: -self._keep_files or None]:
            path.unlink(missing_ok=True)

    def _write_new(self, data: bytes) -> int:
        """The new file under its temporary name, durable and locked."""
        self._new_name.unlink(missing_ok=True)
        fd = os.open(self._new_name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, data, 0)
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            self._new_name.unlink(missing_ok=True)
            raise
        return fd

    def _put_aside(self) -> None:
        """A second name for the file that is about to lose its own."""
        if self._keep_files:
            aside = self.path.with_name(f"{self.path.name}.{self._num_records:012d}")
            aside.unlink(missing_ok=True)
            os.link(self.path, aside)

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


def _write(fd: int, data: bytes, at: int) -> None:
    """All of it. Raises OSError."""
    written = os.pwrite(fd, data, at)
    while written < len(data):
        written += os.pwrite(fd, data[written:], at + written)
