"""What of a job's journal counts after controllers have overtaken one another. The store is a
dictionary; tests/e2e/ray/test_journal.py has the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from orchestrator.backends.ray.journal import KvJournal, read
from orchestrator.backends.ray.kv import Keys
from orchestrator.core.events import SuspendRequested
from orchestrator.core.journal import JournalLost, Record


class Store(Keys):
    """In memory."""

    def __init__(self) -> None:
        super().__init__("job")
        self._values: dict[str, bytes] = {}
        self.written: Callable[[str], object] = lambda key: None
        """Told of each key that was put, before its writer does anything else."""

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self.written(key)

    def create(self, key: str, value: bytes) -> bool:
        return self._values.setdefault(key, value) is value

    def exists(self, key: str) -> bool:
        return key in self._values

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._values.pop(key, None)

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._values if key.startswith(prefix))


@pytest.fixture
def store() -> Store:
    return Store()


def record(number: int) -> Record:
    return Record(number, SuspendRequested(by=f"person {number}"))


def write(journal: KvJournal, number: int) -> None:
    journal.append(*record(number))
    asyncio.run(journal.commit())


def overtaken(store: Store) -> tuple[KvJournal, KvJournal]:
    """A controller with one record, and its successor, which has read it."""
    old = KvJournal(store, "job")
    write(old, 1)
    return old, KvJournal(store, "job")


def opened(store: Store) -> tuple[bytes | None, list[Record]]:
    journal = KvJournal(store, "job")
    return journal.snapshot, journal.records


@pytest.mark.parametrize("first", ["old", "new"])
def test_what_an_overtaken_controller_committed_is_not_replayed(store: Store, first: str) -> None:
    old, new = overtaken(store)
    if first == "new":
        write(new, 3)
    with pytest.raises(JournalLost):
        write(old, 2)
    if first == "old":
        write(new, 3)
    write(new, 4)
    assert opened(store) == (None, [record(1), record(3), record(4)])


def test_a_snapshot_of_an_overtaken_controller_hides_nothing(store: Store) -> None:
    old, new = overtaken(store)
    with pytest.raises(JournalLost):
        asyncio.run(old.compact(b"state of the old one"))
    write(new, 2)
    assert [chunk.snapshot for chunk in read(store, "job")] == [None, None]
    asyncio.run(new.compact(b"state of the new one"))
    assert opened(store) == (b"state of the new one", [])


def test_what_the_next_controller_has_read_stays_though_its_writer_is_told_that_it_lost(
    store: Store,
) -> None:
    old = KvJournal(store, "job")
    taking_over: list[KvJournal] = []
    store.written = lambda key: taking_over.append(KvJournal(store, "job"))
    with pytest.raises(JournalLost):
        write(old, 1)
    store.written = lambda key: None
    (new,) = taking_over
    assert new.records == [record(1)]
    write(new, 2)
    assert opened(store) == (None, [record(1), record(2)])


def test_who_follows_and_has_read_what_does_not_count_misses_nothing_that_does(
    store: Store,
) -> None:
    old, new = overtaken(store)
    with pytest.raises(JournalLost):
        write(old, 2)
    last = read(store, "job")[-1].key
    write(new, 3)
    later = read(store, "job", last)
    assert [one for chunk in later for one in chunk.records] == [record(3)]
