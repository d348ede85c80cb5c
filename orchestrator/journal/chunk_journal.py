"""The journal of a job as numbered chunks in a store. Implements core.journal.Journal.

    tail-00000017   the records of one commit
    snap-00000018   8 bytes (number of records that it covers, little-endian) and the controller's
                    state after them: it replaces every chunk before it

A store is made for one job. It has one writer at a time, the one that claimed it last; what it does
when another controller writes is described in each store. Anyone may read.
"""

from __future__ import annotations

import asyncio
import builtins
import struct
from typing import NamedTuple, Protocol

from holdfast.orchestrator.core.events import AnyEvent
from holdfast.orchestrator.core.journal import (
    JournalDamaged,
    JournalError,
    Record,
    UnknownEvent,
    decode_records,
    encode_record,
)

TAIL, SNAPSHOT = "tail-", "snap-"
COVERED = struct.Struct("<Q")


class StoreFull(JournalError):
    """The store cannot take a chunk now, and has what it had before. Another attempt may succeed.
    `cut`: chunks that were put without `durable` are gone as well."""

    def __init__(self, text: str, *, cut: bool = False) -> None:
        super().__init__(text)
        self.cut = cut


class Store(Protocol):
    """The chunks of one job. `list` and `get` raise JournalError for what cannot be read."""

    place: str
    """Place of the journal, for messages."""
    prompt: bool
    """A chunk costs so little that no record has to wait for the next decision."""
    keeps_history: bool
    """Older chunks stay for a while beside the snapshot that replaces them."""

    async def claim(self) -> builtins.list[Chunk]:
        """Become the one writer. Returns the result of `read`. Raises JournalLost."""

    def list(self, *, history: bool = False) -> builtins.list[str]:
        """Names of the chunks in order, from the newest snapshot on; with `history` all that are
        kept."""

    def get(self, name: str) -> bytes | None:
        """A listed chunk; None: it was deleted since."""

    async def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Add a chunk after all others, and delete what a snapshot replaces. Raises JournalLost
        when another controller writes, StoreFull, any other JournalError when it cannot be done."""

    def full_at(self, snapshot_bytes: int) -> int:
        """Bytes of records after which a snapshot of this size is replaced by a new one."""

    def close(self) -> None: ...


class Chunk(NamedTuple):
    """A snapshot, or the records of one commit."""

    name: str
    records: builtins.list[Record]
    snapshot: bytes | None = None
    covered: int = 0
    """Number of records that the snapshot replaces."""
    num_bytes: int = 0


def number(name: str) -> int:
    return int(name[len(TAIL) : len(TAIL) + 8])


def from_snapshot(names: list[str]) -> list[str]:
    """The part of names in order that begins with the newest snapshot."""
    snapshots = [at for at, name in enumerate(names) if name.startswith(SNAPSHOT)]
    return names[snapshots[-1] :] if snapshots else names


def read(store: Store, after: str = "", *, history: bool = False) -> list[Chunk]:
    """The chunks after the one named `after`, from the newest snapshot on; with `history` all that
    are kept. Raises JournalError."""
    while True:
        names = [n for n in store.list(history=history) if n[len(TAIL) :] > after[len(TAIL) :]]
        contents = [(name, store.get(name)) for name in names]
        if all(data is not None for _, data in contents):
            return [_chunk(store, name, data) for name, data in contents if data is not None]
        # A compaction has deleted a chunk since they were listed: a snapshot replaces it.


def _chunk(store: Store, name: str, data: bytes) -> Chunk:
    try:
        if name.startswith(SNAPSHOT):
            (covered,) = COVERED.unpack_from(data)
            return Chunk(name, [], data[COVERED.size :], covered)
        return Chunk(name, decode_records(data), num_bytes=len(data))
    except UnknownEvent as error:
        raise JournalError(
            f"{store.place}: {name}: {error}; use the Holdfast that wrote it"
        ) from None
    except (ValueError, struct.error) as error:
        raise JournalDamaged(store.place, f"{name}: {error}") from None


def contents(chunks: list[Chunk]) -> tuple[bytes | None, list[Record]]:
    """(The newest snapshot, the records since) of a result of `read` without history."""
    return chunks[0].snapshot if chunks else None, [r for chunk in chunks for r in chunk.records]


class ChunkJournal:
    """The one writer. Made by `open`."""

    def __init__(self, store: Store, chunks: list[Chunk]) -> None:
        """`chunks`: what claiming the store returned."""
        self._store = store
        self.snapshot, self.records = contents(chunks)
        self.problem = ""
        self._pending: list[bytes] = []
        """Records that are not durable yet."""
        self._num_put = 0
        """The first of them that are in the store."""
        self._num_records = len(self.records) + (chunks[0].covered if chunks else 0)
        self._next = 1 + (number(chunks[-1].name) if chunks else 0)
        self._bytes = sum(chunk.num_bytes for chunk in chunks)
        self._full_at = store.full_at(len(self.snapshot or b""))
        self._lock = asyncio.Lock()

    @classmethod
    async def open(cls, store: Store) -> ChunkJournal:
        """Raises JournalLost when another controller writes it, JournalError when it cannot be
        read."""
        try:
            return cls(store, await store.claim())
        except BaseException:
            store.close()
            raise

    @property
    def full(self) -> bool:
        return self._bytes + sum(map(len, self._pending[self._num_put :])) > self._full_at

    @property
    def num_pending(self) -> int:
        """Records that may be in memory only."""
        return len(self._pending)

    def append(self, now_ns: int, event: AnyEvent) -> None:
        self._pending.append(encode_record(now_ns, event))
        self._num_records += 1

    async def commit(self, *, durable: bool = True) -> None:
        if not durable and not self._store.prompt:
            return
        async with self._lock:
            await self._write_pending(durable=durable)

    async def _write_pending(self, *, durable: bool) -> None:
        count, chunk = len(self._pending), b"".join(self._pending[self._num_put :])
        if not count or not (chunk or durable):
            return
        try:
            await self._put(TAIL, chunk, durable=durable)
        except StoreFull as error:
            self.problem = str(error)
            if error.cut:
                self._num_put = 0
            return
        self.problem = ""
        self._bytes += len(chunk)
        self._num_put = count
        if durable:
            self._forget(count)

    async def compact(self, snapshot: bytes) -> None:
        async with self._lock:
            count, covered = len(self._pending), self._num_records
            if self._store.keeps_history:  # a command that follows needs them
                await self._write_pending(durable=False)
            try:
                await self._put(SNAPSHOT, COVERED.pack(covered) + snapshot, durable=True)
            except StoreFull:
                self._full_at = self._bytes + self._store.full_at(0)
                await self._write_pending(durable=True)
                return
            self._forget(count)
            self.problem, self._bytes = "", 0
            self._full_at = self._store.full_at(len(snapshot))

    async def _put(self, kind: str, data: bytes, *, durable: bool) -> None:
        await self._store.put(f"{kind}{self._next:08d}", data, durable=durable)
        self._next += 1

    def _forget(self, count: int) -> None:
        """The first `count` pending records are durable, or covered by a snapshot."""
        del self._pending[:count]
        self._num_put = 0

    def close(self) -> None:
        self._store.close()
