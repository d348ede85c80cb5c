"""The journal of a local job survives a kill at any byte and any step, and never hides damage."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.core.events import ActionSucceeded, AnyEvent, NodeLost, Tick
from holdfast.orchestrator.core.journal import JournalDamaged, JournalError, Record
from holdfast.orchestrator.journal import file_store
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal, read
from holdfast.orchestrator.journal.file_store import HEADER, FileStore

from . import places
from .files import append, claimed, live, records

# Short, because a test cuts the journal at every byte.
EVENTS: list[AnyEvent] = [
    Tick(),
    NodeLost(node="n", cause="gone"),
    ActionSucceeded(action_id=0, generation=0),
]
RECORDS = [Record(1000 + number, event) for number, event in enumerate(EVENTS)]


def write(directory: Path, added: list[Record] = RECORDS) -> list[int]:
    """Write a journal with these records. Returns where each record ends."""
    journal, ends = claimed(directory), []
    for one in added:
        append(journal, one)
        ends.append(live(directory).stat().st_size)
    journal.close()
    return ends


def fill(journal: ChunkJournal, numbers: range) -> None:
    """Append numbered records, and compact a full journal: its snapshot is the next number."""
    for number in numbers:
        journal.append(*places.record(number))
        if journal.full:
            asyncio.run(journal.compact(str(number + 1).encode()))
        else:
            asyncio.run(journal.commit())


def held(directory: Path, **options: int) -> tuple[int, list[int]]:
    """(number of records in the snapshot, records after it), as the next controller reads them."""
    journal = claimed(directory, **options)
    covered = int(journal.snapshot) if journal.snapshot is not None else 0
    journal.close()
    return covered, [now_ns for now_ns, _ in journal.records]


class Follower:
    """A reader that prints what `holdfast debug events -f` does."""

    def __init__(self, directory: Path) -> None:
        self.store, self.after, self.num_records = FileStore(directory), "", 0

    def read(self) -> list[int | str]:
        seen: list[int | str] = []
        for chunk in read(self.store, self.after, history=True):
            if chunk.snapshot is not None and chunk.covered != self.num_records:
                seen.append(f"snapshot {chunk.snapshot.decode()}")
                self.num_records = chunk.covered
            seen += [one.now_ns for one in chunk.records]
            self.num_records += len(chunk.records)
            self.after = chunk.name
        return seen


# -- torn tails and damage ---------------------------------------------------------------------
def test_a_journal_cut_at_any_byte_keeps_every_whole_record(tmp_path: Path) -> None:
    ends = write(tmp_path / "journal")
    path = live(tmp_path / "journal")
    data = path.read_bytes()
    for length in range(ends[0], len(data) + 1):  # the first record gets its name when it is whole
        path.write_bytes(data[:length])
        kept = sum(end <= length for end in ends)
        assert records(path.parent) == RECORDS[:kept]
        journal = claimed(path.parent)
        assert journal.records == RECORDS[:kept]
        append(journal, Record(5000, Tick()))
        journal.close()
        assert records(path.parent) == [*RECORDS[:kept], Record(5000, Tick())]


def test_zeros_at_the_end_are_a_torn_tail(tmp_path: Path) -> None:
    """The file may end, after a power failure, with blocks that were never written."""
    ends = write(tmp_path / "journal")
    path = live(tmp_path / "journal")
    data = path.read_bytes()
    for whole in (len(data), ends[1] + 3, ends[1] + 20):
        path.write_bytes(data[:whole] + bytes(512))
        journal = claimed(path.parent)
        assert journal.records == RECORDS[: sum(end <= whole for end in ends)]
        journal.close()
        assert path.stat().st_size in ends


def test_a_flipped_bit_anywhere_is_reported_with_its_chunk_and_changes_nothing(
    tmp_path: Path,
) -> None:
    ends = write(tmp_path / "journal")
    path = live(tmp_path / "journal")
    data = path.read_bytes()
    starts = [len(HEADER), *ends[:-1]]
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        begin = max([0, *(start for start in starts if start <= position)])
        expected = f"{path}: damaged: byte {begin}:"
        if 16 <= position < len(HEADER):
            expected = "got format version .*; expected 1"
        with pytest.raises(JournalError, match=expected) as raised:
            claimed(path.parent)
        assert isinstance(raised.value, JournalDamaged) == (not 16 <= position < len(HEADER))
        assert path.read_bytes() == damaged


def test_a_writer_killed_in_the_middle_leaves_a_journal_that_opens(tmp_path: Path) -> None:
    script = """
