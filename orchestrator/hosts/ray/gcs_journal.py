"""Implements core.journal.Journal in the key-value store of the cluster's head: a snapshot and the
records since.

    journal/epoch-000003          a controller has taken over; kept as long as the job's record. Its
                                  value is its basis: number and epoch of the last chunk it read
    journal/tail-00000017-000003  records of one commit, by the controller of epoch 3
    journal/snap-00000018-000003  replaces everything before it. Chunks since the snapshot before
                                  are kept until the next one, for commands that follow

The store has no compare-and-swap, but it can create a key only where there is none: the controller
that creates the next epoch owns the journal. After every write, and before its actions are carried
out, a writer checks whether the next epoch exists: if so, another controller has taken over
(JournalLost). The new owner reads after it created its epoch, so it sees every earlier write.

A chunk that a writer wrote just before it lost the journal stays, since the new owner may have read
it. Therefore an owner first records its basis, and a chunk counts only if it is reached by
following the bases back from the newest owner that recorded one.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from holdfast.orchestrator import limits
from holdfast.orchestrator.backends.ray.actors import until_head_answers
from holdfast.orchestrator.backends.ray.kv import JobKeyValueStore
from holdfast.orchestrator.core.events import AnyEvent
from holdfast.orchestrator.core.journal import (
    JournalError,
    JournalLost,
    Record,
    decode_records,
    encode_record,
)
from holdfast.orchestrator.errors import HoldfastError

BASIS = struct.Struct("<QQ")
COVERED = struct.Struct("<Q")
EPOCH, TAIL, SNAPSHOT = "journal/epoch-", "journal/tail-", "journal/snap-"
T = TypeVar("T")


class KvJournal:
    """The only writer. Made by `open_journal`."""

    def __init__(self, store: JobKeyValueStore, job: str) -> None:
        """Claims the journal, then reads it. Blocks. Raises JournalError, JournalLost."""
        self._store, self._job = store, job
        self._epoch = 1 + max((_number(key) for key in store.list(EPOCH)), default=0)
        if not store.create(_epoch_key(self._epoch), b""):
            raise JournalLost(f"job {job}: another controller is taking it over")
        self._pending: list[bytes] = []
        self._commit = asyncio.Lock()
        chunks = read(store, job)
        self.snapshot = chunks[0].snapshot if chunks else None
        self.records = [record for chunk in chunks for record in chunk.records]
        self._snapshot = _position(chunks[0].key) if self.snapshot is not None else (0, 0)
        self._bytes = sum(chunk.num_bytes for chunk in chunks)
        self._num_records = len(self.records) + (chunks[0].covered if chunks else 0)
        self._next = 1 + max((_number(chunk.key) for chunk in chunks), default=0)
        basis = _position(chunks[-1].key) if chunks else (0, 0)
        store.put(_epoch_key(self._epoch), BASIS.pack(*basis))

    problem = ""

    @property
    def full(self) -> bool:
        return self._bytes + sum(map(len, self._pending)) > limits.JOURNAL_BYTES

    def append(self, now_ns: int, event: AnyEvent) -> None:
        self._pending.append(encode_record(now_ns, event))
        self._num_records += 1

    async def commit(self) -> None:
        async with self._commit:
            await self._write_pending()

    async def compact(self, snapshot: bytes) -> None:
        covered = self._num_records
        async with self._commit:
            await self._write_pending()  # a command that follows needs them beside the snapshot
            data = COVERED.pack(covered) + zlib.compress(snapshot)
            before, self._snapshot = self._snapshot, await self._write(SNAPSHOT, data)
            self._bytes = 0
            # Readers begin at a snapshot, so an interrupted deletion does no harm.
            await _until_head_answers(self._job, lambda: self._delete(before))

    def _delete(self, before: tuple[int, int]) -> None:
        keys = [*self._store.list(TAIL), *self._store.list(SNAPSHOT)]
        self._store.delete(*[key for key in keys if _position(key) < before])

    async def _write_pending(self) -> None:
        if not self._pending:
            return
        count, chunk = len(self._pending), b"".join(self._pending)
        await self._write(TAIL, chunk)
        self._bytes += len(chunk)
        del self._pending[:count]

    async def _write(self, kind: str, data: bytes) -> tuple[int, int]:
        key = f"{kind}{self._next:08d}-{self._epoch:06d}"
        next_epoch = _epoch_key(self._epoch + 1)

        def write() -> bool:
            self._store.put(key, data)
            return self._store.exists(next_epoch)

        if await _until_head_answers(self._job, write):
            raise JournalLost(f"job {self._job}: another controller has taken it over")
        self._next += 1
        return _position(key)


def exists(store: JobKeyValueStore) -> bool:
    """Whether a controller has ever opened it."""
    return bool(store.list(EPOCH))


async def open_journal(store: JobKeyValueStore, job: str) -> KvJournal:
    return await _until_head_answers(job, lambda: KvJournal(store, job))


class Chunk(NamedTuple):
    """One key's content: a snapshot, or the records of one commit."""

    key: str
    records: list[Record]
    snapshot: bytes | None = None
    covered: int = 0
    """Number of records that the snapshot replaces."""
    num_bytes: int = 0


