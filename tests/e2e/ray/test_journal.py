"""A job's journal in the store of a real cluster: reading, takeovers, compaction and damage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from holdfast.orchestrator.backends.ray.kv import JobKeyValueStore
from holdfast.orchestrator.core.events import Tick
from holdfast.orchestrator.core.journal import JournalError, JournalLost
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal, read
from holdfast.orchestrator.journal.gcs_store import GcsStore
from tests.unit.journal.test_gcs_store import record, write

from . import cluster_rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def keys() -> Iterator[JobKeyValueStore]:
    cluster_rig.connected()
    keys = JobKeyValueStore("journal-test")
    keys.clear()
    yield keys
    keys.clear()


def claimed(keys: JobKeyValueStore) -> ChunkJournal:
    return asyncio.run(ChunkJournal.open(GcsStore(keys, "job")))


def test_committed_records_are_read_by_the_next_controller(keys: JobKeyValueStore) -> None:
    first = claimed(keys)
    assert first.records == [] and first.snapshot is None
    write(first, 1)
    write(first, 2)
    write(first, 3)
    first.append(4, Tick())  # never committed
    assert claimed(keys).records == [record(1), record(2), record(3)]


def test_a_controller_cannot_commit_after_a_takeover(keys: JobKeyValueStore) -> None:
    old = claimed(keys)
    write(old, 1)
    new = claimed(keys)
    with pytest.raises(JournalLost, match="another controller has taken it over"):
        write(old, 2)
    with pytest.raises(JournalLost):
        asyncio.run(old.compact(b"state of the old one"))
    write(new, 3)
    again = claimed(keys)
    assert again.snapshot is None and again.records == [record(1), record(3)]


def test_a_snapshot_replaces_the_records_before_it(keys: JobKeyValueStore) -> None:
    journal = claimed(keys)
    write(journal, 1)
    write(journal, 2)
    asyncio.run(journal.compact(b"state after 2"))
    write(journal, 3)
    again = claimed(keys)
    assert again.snapshot == b"state after 2" and again.records == [record(3)]
    write(again, 4)
    chunks = read(GcsStore(keys, "job"))
    assert chunks[0].covered == 2
    later = read(GcsStore(keys, "job"), chunks[1].name)
    assert [one for chunk in later for one in chunk.records] == [record(4)]


def test_a_compaction_that_was_killed_does_no_harm(keys: JobKeyValueStore) -> None:
    journal = claimed(keys)
    write(journal, 1)
    old = [(key, keys.get(key)) for key in keys.list("journal/tail-")]
    asyncio.run(journal.compact(b"state after 1"))
    write(journal, 2)
    for key, value in old:
        assert value is not None
        keys.put(key, value)
    again = claimed(keys)
    assert again.snapshot == b"state after 1" and again.records == [record(2)]


def test_a_reader_during_a_compaction_reads_the_snapshot(keys: JobKeyValueStore) -> None:
    journal = claimed(keys)
    write(journal, 1)
    write(journal, 2)

    class CompactedStore(JobKeyValueStore):
        """The journal is compacted after it was listed and before it is read, so often that no
        listed chunk is kept."""

        def get(self, key: str) -> bytes | None:
            if key.startswith("journal/tail-") and journal.snapshot is None:
                journal.snapshot = b"state after 2"
                for _ in range(2):
                    asyncio.run(journal.compact(journal.snapshot))
            return super().get(key)

    (chunk,) = read(GcsStore(CompactedStore("journal-test"), "job"))
    assert chunk.snapshot == b"state after 2" and chunk.covered == 2


def test_an_unreadable_chunk_is_reported_as_damage(keys: JobKeyValueStore) -> None:
    write(claimed(keys), 1)
    (key,) = keys.list("journal/tail-")
    keys.put(key, b"nonsense")
    with pytest.raises(JournalError, match=f"damaged: {key.removeprefix('journal/')}"):
        read(GcsStore(keys, "job"))
