"""What of a job's journal counts after controllers have overtaken one another. The store is a
dictionary; tests/e2e/ray/test_journal.py has the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from holdfast.orchestrator.backends.ray.kv import JobKeyValueStore
from holdfast.orchestrator.core.events import SuspendRequested
from holdfast.orchestrator.core.journal import JournalError, JournalLost, Record
from holdfast.orchestrator.hosts.ray.gcs_journal import BASIS, EPOCH, Chunk, KvJournal, read


class Store(JobKeyValueStore):
    """In memory."""

    def __init__(self) -> None:
        super().__init__("job")
        self._values: dict[str, bytes] = {}
        self.written: Callable[[str], object] = lambda key: None
        """Told of each chunk that was put, before its writer does anything else."""

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if not key.startswith(EPOCH):
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


def records(chunks: list[Chunk]) -> list[Record]:
    return [one for chunk in chunks for one in chunk.records]


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
    assert records(read(store, "job", last)) == [record(3)]
    last = read(store, "job")[-1].key
    write(new, 4)
    assert records(read(store, "job", last)) == [record(4)]


def test_what_a_controller_between_two_others_had_not_read_counts_for_nobody(store: Store) -> None:
    """It lives as long as both, and could have gone on from there."""
    first, second = overtaken(store)
    with pytest.raises(JournalLost):
        write(first, 2)
    third = KvJournal(store, "job")
    assert third.records == [record(1)]
    with pytest.raises(JournalLost):
        write(second, 3)
    write(third, 4)
    assert opened(store) == (None, [record(1), record(4)])


def test_what_a_controller_wrote_after_its_successor_had_read_it_counts_for_nobody(
    store: Store,
) -> None:
    first, second = overtaken(store)
    third = KvJournal(store, "job")
    for lost, number in ((first, 2), (second, 3)):
        with pytest.raises(JournalLost):
            write(lost, number)
    assert opened(store) == (None, [record(1)])
    with pytest.raises(JournalLost):
        write(third, 4)


def test_a_controller_that_took_over_and_has_not_said_what_it_had_read_changes_nothing(
    store: Store,
) -> None:
    first = KvJournal(store, "job")
    write(first, 1)
    assert store.create(f"{EPOCH}000002", b"")
    with pytest.raises(JournalLost):
        write(first, 2)
    third = KvJournal(store, "job")
    assert third.records == [record(1), record(2)]
    write(third, 3)
    store.put(f"{EPOCH}000002", BASIS.pack(1, 1))  # it lives after all, and had read less
    assert opened(store) == (None, [record(1), record(2), record(3)])


def test_who_follows_gets_every_record_across_compactions(store: Store) -> None:
    journal, after, followed = KvJournal(store, "job"), "", list[Record]()
    for number in range(1, 10):
        write(journal, 3 * number)
        journal.append(*record(3 * number + 1))  # not written yet when it is compacted
        asyncio.run(journal.compact(b"state"))
        write(journal, 3 * number + 2)
        for chunk in read(store, "job", after, history=True):
            assert chunk.snapshot is None or chunk.covered == len(followed)
            followed += chunk.records
            after = chunk.key
    assert followed == [record(number) for number in range(3, 30)]


def test_what_came_since_the_snapshot_before_the_last_is_kept_and_nothing_older(
    store: Store,
) -> None:
    journal = KvJournal(store, "job")
    for number in range(1, 6):
        write(journal, number)
        asyncio.run(journal.compact(b"state after %d" % number))
        journal = KvJournal(store, "job")  # also when controllers change
    kept = read(store, "job", history=True)
    assert [chunk.covered or chunk.records for chunk in kept] == [4, [record(5)], 5]
    assert len([*store.list("journal/tail-"), *store.list("journal/snap-")]) == 3
    assert journal.snapshot == b"state after 5" and journal.records == []


def test_who_reads_while_another_takes_over_and_compacts_sees_its_snapshot(store: Store) -> None:
    first = KvJournal(store, "job")
    write(first, 1)
    lists, listed = store.list, []

    def list_keys(prefix: str) -> list[str]:
        found = lists(prefix)
        listed.append(prefix)
        if len(listed) == 1:
            asyncio.run(KvJournal(store, "job").compact(b"state"))
        return found

    store.list = list_keys  # type: ignore[method-assign]
    assert [chunk.snapshot for chunk in read(store, "job")] == [b"state"]


def test_records_of_an_owner_that_never_said_what_it_had_read_are_not_passed_over(
    store: Store,
) -> None:
    """Of an earlier Holdfast: to read nothing would begin the job anew."""
    write(KvJournal(store, "job"), 1)
    store.put(f"{EPOCH}000001", b"")
    with pytest.raises(JournalError, match="another version of Holdfast"):
        KvJournal(store, "job")
