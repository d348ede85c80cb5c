"""A job's journal in the key-value store of the cluster's head: a snapshot and the records since.

Owns: the keys, the fence and the retries. Implements core.journal.Journal. Must not: know what an
event means.

    journal/epoch-000003          a controller has taken over; never deleted while the job exists.
                                  In it, what it goes on from: number and epoch of the last chunk
    journal/tail-00000017-000003  records of one commit, by the controller of epoch 3
    journal/snap-00000018-000003  instead of everything before it; what came after the snapshot
                                  before is kept until the next one, for whoever reads along

The store has no compare-and-swap, but it can create a key only where there is none: who creates the
next epoch owns the journal. A writer looks, after every write and before anything is done on its
account, whether the next epoch exists: if so, somebody else has taken over (JournalLost). A write
that came before the next epoch was created is read by the new owner, since it reads afterwards.

What a writer wrote before it found itself overtaken stays: the new owner may have read it already,
and then it goes on from there. So it says how far it has read before it does anything else, and
what counts is what can be followed back from the newest owner that has said so.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from holdfast.orchestrator import limits
from holdfast.orchestrator.backends.ray.kv import JobKeyValueStore
from holdfast.orchestrator.backends.ray.retry import patiently
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
    """The one writer. Made by `open_journal`."""

    def __init__(self, keys: JobKeyValueStore, job: str) -> None:
        """Claims the journal, then reads it. Blocks. Raises JournalError, JournalLost."""
        self._keys, self._job = keys, job
        self._epoch = 1 + max((_number(key) for key in keys.list(EPOCH)), default=0)
        if not keys.create(_epoch(self._epoch), b""):
            raise JournalLost(f"job {job}: another controller takes it over at this moment")
        self._pending: list[bytes] = []
        self._commit = asyncio.Lock()
        chunks = read(keys, job)
        self.snapshot = chunks[0].snapshot if chunks else None
        self.records = [record for chunk in chunks for record in chunk.records]
        self._snapshot = _rank(chunks[0].key) if self.snapshot is not None else (0, 0)
        self._bytes = sum(chunk.num_bytes for chunk in chunks)
        self._num_records = len(self.records) + (chunks[0].covered if chunks else 0)
        self._next = 1 + max((_number(chunk.key) for chunk in chunks), default=0)
        basis = _rank(chunks[-1].key) if chunks else (0, 0)
        keys.put(_epoch(self._epoch), BASIS.pack(*basis))

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
            await self._write_pending()  # the snapshot has them; who follows has not
            data = COVERED.pack(covered) + zlib.compress(snapshot)
            before, self._snapshot = self._snapshot, await self._write(SNAPSHOT, data)
            self._bytes = 0
            # Readers begin at a snapshot, so what is left of a deletion does no harm.
            await _patiently(self._job, lambda: self._forget(before))

    def _forget(self, before: tuple[int, int]) -> None:
        keys = [*self._keys.list(TAIL), *self._keys.list(SNAPSHOT)]
        self._keys.delete(*[key for key in keys if _rank(key) < before])

    async def _write_pending(self) -> None:
        if not self._pending:
            return
        count, chunk = len(self._pending), b"".join(self._pending)
        await self._write(TAIL, chunk)
        self._bytes += len(chunk)
        del self._pending[:count]

    async def _write(self, kind: str, data: bytes) -> tuple[int, int]:
        key = f"{kind}{self._next:08d}-{self._epoch:06d}"
        after = _epoch(self._epoch + 1)

        def write() -> bool:
            self._keys.put(key, data)
            return self._keys.exists(after)

        if await _patiently(self._job, write):
            raise JournalLost(f"job {self._job}: another controller has taken it over")
        self._next += 1
        return _rank(key)


def begun(keys: JobKeyValueStore) -> bool:
    """Whether a controller has ever taken it over."""
    return bool(keys.list(EPOCH))


async def open_journal(keys: JobKeyValueStore, job: str) -> KvJournal:
    return await _patiently(job, lambda: KvJournal(keys, job))


class Chunk(NamedTuple):
    """One key's content: a snapshot, or the records of one commit."""

    key: str
    records: list[Record]
    snapshot: bytes | None = None
    covered: int = 0
    """Records that the snapshot stands for."""
    num_bytes: int = 0


def read(
    keys: JobKeyValueStore, job: str, after: str = "", *, history: bool = False
) -> list[Chunk]:
    """From the newest snapshot on; of what came after a key that was read before. With `history`
    from the oldest that is kept, newer snapshots in between. Raises JournalError."""
    last = _rank(after) if after else (0, 0)
    while True:
        found = _in_force(keys, job, last)
        snapshots = [index for index, key in enumerate(found) if key.startswith(SNAPSHOT)]
        wanted = found[snapshots[-1] :] if snapshots and not history else found
        chunks = [_chunk(keys, job, key) for key in wanted]
        complete = [chunk for chunk in chunks if chunk is not None]
        if len(complete) == len(wanted):
            return complete
        # A compaction has deleted one since they were listed; a snapshot stands for it now.


def _in_force(keys: JobKeyValueStore, job: str, last: tuple[int, int]) -> list[str]:
    """The keys of the chunks after that one which the newest owner has written or gone on from, in
    order. Raises JournalError."""
    # In this order: whoever compacts what is listed here has taken over before.
    found = sorted([*keys.list(TAIL), *keys.list(SNAPSHOT)], key=_rank)
    epochs = [_number(key) for key in keys.list(EPOCH)]
    kept: list[str] = []
    end = None
    for epoch in reversed(epochs):
        if end is not None and epoch != end[1]:
            continue  # overtaken before the next owner had read anything of it
        data = keys.get(_epoch(epoch))
        if not data:
            if any(_rank(key)[1] == epoch for key in found):
                raise JournalError(
                    f"job {job}: its journal in the cluster's store was written by another version "
                    f"of Holdfast; nothing was changed and training is not affected"
                )
            continue  # it has not read yet, and has written nothing
        kept += [
            key
            for key in reversed(found)
            if _rank(key)[1] == epoch and last < _rank(key) and (end is None or _rank(key) <= end)
        ]
        end = BASIS.unpack(data)
        if end <= last:
            break
    return kept[::-1]


def _chunk(keys: JobKeyValueStore, job: str, key: str) -> Chunk | None:
    """None: it is not there any more."""
    data = keys.get(key)
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


async def _patiently(job: str, work: Callable[[], T]) -> T:
    """In a thread, again and again while the head does not answer. Raises JournalError."""
    try:
        return await patiently(work, f"journal of {job}")
    except HoldfastError:
        raise
    except Exception as error:
        raise JournalError(
            f"job {job}: its journal cannot be written ({error}); training goes on without a "
            f"controller"
        ) from None


def _epoch(number: int) -> str:
    return f"{EPOCH}{number:06d}"


def _rank(key: str) -> tuple[int, int]:
    """Of a chunk: its number, and the epoch of who wrote it."""
    number, epoch = key.split("-")[1:]
    return int(number), int(epoch)


def _number(key: str) -> int:
    return int(key.partition("-")[2].partition("-")[0])
