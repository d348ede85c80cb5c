"""Records that are valid after takeovers, in a dictionary; tests/e2e/ray has the real store."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.orchestrator.core.events import SuspendRequested
from holdfast.orchestrator.core.journal import JournalLost, Record
from holdfast.orchestrator.journal.chunk_journal import Chunk, ChunkJournal, read
from holdfast.orchestrator.journal.gcs_store import BASIS, EPOCH, GcsStore
from tests.unit.hosts.ray.memory_store import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def record(number: int) -> Record:
    return Record(number, SuspendRequested(by=f"person {number}"))


def claimed(store: MemoryStore) -> ChunkJournal:
    keys = GcsStore(store, "job")
    return ChunkJournal(keys, keys._claim())


def chunks_in(store: MemoryStore, after: str = "", *, history: bool = False) -> list[Chunk]:
    return read(GcsStore(store, "job"), after, history=history)


def write(journal: ChunkJournal, number: int) -> None:
    journal.append(*record(number))
    asyncio.run(journal.commit())


def taken_over(store: MemoryStore) -> tuple[ChunkJournal, ChunkJournal]:
    """A controller with one record, and its successor, which has read it."""
    old = claimed(store)
    write(old, 1)
    return old, claimed(store)


def opened(store: MemoryStore) -> tuple[bytes | None, list[Record]]:
    journal = claimed(store)
    return journal.snapshot, journal.records


def records(chunks: list[Chunk]) -> list[Record]:
    return [one for chunk in chunks for one in chunk.records]


@pytest.mark.parametrize("first", ["old", "new"])
def test_records_that_a_controller_wrote_after_a_takeover_are_not_replayed(
    store: MemoryStore, first: str
) -> None:
    old, new = taken_over(store)
    if first == "new":
        write(new, 3)
    with pytest.raises(JournalLost):
        write(old, 2)
    if first == "old":
        write(new, 3)
    write(new, 4)
    assert opened(store) == (None, [record(1), record(3), record(4)])


def test_a_snapshot_written_after_a_takeover_hides_no_records(store: MemoryStore) -> None:
    old, new = taken_over(store)
    with pytest.raises(JournalLost):
        asyncio.run(old.compact(b"state of the old one"))
    write(new, 2)
    assert [chunk.snapshot for chunk in chunks_in(store)] == [None, None]
    asyncio.run(new.compact(b"state of the new one"))
    assert opened(store) == (b"state of the new one", [])


def test_records_that_the_next_controller_has_read_stay_though_their_writer_raised(
    store: MemoryStore,
) -> None:
    old = claimed(store)
    taking_over: list[ChunkJournal] = []
    store.on_chunk = lambda key: taking_over.append(claimed(store))
    with pytest.raises(JournalLost):
        write(old, 1)
    store.on_chunk = lambda key: None
    (new,) = taking_over
    assert new.records == [record(1)]
    write(new, 2)
    assert opened(store) == (None, [record(1), record(2)])


def test_a_follower_that_has_read_invalid_records_misses_no_valid_ones(store: MemoryStore) -> None:
    old, new = taken_over(store)
    with pytest.raises(JournalLost):
        write(old, 2)
    last = chunks_in(store)[-1].name
    write(new, 3)
    assert records(chunks_in(store, last)) == [record(3)]
    last = chunks_in(store)[-1].name
    write(new, 4)
    assert records(chunks_in(store, last)) == [record(4)]


def test_records_that_no_later_controller_has_read_are_invalid(store: MemoryStore) -> None:
    """The controller in between lives, and could have continued from them."""
    first, second = taken_over(store)
    with pytest.raises(JournalLost):
        write(first, 2)
    third = claimed(store)
    assert third.records == [record(1)]
    with pytest.raises(JournalLost):
        write(second, 3)
    write(third, 4)
    assert opened(store) == (None, [record(1), record(4)])


def test_records_written_after_two_takeovers_are_invalid(store: MemoryStore) -> None:
    first, second = taken_over(store)
    third = claimed(store)
    for lost, number in ((first, 2), (second, 3)):
        with pytest.raises(JournalLost):
            write(lost, number)
    assert opened(store) == (None, [record(1)])
    with pytest.raises(JournalLost):
        write(third, 4)


def test_a_controller_that_has_not_recorded_its_basis_changes_nothing(store: MemoryStore) -> None:
    first = claimed(store)
    write(first, 1)
    assert store.create(f"{EPOCH}000002", b"")
    with pytest.raises(JournalLost):
        write(first, 2)
    third = claimed(store)
    assert third.records == [record(1), record(2)]
    write(third, 3)
    store.put(f"{EPOCH}000002", BASIS.pack(1, 1))  # it was only slow, and had read less
    assert opened(store) == (None, [record(1), record(2), record(3)])


def test_a_follower_gets_every_record_across_compactions(store: MemoryStore) -> None:
    journal, after, followed = claimed(store), "", list[Record]()
    for number in range(1, 10):
        write(journal, 3 * number)
        journal.append(*record(3 * number + 1))  # not written yet when it is compacted
        asyncio.run(journal.compact(b"state"))
        write(journal, 3 * number + 2)
        for chunk in chunks_in(store, after, history=True):
            assert chunk.snapshot is None or chunk.covered == len(followed)
            followed += chunk.records
            after = chunk.name
    assert followed == [record(number) for number in range(3, 30)]


def test_chunks_since_the_second_to_last_snapshot_are_kept_and_no_older_ones(
    store: MemoryStore,
) -> None:
    journal = claimed(store)
    for number in range(1, 6):
        write(journal, number)
        asyncio.run(journal.compact(b"state after %d" % number))
        journal = claimed(store)  # also when controllers change
    kept = chunks_in(store, history=True)
    assert [chunk.covered or chunk.records for chunk in kept] == [4, [record(5)], 5]
    assert len([*store.list("journal/tail-"), *store.list("journal/snap-")]) == 3
    assert journal.snapshot == b"state after 5" and journal.records == []


def test_a_reader_during_a_takeover_and_compaction_sees_the_snapshot(store: MemoryStore) -> None:
    first = claimed(store)
    write(first, 1)
    lists, listed = store.list, []

    def list_keys(prefix: str) -> list[str]:
        found = lists(prefix)
        listed.append(prefix)
        if len(listed) == 1:
            asyncio.run(claimed(store).compact(b"state"))
        return found

    store.list = list_keys  # type: ignore[method-assign]
    assert [chunk.snapshot for chunk in chunks_in(store)] == [b"state"]
