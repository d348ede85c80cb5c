"""The journal in a ConfigMap: its size, and who may write it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from holdfast.orchestrator.core.journal import JournalError, JournalLost
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal
from holdfast.orchestrator.journal.configmap_store import MAX_BYTES, WRITER, ConfigMapStore
from holdfast.orchestrator.kube.names import Owner

from .places import PATH, Place, opened_place, record, write

OWNER = Owner("team", "llm", "uid-team-llm")


@pytest.fixture
def place(tmp_path: Path) -> AbstractAsyncContextManager[Place]:
    return opened_place("configmap", tmp_path)


async def test_a_commit_that_no_configmap_holds_is_refused_and_its_snapshot_is_not(
    place: Place,
) -> None:
    journal = await place.open()
    await write(journal, 1)
    for number in range(8000):
        journal.append(*record(number))
    assert journal.full
    with pytest.raises(JournalError, match=f"a ConfigMap holds {MAX_BYTES}"):
        await journal.commit()
    await journal.compact(b"state")
    assert place.read() == (8001, [])
    with pytest.raises(JournalError, match="a ConfigMap holds"):
        await journal.compact(bytes(MAX_BYTES))
    assert place.read() == (8001, [])


async def test_an_edited_or_deleted_object_is_written_again(place: Place) -> None:
    journal = await place.open()
    await write(journal, 1)
    place.api.keep(PATH, place.api.objects[PATH])  # an edited label: another version
    await write(journal, 2)
    del place.api.objects[PATH]
    await write(journal, 3)
    assert place.read() == (0, [1, 2, 3])
    place.api.objects[PATH]["binaryData"].clear()
    place.api.keep(PATH, place.api.objects[PATH])
    with pytest.raises(JournalLost):
        await write(journal, 4)


async def test_a_controller_that_lost_the_journal_writes_no_more(place: Place) -> None:
    journal = await place.open()
    await write(journal, 1)
    place.api.objects[PATH]["metadata"]["annotations"][WRITER] = "another"
    place.api.keep(PATH, place.api.objects[PATH])
    with pytest.raises(JournalLost, match="stands down"):
        await write(journal, 2)


@pytest.mark.parametrize("fresh", [True, False])
async def test_the_journal_of_an_earlier_job_of_the_name_is_left_alone(
    fresh: bool, place: Place
) -> None:
    await write(await place.open(), 1)
    other = Owner(OWNER.namespace, OWNER.name, "another uid")
    with pytest.raises(JournalError, match="belongs to an earlier job of this name"):
        await ChunkJournal.open(ConfigMapStore(place.cluster, other, fresh=fresh))
    again = await ChunkJournal.open(ConfigMapStore(place.cluster, OWNER, fresh=fresh))
    assert again.records == [record(1)]
