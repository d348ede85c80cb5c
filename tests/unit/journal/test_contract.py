"""Promises of a journal, in each of the three stores."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest

from holdfast.orchestrator.core.journal import JournalError, JournalLost, frame
from holdfast.orchestrator.errors import Damaged
from holdfast.orchestrator.journal.chunk_journal import read

from .places import KINDS, Place, opened_place, record, write


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractAsyncContextManager[Place]:
    return opened_place(request.param, tmp_path)


async def test_what_was_committed_is_read_by_the_next_controller(place: Place) -> None:
    journal = await place.open()
    assert journal.records == [] and journal.snapshot is None
    await write(journal, 1, 2)
    await write(journal, 3)
    journal.append(*record(4))  # never committed
    assert journal.num_pending == 1 and not journal.problem
    journal.close()
    again = await place.open()
    assert again.records == [record(1), record(2), record(3)] and again.snapshot is None
    await write(again, 5)
    assert place.read() == (0, [1, 2, 3, 5])


async def test_a_snapshot_replaces_what_is_before_it_and_no_record_since(place: Place) -> None:
    journal = await place.open()
    await write(journal, 1, 2)
    journal.append(*record(3))  # not committed: the snapshot covers it
    await journal.compact(b"state after 3")
    await write(journal, 4)
    journal.close()
    again = await place.open()
    assert again.snapshot == b"state after 3" and again.records == [record(4)]
    assert place.read() == (3, [4])
    await again.compact(b"state after 4")
    await again.compact(b"the same")
    again.close()
    third = await place.open()
    assert (third.snapshot, third.records) == (b"the same", [])
    assert place.read() == (4, [])


async def test_there_is_one_writer(place: Place) -> None:
    """The first writer of files stays while it lives; elsewhere the last one wins."""
    first = await place.open()
    await write(first, 1)
    if place.kind == "files":
        with pytest.raises(JournalLost, match="another controller writes it"):
            await place.open()
        await write(first, 2)
        first.close()
        assert (await place.open()).records == [record(1), record(2)]
        return
    second = await place.open()
    with pytest.raises(JournalLost, match="another controller"):
        await write(first, 2)
    with pytest.raises(JournalLost):
        await first.compact(b"state of the first one")
    await write(second, 3)
    again = await place.open()
    assert again.snapshot is None and again.records == [record(1), record(3)]


async def test_a_full_journal_is_not_full_after_its_snapshot(place: Place) -> None:
    journal = await place.open()
    journal._full_at = 1000
    number = 0
    while not journal.full:
        number += 1
        await write(journal, number)
    assert 5 < number < 12
    await journal.compact(b"state")
    assert not journal.full and place.read() == (number, [])
    journal.close()
    again = await place.open()
    assert again._full_at == place.store().full_at(5)


async def test_a_reader_that_follows_gets_every_record_once(place: Place) -> None:
    journal, follower, after, seen = await place.open(), place.store(), "", 0
    if not follower.keeps_history:
        return
    for number in range(1, 30):
        await write(journal, 2 * number - 1)
        journal.append(*record(2 * number))
        if number % 3 == 0:
            await journal.compact(b"state after %d" % number)
        if number % 2 == 0:
            for chunk in read(follower, after, history=True):
                assert chunk.snapshot is None or chunk.covered == seen
                assert [one.now_ns for one in chunk.records] == [
                    seen + 1 + index for index in range(len(chunk.records))
                ]
                seen, after = seen + len(chunk.records), chunk.name
    assert seen >= 54


async def test_records_that_need_not_be_durable_survive_the_process_where_it_costs_little(
    place: Place,
) -> None:
    journal = await place.open()
    await write(journal, 1)
    journal.append(*record(2))
    await journal.commit(durable=False)
    assert place.read() == (0, [1, 2] if place.kind == "files" else [1])
    assert journal.num_pending == 1
    await write(journal, 3)
    assert place.read() == (0, [1, 2, 3]) and not journal.num_pending


async def test_damage_is_named_with_its_place_and_changes_nothing(place: Place) -> None:
    journal = await place.open()
    await write(journal, 1)
    journal.close()
    place.change("tail-", lambda data: data[:-1] + bytes([data[-1] ^ 16]))
    for _ in range(2):
        with pytest.raises(JournalError, match=r"damaged: .*Nothing was changed") as raised:
            await place.open()
        assert isinstance(raised.value, Damaged)
        assert str(place.store().place) in str(raised.value)


async def test_a_record_of_an_unknown_type_is_not_called_damaged(place: Place) -> None:
    journal = await place.open()
    journal._pending.append(frame(msgspec.msgpack.encode((1, {"type": "teleported"}))))
    await journal.commit()
    journal.close()
    with pytest.raises(JournalError, match=r"not an event: .*use the Holdfast that") as raised:
        await place.open()
    assert not isinstance(raised.value, Damaged)
