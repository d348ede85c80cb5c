"""The journal of a job in the key-value store of the cluster's head.

    journal/epoch-000003          a controller has taken over; kept as long as the job's record. Its
                                  value is its basis: number and epoch of the last chunk it read
    journal/tail-00000017-000003  a chunk, by the controller of epoch 3. Chunks since the snapshot
                                  before are kept until the next one, for commands that follow

The store has no compare-and-swap, but it can create a key only where there is none: the controller
that creates the next epoch owns the journal. After every write, and before its actions are carried
out, a writer checks whether the next epoch exists: if so, another controller has taken over
(JournalLost). The new owner reads after it created its epoch, so it sees every earlier write.

A chunk that a writer wrote just before it lost the journal stays, since the new owner may have read
it. Therefore an owner first records its basis, and a chunk counts only if it is reached by
following the bases back from the newest owner that recorded one.
"""

from __future__ import annotations

import builtins
import struct
from collections.abc import Callable
from typing import TypeVar

from holdfast.orchestrator import limits
from holdfast.orchestrator.backends.ray.actors import until_head_answers
from holdfast.orchestrator.backends.ray.kv import JobKeyValueStore
from holdfast.orchestrator.core.journal import JournalError, JournalLost
from holdfast.orchestrator.errors import HoldfastError

from .chunk_journal import SNAPSHOT, TAIL, Chunk, from_snapshot, read

ROOT = "journal/"
EPOCH = ROOT + "epoch-"
BASIS = struct.Struct("<QQ")
T = TypeVar("T")


class GcsStore:
    """A Store in the keys of one job. Reading blocks, and needs no claim."""

    prompt, keeps_history = False, True

    def __init__(self, keys: JobKeyValueStore, job: str) -> None:
        self._keys, self._job = keys, job
        self.place = f"job {job}: its journal in the cluster's store"
        self._epoch = 0

    def list(self, *, history: bool = False) -> builtins.list[str]:
        valid = self._valid()
        return valid if history else from_snapshot(valid)

    def get(self, name: str) -> bytes | None:
        return self._keys.get(ROOT + name)

    def full_at(self, snapshot_bytes: int) -> int:
        return max(limits.JOURNAL_BYTES, snapshot_bytes)

    def close(self) -> None:
        """Do nothing: the store holds nothing."""

    # -- writing --------------------------------------------------------------------------------
    async def claim(self) -> builtins.list[Chunk]:
        return await self._until_head_answers(self._claim)

    def _claim(self) -> builtins.list[Chunk]:
        self._epoch = 1 + max(self._epochs(), default=0)
        if not self._keys.create(_epoch_key(self._epoch), b""):
            raise JournalLost(f"job {self._job}: another controller is taking it over")
        chunks = read(self)
        basis = _position(chunks[-1].name) if chunks else (0, 0)
        self._keys.put(_epoch_key(self._epoch), BASIS.pack(*basis))
        return chunks

    async def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        key = f"{ROOT}{name}-{self._epoch:06d}"

        def write() -> bool:
            self._keys.put(key, data)
            return self._keys.exists(_epoch_key(self._epoch + 1))

        if await self._until_head_answers(write):
            raise JournalLost(f"job {self._job}: another controller has taken it over")
        if name.startswith(SNAPSHOT):
            # Readers begin at a snapshot, so an interrupted deletion does no harm.
            await self._until_head_answers(self._delete_old)

    def _delete_old(self) -> None:
        """The chunks before the second to last snapshot."""
        valid = self._valid()
        snapshots = [name for name in valid if name.startswith(SNAPSHOT)]
        if len(snapshots) > 1:
            before = _position(snapshots[-2])
            old = [name for name in self._chunks() if _position(name) < before]
            self._keys.delete(*(ROOT + name for name in old))

    # -- which chunks count -----------------------------------------------------------------------
    def _chunks(self) -> builtins.list[str]:
        keys = [*self._keys.list(ROOT + TAIL), *self._keys.list(ROOT + SNAPSHOT)]
        return sorted((key.removeprefix(ROOT) for key in keys), key=_position)

    def _epochs(self) -> builtins.list[int]:
        return sorted(int(key.removeprefix(EPOCH)) for key in self._keys.list(EPOCH))

    def _valid(self) -> builtins.list[str]:
        """The chunks that the newest owner has written or continued from, in order."""
        # Chunks before epochs: a controller that compacts them has created its epoch before.
        chunks = self._chunks()
        kept: builtins.list[str] = []
        end = None
        for epoch in reversed(self._epochs()):
            if end is not None and epoch != end[1]:
                continue  # the next owner has read nothing of this epoch
            data = self._keys.get(_epoch_key(epoch))
            if not data:
                continue  # it has not recorded its basis, and has written nothing
            kept += [
                name
                for name in reversed(chunks)
                if _position(name)[1] == epoch and (end is None or _position(name) <= end)
            ]
            end = BASIS.unpack(data)
        return kept[::-1]

    async def _until_head_answers(self, work: Callable[[], T]) -> T:
        """Raises JournalError."""
        try:
            return await until_head_answers(work, f"journal of {self._job}")
        except HoldfastError:
            raise
        except Exception as error:
            raise JournalError(
                f"job {self._job}: its journal cannot be written ({error}); training continues "
                f"without a controller"
            ) from None


def exists(keys: JobKeyValueStore) -> bool:
    """True if a controller has ever opened it."""
    return bool(keys.list(EPOCH))


def _epoch_key(number: int) -> str:
    return f"{EPOCH}{number:06d}"


def _position(name: str) -> tuple[int, int]:
    """(number of a chunk, epoch of its writer)"""
    number, epoch = name.split("-")[1:]
    return int(number), int(epoch)
