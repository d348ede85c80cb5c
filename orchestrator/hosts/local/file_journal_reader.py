"""Reading a journal's files: the live one and the older ones that a compaction has put aside.

Owns: the file format, telling a torn tail from damage, and following a journal while its writer
compacts it. Must not: write, or know what an event means.

A file is a 20-byte header (16 bytes magic, 4 bytes format version) and frames (core/journal.py). In
version 1 every frame is a record. Version 2 is a file that a compaction began: its first frame is a
snapshot, 8 bytes (number of records that it covers, little-endian) and the snapshot itself.

Beside the live file `journal` lie those that it has replaced, `journal.000000001234`: the number is
that of the records up to their end. They are history for people; no controller needs them, and the
oldest are deleted.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from holdfast.orchestrator.core.journal import FRAME, JournalError, Record, decode_body
from holdfast.orchestrator.errors import Damaged

MAGIC = b"holdfast journal"
PLAIN, COMPACTED = 1, 2
HEADER = MAGIC + struct.pack("<I", PLAIN)
COMPACTED_HEADER = MAGIC + struct.pack("<I", COMPACTED)
COVERED = struct.Struct("<Q")
ZERO_TAIL_BYTES = 16
"""So many zero bytes at the end of a file are blocks that never reached the disk; no event ends in
them."""


class JournalDamaged(JournalError, Damaged):
    """Something before the end of the file is not what was written."""

    def __init__(self, path: Path, offset: int, what: str) -> None:
        self.path, self.offset = path, offset
        super().__init__(
            f"{path}: damaged at byte {offset}: {what}. Nothing was changed. Training is not "
            f"affected; restore the file from a copy, or remove the job and start it again from "
            f"its checkpoint"
        )


class Snapshot(NamedTuple):
    """Stands for all records before it."""

    num_records: int
    data: bytes


def older_files(path: Path) -> list[Path]:
    """The files that this journal has replaced and that are kept, oldest first."""
    found = []
    with_number = re.compile(re.escape(path.name) + r"\.\d{12}")
    for other in path.parent.glob(f"{path.name}.*"):
        # A compaction that was killed leaves a second name of the live file.
        if with_number.fullmatch(other.name) and not _same(other, path):
            found.append(other)
    return sorted(found)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return True  # deleted a moment ago


class JournalReader:
    """Reads to the last whole record; usable while another process writes and compacts.

    `read()` may be called again and then goes on where it stopped. A Snapshot comes where what it
    covers cannot be had: at the beginning, or when this reader was too slow. With `history` the
    beginning is that of the oldest file that is kept.
    """

    def __init__(self, path: Path, *, history: bool = False) -> None:
        self._path = path
        self._history = history
        self._file: _File | None = None
        self.num_records = 0
        """Records from the job's beginning to here."""

    @property
    def offset(self) -> int:
        """End of the last whole record in the file at hand."""
        return self._file.offset if self._file is not None else 0

    def read(self) -> Iterator[Record | Snapshot]:
        """What is whole by now. Raises JournalDamaged, JournalError."""
        if self._file is None:
            self._file = self._after(-1) if self._history else _File(self._path)
        yield from self._whole(self._file)
        while not self._file.is_at(self._path):
            # Once more: before it got its name, the writer ended this one.
            yield from self._whole(self._file)
            self._file.close()
            self._file = self._after(self.num_records)
            yield from self._whole(self._file)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _whole(self, file: _File) -> Iterator[Record | Snapshot]:
        for item in file.read():
            if isinstance(item, Record):
                self.num_records += 1
                yield item
            elif item.num_records != self.num_records:
                self.num_records = item.num_records
                yield item

    def _after(self, num_records: int) -> _File:
        """The oldest file with records after so many."""
        for path in older_files(self._path):
            if int(path.name.rpartition(".")[2]) > num_records:
                try:
                    return _File(path)
                except JournalError:
                    if path.exists():
                        raise
                    # The writer deleted it a moment ago: the next one begins with a snapshot.
        return _File(self._path)


class _File:
    """One of them, kept open: it may be replaced and deleted while it is read."""

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
        """Whether a name still means this file."""
        try:
            return os.path.samestat(os.fstat(self._open.fileno()), path.stat())
        except OSError:
            return True  # deleted with its job: there is nothing else to go on with

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
            # Its name is given to a file only when the snapshot is durable.
            raise JournalDamaged(self._path, at, "the snapshot is not whole")

    def _record(self, body: bytes, offset: int) -> Record:
        try:
            return decode_body(body)
        except ValueError as error:
            # Its checksum holds, so this is what was written.
            raise JournalError(
                f"{self._path}: byte {offset}: {error}; use the Holdfast that wrote it"
            ) from None

    def _snapshot(self, body: bytes, offset: int) -> Snapshot:
        if len(body) < COVERED.size:
            raise JournalDamaged(self._path, offset, "the snapshot is too short")
        return Snapshot(COVERED.unpack_from(body)[0], body[COVERED.size :])

    def _check_header(self, data: bytes) -> int:
        """The version; 0 when the header is not whole yet."""
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
        """Where the frame at `at` ends; None for a tail that is not whole."""
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
