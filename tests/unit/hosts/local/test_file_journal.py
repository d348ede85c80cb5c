"""The journal survives a kill at any byte and never hides damage."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.orchestrator.core.events import ActionSucceeded, AnyEvent, NodeLost, Tick
from holdfast.orchestrator.core.journal import JournalError, Record, frame
from holdfast.orchestrator.errors import Damaged
from holdfast.orchestrator.hosts.local import file_journal
from holdfast.orchestrator.hosts.local.file_journal import (
    HEADER,
    FileJournal,
    JournalDamaged,
    JournalReader,
)

# Short, because a test cuts the journal at every byte.
EVENTS: list[AnyEvent] = [
    Tick(),
    NodeLost(node="n", cause="gone"),
    ActionSucceeded(action_id=0, generation=0),
]
RECORDS = [Record(1000 + number, event) for number, event in enumerate(EVENTS)]


def write(path: Path, records: list[Record] = RECORDS) -> list[int]:
    """Write a journal with these records. Returns where each record ends."""
    journal, ends = FileJournal(path), []
    for record in records:
        journal.append(*record)
        journal.sync()
        ends.append(path.stat().st_size)
    journal.close()
    return ends


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    journal = FileJournal(tmp_path / "journal")
    assert journal.records == RECORDS
    assert journal.cut_bytes == 0
    journal.close()


def test_a_journal_cut_at_any_byte_keeps_every_whole_record(tmp_path: Path) -> None:
    ends = write(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for length in range(len(data) + 1):
        path = tmp_path / "cut"
        path.write_bytes(data[:length])
        kept = sum(end <= length for end in ends)
        assert list(JournalReader(path).read()) == RECORDS[:kept]
        journal = FileJournal(path)
        assert journal.records == RECORDS[:kept]
        journal.append(5000, Tick())
        journal.close()
        assert list(JournalReader(path).read()) == [*RECORDS[:kept], Record(5000, Tick())]
        path.unlink()


def test_zeros_at_the_end_are_a_torn_tail(tmp_path: Path) -> None:
    """After a power failure the file may end with blocks that were never written."""
    path = tmp_path / "journal"
    ends = write(path)
    data = path.read_bytes()
    for whole in (len(data), ends[1] + 3, ends[1] + 20):
        path.write_bytes(data[:whole] + bytes(512))
        journal = FileJournal(path)
        assert journal.records == RECORDS[: sum(end <= whole for end in ends)]
        assert journal.cut_bytes > 0
        journal.close()


def test_a_flipped_bit_anywhere_is_reported_with_its_record_and_changes_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    ends = write(path)
    data = path.read_bytes()
    starts = [len(HEADER), *ends[:-1]]
    for position in range(len(HEADER), len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(JournalDamaged) as raised:
            FileJournal(path)
        record = max(start for start in starts if start <= position)
        assert raised.value.offset == record
        assert f"byte {record}" in str(raised.value)
        assert path.read_bytes() == damaged


def test_a_damaged_header_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    path.write_bytes(b"X" + path.read_bytes()[1:])
    with pytest.raises(JournalDamaged, match="byte 0"):
        FileJournal(path)


def test_a_valid_record_of_unknown_type_is_of_another_version_and_not_damaged(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    ends = write(path)
    with path.open("ab") as file:
        file.write(frame(msgspec.msgpack.encode((1, {"type": "teleported"}))))
    with pytest.raises(JournalError, match="use the Holdfast that wrote it") as raised:
        FileJournal(path)
    assert not isinstance(raised.value, Damaged)
    assert f"byte {ends[-1]}: not an event" in str(raised.value)


def test_a_journal_of_another_version_names_both(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    data = bytearray(path.read_bytes())
    data[16] = 9
    path.write_bytes(data)
    with pytest.raises(JournalError, match="got format version 9; expected 1"):
        FileJournal(path)


def test_there_is_one_writer(tmp_path: Path) -> None:
    first = FileJournal(tmp_path / "journal")
    with pytest.raises(JournalError, match="another controller writes it"):
        FileJournal(tmp_path / "journal")
    first.close()
    FileJournal(tmp_path / "journal").close()


def test_a_reader_follows_while_another_writes(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, reader = FileJournal(path), JournalReader(path)
    for record in RECORDS:
        assert list(reader.read()) == []
        journal.append(*record)
        assert list(reader.read()) == [record]
    journal.close()


def test_a_full_disk_is_reported_and_leaves_whole_records(tmp_path: Path) -> None:
    """A limit on the file size stands for a full disk."""
    path = tmp_path / "journal"
    write(path)
    script = """
import resource, signal, sys
from pathlib import Path
from holdfast.orchestrator.core.events import Tick
from holdfast.orchestrator.core.journal import JournalError
from holdfast.orchestrator.hosts.local.file_journal import FileJournal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
journal = FileJournal(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, resource.RLIM_INFINITY))
try:
    for number in range(10):
        journal.append(2000 + number, Tick())
except JournalError as error:
    print(number, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    written, _, text = done.stdout.partition(" ")
    assert "cannot be written" in text and "training goes on" in text
    assert len(list(JournalReader(path).read())) == len(RECORDS) + int(written)


def test_a_writer_killed_in_the_middle_leaves_a_journal_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    script = """
import sys
from pathlib import Path
from holdfast.orchestrator.core.events import NodeLost
from holdfast.orchestrator.hosts.local.file_journal import FileJournal
journal = FileJournal(Path(sys.argv[1]))
print("open", flush=True)
number = 0
while True:
    journal.append(number, NodeLost(node=f"node-{number}", cause="gone", detail="x" * 500))
    number += 1
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    while path.stat().st_size < 1_000_000:
        os.sched_yield()
    process.kill()
    process.wait()
    process.stdout.close()
    journal = FileJournal(path)
    assert [now_ns for now_ns, _ in journal.records] == list(range(len(journal.records)))
    journal.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs root to mount a small file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_on_a_full_disk_records_wait_in_memory_and_are_written_when_there_is_room(
    small_disk: Path,
) -> None:
    path, ballast = small_disk / "journal", small_disk / "ballast"
    journal = FileJournal(path)
    for record in RECORDS:
        journal.append(*record)
    assert not journal.problem
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1 << 16))
    for number in range(200):
        journal.append(2000 + number, Tick())
    journal.sync()
    assert "No space left on device" in journal.problem and "free disk space" in journal.problem
    assert len(list(JournalReader(path).read())) < len(RECORDS) + 200
    ballast.unlink()
    journal.sync()
    assert not journal.problem
    found = list(JournalReader(path).read())
    assert found == [*RECORDS, *((2000 + number, Tick()) for number in range(200))]
    journal.close()


def test_a_disk_that_is_found_full_at_the_sync_keeps_the_records_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS takes writes and refuses them later. What it has of them is unknown."""

    def full(fd: int) -> None:
        os.ftruncate(fd, synced)
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "journal"
    journal = FileJournal(path)
    journal.append(*RECORDS[0])
    journal.sync()
    synced = path.stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(file_journal.os, "fdatasync", full)
        for record in RECORDS[1:]:
            journal.append(*record)
            journal.sync()
    assert "No space left on device" in journal.problem
    assert journal.num_unwritten == len(RECORDS) - 1
    journal.sync()
    assert not journal.problem and not journal.num_unwritten
    assert list(JournalReader(path).read()) == RECORDS
    journal.close()
