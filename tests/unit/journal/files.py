"""Journals of local jobs, without an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from holdfast.orchestrator.core.journal import Record
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal, read
from holdfast.orchestrator.journal.file_store import FileStore

T = TypeVar("T")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of what waits for nothing, as files do."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


def claimed(directory: Path, **options: int) -> ChunkJournal:
    return at_once(ChunkJournal.open(FileStore(directory, **options)))


def append(journal: ChunkJournal, *added: Record) -> None:
    """Commit each record by itself."""
    for one in added:
        journal.append(*one)
        at_once(journal.commit())


def write(directory: Path, *added: Record) -> None:
    journal = claimed(directory)
    append(journal, *added)
    journal.close()


def records(directory: Path) -> list[Record]:
    """Records as a reader sees them."""
    store = FileStore(directory)
    found = [one for chunk in read(store) for one in chunk.records]
    store.close()
    return found


def live(directory: Path) -> Path:
    """The file that is written."""
    return sorted(path for path in directory.iterdir() if path.name.isdigit())[-1]
