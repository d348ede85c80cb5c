"""Records of a journal: what is damaged is refused with its offset."""

from __future__ import annotations

import struct
import zlib

import pytest

from holdfast.orchestrator.core.events import FaultInjected, ResizeRequested, Tick
from holdfast.orchestrator.core.journal import (
    FRAME,
    decode_body,
    decode_records,
    encode_record,
    frame,
)

RECORDS = [(1, Tick()), (2, ResizeRequested(nodes=3)), (5, FaultInjected(kind="kill", node="a"))]
DATA = b"".join(encode_record(now_ns, event) for now_ns, event in RECORDS)


def test_records_are_read_as_they_were_written() -> None:
    assert decode_records(DATA) == RECORDS
    assert decode_records(b"") == []


def test_a_cut_at_any_byte_inside_a_record_is_refused_with_its_offset() -> None:
    ends = [0]
    for now_ns, event in RECORDS:
        ends.append(ends[-1] + len(encode_record(now_ns, event)))
    for cut in range(1, len(DATA)):
        if cut in ends:
            assert len(decode_records(DATA[:cut])) == ends.index(cut)
            continue
        begin = max(end for end in ends if end < cut)
        half = cut - begin < FRAME.size
        text = "half a record" if half else "the length of a record is wrong"
        with pytest.raises(ValueError, match=f"^byte {begin}: {text}"):
            decode_records(DATA[:cut])


def test_a_flipped_bit_at_any_byte_is_refused() -> None:
    for at in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[at] ^= 4
        with pytest.raises(ValueError, match=r"^byte \d+: "):
            decode_records(bytes(damaged))


def test_a_length_and_a_body_have_checksums_of_their_own() -> None:
    body = b"x" * 20
    assert FRAME.unpack_from(frame(body))[1] == zlib.crc32(struct.pack("<I", 20))
    longer = bytearray(frame(body))
    longer[0:4] = struct.pack("<I", 10)
    with pytest.raises(ValueError, match="the length of a record is wrong"):
        decode_records(bytes(longer))
    other = bytearray(frame(body))
    other[-1] ^= 1
    with pytest.raises(ValueError, match="the checksum of a record does not match"):
        decode_records(bytes(other))


def test_a_body_that_is_no_event_is_refused() -> None:
    with pytest.raises(ValueError, match="not an event"):
        decode_body(b"\x93\x01\x02\x03")
    with pytest.raises(ValueError, match="not an event"):
        decode_records(frame(b"\x00"))
