"""The journal of a job: its durable events with their times, and from time to time a snapshot.

Here are the interface that a controller writes to, the form of a record, and the errors; no IO.

A record is 12 bytes (length, crc32 of the length, crc32 of the body; little-endian) and a msgpack
body [time_ns, event]. The length has a checksum of its own: a damaged length would otherwise look
like a tail that was cut off, and everything after it would be lost silently.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple, Protocol

import msgspec

from ..errors import Damaged, HoldfastError
from .events import AnyEvent

FRAME = struct.Struct("<III")

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[tuple[int, AnyEvent]] = msgspec.msgpack.Decoder(
    tuple[int, AnyEvent]
)


class JournalError(HoldfastError):
    """The journal cannot be used."""


class JournalLost(JournalError):
    """Another controller writes this journal: it has taken the job over. The controller that gets
    this error must not act any more; nothing that it decided since its last commit counts."""


class JournalDamaged(JournalError, Damaged):
    """The journal does not hold what was written to it."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(
            f"{place}: damaged: {what}. Nothing was changed and training is not affected. Restore "
            f"it from a copy, or delete the job and start it again from its newest checkpoint"
        )


class UnknownEvent(ValueError):
    """A record that another version of Holdfast wrote: its checksum is right."""


class Record(NamedTuple):
    now_ns: int
    event: AnyEvent


class Journal(Protocol):
    """The one writer of a job's journal.

    `snapshot` and `records` are what was there when it was opened: the newest snapshot (None:
    there never was one) and the records since. The reader may drop both after the replay.
    """

    snapshot: bytes | None
    records: list[Record]

    problem: str
    """Reason why records are only in memory, which `commit` tries to write; empty: none are."""

    @property
    def full(self) -> bool:
        """True if the journal is so large that the next commit should be a `compact`."""

    def append(self, now_ns: int, event: AnyEvent) -> None:
        """Add a record. It need not be durable yet, and must not block."""

    async def commit(self, *, durable: bool = True) -> None:
        """Make everything appended durable, or set `problem`. Raises JournalLost when another
        controller writes, any other JournalError when it cannot be done: in both cases the
        controller ends. With durable=False the records need to survive this process only, and
        only where that costs little."""

    async def compact(self, snapshot: bytes) -> None:
        """Make durable that the job is as in `snapshot`, which covers everything appended so far,
        instead of what was there: either all of it happens or nothing. Raises as `commit`."""


def encode_record(now_ns: int, event: AnyEvent) -> bytes:
    return frame(_ENCODER.encode((now_ns, event)))


def frame(body: bytes) -> bytes:
    length = struct.pack("<I", len(body))
    return FRAME.pack(len(body), zlib.crc32(length), zlib.crc32(body)) + body


def decode_body(body: bytes) -> Record:
    """The record in a frame's body. Raises UnknownEvent."""
    try:
        return Record(*_DECODER.decode(body))
    except msgspec.MsgspecError as error:
        raise UnknownEvent(f"not an event: {error}") from None


def decode_records(data: bytes) -> list[Record]:
    """The records of a sequence of whole frames, as a store that writes atomically has them.
    Raises ValueError, with the offset, for anything else."""
    records, at = [], 0
    while at < len(data):
        if len(data) - at < FRAME.size:
            raise ValueError(f"byte {at}: half a record")
        length, length_crc, body_crc = FRAME.unpack_from(data, at)
        end = at + FRAME.size + length
        if zlib.crc32(data[at : at + 4]) != length_crc or end > len(data):
            raise ValueError(f"byte {at}: the length of a record is wrong")
        body = data[at + FRAME.size : end]
        if zlib.crc32(body) != body_crc:
            raise ValueError(f"byte {at}: the checksum of a record does not match")
        records.append(decode_body(body))
        at = end
    return records