import asyncio, sys
from tests.unit.journal.test_file_store import Path, claimed, fill
journal = claimed(Path(sys.argv[1]), bound_bytes=int(sys.argv[2]), keep_files=2)
number = int(journal.snapshot or 0) + len(journal.records)
print(number, flush=True)
while True:
    fill(journal, range(number, number + 1))
    number += 1
"""
    directory, seen = tmp_path / "journal", 0
    for life in range(4):
        bound = 3000 if life else 1_000_000  # at first without a compaction
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(directory), str(bound)],
            stdout=subprocess.PIPE,
            text=True,
        )
        target = seen + 200 + 37 * life
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) >= seen
            reader = Follower(directory)
            while reader.num_records < target:
                reader.read()
        finally:
            process.kill()
            process.communicate()
        covered, after = held(directory, bound_bytes=3000, keep_files=2)
        assert after == list(range(covered, covered + len(after)))
        assert covered + len(after) >= target, "what a reader has seen is kept"
        seen = covered + len(after)


def killed_in(call: int, work: Callable[[], None]) -> bool:
    """Run `work` in a process that is killed at its `call`th change of the disk; a write is killed
    halfway. Returns whether `work` finished before."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    done = 0
    names = ("pwrite", "fsync", "fdatasync", "rename", "unlink")
    real = {name: getattr(os, name) for name in names}

    def interpose(name: str) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done == call:
                if name == "pwrite":
                    fd, data, at = args
                    real[name](fd, data[: len(data) // 2], at)
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*args, **kwargs)

        return act

    try:
        for name in real:
            setattr(os, name, interpose(name))
        work()
    finally:
        os._exit(0)


def test_a_compaction_killed_at_any_step_leaves_a_whole_journal(tmp_path: Path) -> None:
    call, through = 0, False
    while not through:
        call += 1
        directory = tmp_path / f"{call}"
        journal = claimed(directory)
        fill(journal, range(20))
        journal.close()

        def work(directory: Path = directory) -> None:
            journal = claimed(directory, bound_bytes=1)
            journal.append(*places.record(20))
            asyncio.run(journal.compact(b"21"))
            append(journal, places.record(21))

        through = killed_in(call, work)
        covered, after = held(directory)
        assert [*range(covered), *after] in [list(range(end)) for end in (20, 21, 22)]
        names = {path.name for path in directory.iterdir()}
        assert not {name for name in names if not name.isdigit()} - {"lock"}, "a temporary file"
        seen = Follower(directory).read()
        assert seen == [*range(covered), *after], "history has every record once"
        journal = claimed(directory, bound_bytes=1)
        fill(journal, range(len(seen), 30))
        journal.close()
        covered, after = held(directory)
        assert [*range(covered), *after] == list(range(30))
    assert call > 6


# -- compaction and followers --------------------------------------------------------------------
def test_a_snapshot_keeps_the_journal_small(tmp_path: Path) -> None:
    for numbers in (range(50), range(50, 60)):
        journal = claimed(tmp_path / "journal", bound_bytes=1000)
        fill(journal, numbers)
        journal.close()
        assert live(tmp_path / "journal").stat().st_size < 2500
        covered, after = held(tmp_path / "journal")
        assert covered > numbers[-1] - 12 and after == list(range(covered, numbers[-1] + 1))


def test_a_big_snapshot_is_not_written_again_for_every_record(tmp_path: Path) -> None:
    journal = claimed(tmp_path / "journal", bound_bytes=100)
    journal.append(*places.record(0))
    assert journal.full
    asyncio.run(journal.compact(bytes(10_000)))
    number = 1
    while not journal.full:
        append(journal, places.record(number))
        number += 1
    assert number * 100 > 5_000
    journal.close()


def test_history_begins_where_the_oldest_kept_file_does(tmp_path: Path) -> None:
    journal = claimed(tmp_path / "journal", bound_bytes=400, keep_files=3)
    fill(journal, range(60))
    assert len(list((tmp_path / "journal").glob("0*"))) == 4
    reader = Follower(tmp_path / "journal")
    first, *rest = reader.read()
    covered = int(str(first).removeprefix("snapshot "))
    assert 40 < covered < 52 and rest == list(range(covered, 60))
    fill(journal, range(60, 70))
    assert reader.read() == list(range(60, 70))
    journal.close()


def test_a_reader_that_was_too_slow_gets_the_snapshot(tmp_path: Path) -> None:
    journal = claimed(tmp_path / "journal", bound_bytes=400, keep_files=0)
    reader = Follower(tmp_path / "journal")
    fill(journal, range(2))
    assert reader.read() == [0, 1]
    fill(journal, range(2, 60))
    first, *rest = reader.read()
    covered = int(str(first).removeprefix("snapshot "))
    assert rest == list(range(covered, 60)) and covered > 50 and reader.num_records == 60
    journal.close()


def test_a_reader_continues_when_the_file_it_opens_next_was_just_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = claimed(tmp_path / "journal", bound_bytes=100, keep_files=8)
    reader = Follower(tmp_path / "journal")
    fill(journal, range(30))
    paths = reader.store._paths()
    assert len(paths) > 3
    for deleted in paths[:-1]:
        deleted.unlink()
    monkeypatch.setattr(reader.store, "_paths", lambda: paths)
    assert "snapshot" in str(reader.read()) and reader.num_records == 30
    journal.close()


# -- full disks --------------------------------------------------------------------------------
def limited(directory: Path, num_bytes: int, *lines: str) -> None:
    """Run lines with `journal` in a process whose files may have so many bytes: a full disk."""
    script = f"""
import asyncio, resource, signal, sys
from tests.unit.journal.test_file_store import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = claimed(Path(sys.argv[1]), bound_bytes=100)
resource.setrlimit(resource.RLIMIT_FSIZE, ({num_bytes}, resource.RLIM_INFINITY))
"""
    code = script + "\n".join(lines)
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True)


