"""Frames of a byte stream: a 4-byte big-endian length and a body."""

from __future__ import annotations

from collections.abc import Iterator

from .. import limits

HEADER_BYTES = 4


class BadFrame(Exception):
    """The peer does not speak our protocol; close the connection."""


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def frame_length(header: bytes, max_bytes: int = limits.MAX_FRAME_BYTES) -> int:
    """Body length from the header. Raises BadFrame above `max_bytes`."""
    length = int.from_bytes(header, "big")
    if length > max_bytes:
        raise BadFrame(f"a frame of {length} bytes; at most {max_bytes}")
    return length


class FrameReader:
    """Splits the parts of a stream into bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Bodies that are complete with this part. Raises BadFrame."""
        self._buffer += part
        while len(self._buffer) >= HEADER_BYTES:
            end = HEADER_BYTES + frame_length(bytes(self._buffer[:HEADER_BYTES]))
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            yield body
