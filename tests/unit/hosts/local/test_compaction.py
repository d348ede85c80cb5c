"""Compacting a journal loses nothing, whenever it is killed and while other processes read."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.core.events import NodeLost
from holdfast.orchestrator.core.journal import JournalLost, Record
from holdfast.orchestrator.hosts.local import file_journal
from holdfast.orchestrator.hosts.local.file_journal import (
    FileJournal,
    JournalReader,
    Snapshot,
    older_files,
)

PADDING = 100
"""Bytes of detail in a record."""


def record(number: int) -> Record:
    return Record(number, NodeLost(node=f"node-{number}", cause="gone", detail="x" * PADDING))


def write(journal: FileJournal, numbers: range) -> None:
    """Append numbered records, and compact a full journal: its snapshot is the next number."""
    for number in numbers:
        journal.append(*record(number))
        if journal.full:
            asyncio.run(journal.compact(str(number + 1).encode()))
        else:
            journal.sync()


def numbers_of(reader: JournalReader) -> list[int | str]:
    """The numbers of records; a snapshot as text."""
    return [
        f"snapshot {item.data.decode()}" if isinstance(item, Snapshot) else item.now_ns
        for item in reader.read()
    ]


def held(path: Path, **options: Any) -> tuple[int, list[int]]:
    """(number of records in the snapshot, records after it), as the next controller reads them."""
    journal = FileJournal(path, **options)
    covered = int(journal.snapshot) if journal.snapshot is not None else 0
    after = [now_ns for now_ns, _ in journal.records]
    journal.close()
    return covered, after


def test_a_snapshot_replaces_all_records_before_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path, bound_bytes=1000)
    write(journal, range(50))
    assert path.stat().st_size < 2000
    journal.close()
    covered, after = held(path)
    assert covered > 40 and after == list(range(covered, 50))
    journal = FileJournal(path, bound_bytes=1000)
    write(journal, range(50, 60))
    journal.close()
    covered, after = held(path)
    assert covered > 50 and after == list(range(covered, 60))


def test_a_big_snapshot_is_not_written_again_for_every_record(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "journal", bound_bytes=100)
    journal.append(*record(0))
    assert journal.full
    asyncio.run(journal.compact(bytes(10_000)))
    number = 1
    while not journal.full:
        journal.append(*record(number))
        number += 1
    assert number * PADDING > 5_000
    journal.close()


def killed_in(path: Path, call: int, work: Callable[[], None]) -> bool:
    """Run `work` in a process that is killed at its `call`th change of the disk; a write is killed
    halfway. Returns whether `work` finished before."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    done = 0
    real = {name: getattr(os, name) for name in ("pwrite", "fsync", "link", "replace", "unlink")}

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
        path = tmp_path / f"{call}" / "journal"
        path.parent.mkdir()
        journal = FileJournal(path, bound_bytes=10_000_000)
        write(journal, range(20))
        journal.close()

        def work(path: Path = path) -> None:
            journal = FileJournal(path, bound_bytes=1)
            asyncio.run(journal.compact(b"20"))
            journal.append(*record(20))

        through = killed_in(path, call, work)
        covered, after = held(path)
        assert [*range(covered), *after] in (list(range(20)), list(range(21)))
        assert not list(path.parent.glob(".journal*")), "no temporary file is left"
        reader = JournalReader(path, history=True)
        read = numbers_of(reader)
        assert read == [*range(covered), *after], "history has every record once"
        reader.close()
        journal = FileJournal(path, bound_bytes=1)
        write(journal, range(len(read), 30))
        journal.close()
        covered, after = held(path)
        assert [*range(covered), *after] == list(range(30))
    assert call > 6


def test_a_writer_killed_while_it_compacts_leaves_a_journal_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    script = """
import asyncio, sys
from pathlib import Path
from holdfast.orchestrator.core.events import NodeLost
from holdfast.orchestrator.core.journal import JournalLost, Record
from holdfast.orchestrator.hosts.local.file_journal import FileJournal
journal = FileJournal(Path(sys.argv[1]), bound_bytes=3000, keep_files=2)
number = int(journal.snapshot or 0) + len(journal.records)
print(number, flush=True)
while True:
    journal.append(number, NodeLost(node=f"node-{number}", cause="gone", detail="x" * 500))
    number += 1
    if journal.full:
        asyncio.run(journal.compact(str(number).encode()))
"""
    seen = 0
    for life in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
        )
        reader, target = JournalReader(path), seen + 200 + 37 * life
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) >= seen
            while reader.num_records < target:
                for _ in reader.read():
                    pass
        finally:
            process.kill()
            process.communicate()
            reader.close()
        covered, after = held(path, bound_bytes=3000, keep_files=2)
        assert after == list(range(covered, covered + len(after)))
        assert covered + len(after) >= target, "what a reader has seen is kept"
        seen = covered + len(after)