def test_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    ends = write(tmp_path / "journal")
    limited(
        tmp_path / "journal",
        ends[-1] + 150,
        "append(journal, *(Record(2000 + number, Tick()) for number in range(10)))",
        "assert 'cannot be written' in journal.problem and 'free disk space' in journal.problem",
        "assert 5 < journal.num_pending < 10",
    )
    assert len(RECORDS) < len(records(tmp_path / "journal")) < len(RECORDS) + 5


def test_a_snapshot_without_room_leaves_the_old_file_in_use(tmp_path: Path) -> None:
    limited(
        tmp_path / "journal",
        1500,
        "for number in range(20):",
        "    journal.append(number, Tick())",
        "    asyncio.run(journal.compact(bytes(2000)) if journal.full else journal.commit())",
        "journal.close()",
    )
    assert held(tmp_path / "journal") == (0, list(range(20)))
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == ["00000001", "lock"]


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
    directory, ballast = small_disk / "journal", small_disk / "ballast"
    journal = claimed(directory)
    append(journal, *RECORDS)
    assert not journal.problem
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1 << 16))
    more = [Record(2000 + number, Tick()) for number in range(200)]
    append(journal, *more)
    assert "No space left on device" in journal.problem and "free disk space" in journal.problem
    assert len(records(directory)) < len(RECORDS) + 200
    ballast.unlink()
    asyncio.run(journal.commit())
    assert not journal.problem and not journal.num_pending
    assert records(directory) == [*RECORDS, *more]
    journal.close()


def test_a_disk_that_is_found_full_at_the_sync_keeps_the_records_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS takes writes and refuses them later. What it has of them is unknown."""

    def full(fd: int) -> None:
        os.ftruncate(fd, synced)
        raise OSError(errno.ENOSPC, "No space left on device")

    directory = tmp_path / "journal"
    journal = claimed(directory)
    append(journal, RECORDS[0])
    synced = live(directory).stat().st_size
    journal.append(*RECORDS[1])
    asyncio.run(journal.commit(durable=False))
    with monkeypatch.context() as patched:
        patched.setattr(file_store.os, "fdatasync", full)
        append(journal, *RECORDS[2:])
    assert "No space left on device" in journal.problem
    assert journal.num_pending == len(RECORDS) - 1
    asyncio.run(journal.commit())
    assert not journal.problem and not journal.num_pending
    assert records(directory) == RECORDS
    journal.close()


def test_a_directory_that_cannot_be_synced_ends_the_controller_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    journal = claimed(tmp_path / "journal")
    append(journal, *RECORDS)
    with monkeypatch.context() as patched:
        patched.setattr(file_store, "sync_directory", fails)
        with pytest.raises(JournalError, match="Input/output error"):
            asyncio.run(journal.compact(b"3"))
    journal.close()
    assert held(tmp_path / "journal") == (3, [])