def read(
    store: JobKeyValueStore, job: str, after: str = "", *, history: bool = False
) -> list[Chunk]:
    """The chunks after the key `after`, from the newest snapshot on; with `history` all that are
    kept, older snapshots among them. Raises JournalError."""
    last = _position(after) if after else (0, 0)
    while True:
        found = _valid_keys(store, job, last)
        snapshots = [index for index, key in enumerate(found) if key.startswith(SNAPSHOT)]
        wanted = found[snapshots[-1] :] if snapshots and not history else found
        chunks = [_chunk(store, job, key) for key in wanted]
        complete = [chunk for chunk in chunks if chunk is not None]
        if len(complete) == len(wanted):
            return complete
        # A compaction has deleted a chunk since they were listed: a snapshot replaces it.


def _valid_keys(store: JobKeyValueStore, job: str, last: tuple[int, int]) -> list[str]:
    """Keys of the chunks after `last` that the newest owner has written or continued from, in
    order. Raises JournalError."""
    # Chunks before epochs: a controller that compacts these chunks has created its epoch before.
    found = sorted([*store.list(TAIL), *store.list(SNAPSHOT)], key=_position)
    epochs = [_number(key) for key in store.list(EPOCH)]
    kept: list[str] = []
    end = None
    for epoch in reversed(epochs):
        if end is not None and epoch != end[1]:
            continue  # the next owner has read nothing of this epoch
        data = store.get(_epoch_key(epoch))
        if not data:
            if any(_position(key)[1] == epoch for key in found):
                raise JournalError(
                    f"job {job}: its journal in the cluster's store was written by another version "
                    f"of Holdfast; nothing was changed and training is not affected"
                )
            continue  # it has not recorded its basis, and has written nothing
        kept += [
            key
            for key in reversed(found)
            if _position(key)[1] == epoch
            and last < _position(key)
            and (end is None or _position(key) <= end)
        ]
        end = BASIS.unpack(data)
        if end <= last:
            break
    return kept[::-1]


def _chunk(store: JobKeyValueStore, job: str, key: str) -> Chunk | None:
    """None: it was deleted."""
    data = store.get(key)
    if data is None:
        return None
    try:
        if key.startswith(SNAPSHOT):
            (covered,) = COVERED.unpack_from(data)
            return Chunk(key, [], zlib.decompress(data[COVERED.size :]), covered)
        return Chunk(key, decode_records(data), num_bytes=len(data))
    except (ValueError, zlib.error, struct.error) as error:
        raise JournalError(
            f"job {job}: its journal in the cluster's store is damaged ({key}: {error}). Nothing "
            f"was changed and training is not affected"
        ) from None


async def _until_head_answers(job: str, work: Callable[[], T]) -> T:
    """Raises JournalError."""
    try:
        return await until_head_answers(work, f"journal of {job}")
    except HoldfastError:
        raise
    except Exception as error:
        raise JournalError(
            f"job {job}: its journal cannot be written ({error}); training goes on without a "
            f"controller"
        ) from None


def _epoch_key(number: int) -> str:
    return f"{EPOCH}{number:06d}"


def _position(key: str) -> tuple[int, int]:
    """Of a chunk: its number, and the epoch of its writer."""
    number, epoch = key.split("-")[1:]
    return int(number), int(epoch)


def _number(key: str) -> int:
    return int(key.partition("-")[2].partition("-")[0])