def test_a_reader_that_follows_sees_every_record_once_while_it_is_compacted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path, bound_bytes=400)
    reader, seen = JournalReader(path), []
    for number in range(60):
        write(journal, range(number, number + 1))
        if number % 11 == 0:  # several compactions between two reads
            seen += numbers_of(reader)
    seen += numbers_of(reader)
    assert seen == list(range(60)) and reader.num_records == 60
    reader.close()
    journal.close()


def test_a_reader_that_was_too_slow_gets_the_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path, bound_bytes=400, keep_files=0)
    reader = JournalReader(path)
    write(journal, range(2))
    assert numbers_of(reader) == [0, 1]
    write(journal, range(2, 60))
    read = numbers_of(reader)
    # The rest of the file that the reader had open, then a gap.
    (at,) = [index for index, item in enumerate(read) if isinstance(item, str)]
    covered = int(str(read[at]).removeprefix("snapshot "))
    assert read[:at] == list(range(2, 2 + at)) and read[at + 1 :] == list(range(covered, 60))
    assert covered > 50 and reader.num_records == 60
    assert older_files(path) == []
    reader.close()
    journal.close()


def test_history_begins_where_the_oldest_kept_file_does(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path, bound_bytes=400, keep_files=3)
    write(journal, range(60))
    assert len(older_files(path)) == 3
    reader = JournalReader(path, history=True)
    first, *rest = numbers_of(reader)
    covered = int(str(first).removeprefix("snapshot "))
    assert 40 < covered < 52 and rest == list(range(covered, 60))
    write(journal, range(60, 70))
    assert numbers_of(reader) == list(range(60, 70))
    reader.close()
    journal.close()


def test_a_compacted_journal_still_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = FileJournal(path, bound_bytes=1)
    waiting = os.open(path, os.O_RDWR)  # a writer that opened the file before it was replaced
    write(first, range(3))
    with pytest.raises(JournalLost, match="another controller writes it"):
        FileJournal(path)
    assert not os.path.samestat(os.fstat(waiting), path.stat())
    os.close(waiting)
    first.close()
    FileJournal(path).close()


def test_a_full_disk_keeps_the_old_file_in_use(tmp_path: Path) -> None:
    """A limit on the file size stands for a full disk."""
    path = tmp_path / "journal"
    script = """
import asyncio, resource, signal, sys
from pathlib import Path
from holdfast.orchestrator.core.events import Tick
from holdfast.orchestrator.hosts.local.file_journal import FileJournal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = FileJournal(Path(sys.argv[1]), bound_bytes=100)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for number in range(20):
    journal.append(number, Tick())
    if journal.full:
        asyncio.run(journal.compact(bytes(2000)))
journal.close()
"""
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    assert held(path) == (0, list(range(20)))
    assert [one.name for one in tmp_path.iterdir()] == ["journal"]


def test_a_disk_without_room_for_another_name_keeps_the_old_file_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name needs a block of the directory, or an inode of a tmpfs."""

    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "journal"
    journal = FileJournal(path, bound_bytes=1)
    with monkeypatch.context() as patched:
        patched.setattr(file_journal.os, "link", full)
        write(journal, range(3))
    assert [one.name for one in tmp_path.iterdir()] == ["journal"]
    write(journal, range(3, 4))
    journal.close()
    assert held(path) == (4, [])


def test_a_reader_continues_when_the_file_it_opens_next_was_just_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path, bound_bytes=100, keep_files=8)
    reader = JournalReader(path)
    write(journal, range(1))
    assert len(list(reader.read())) == 1
    for number in range(1, 30):
        write(journal, range(number, number + 1))
    kept = older_files(path)
    assert len(kept) > 3
    for deleted in kept:
        deleted.unlink()
    monkeypatch.setattr(file_journal, "older_files", lambda _path: kept)
    assert "snapshot" in str(numbers_of(reader))
    assert reader.num_records == 30
    reader.close()
    journal.close()
