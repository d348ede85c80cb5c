"""Frames of a byte stream: a 4-byte big-endian length and a body."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .. import limits

HEADER_BYTES = 4
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec's decoders for bytes that are not a message: also for a text that is not UTF-8
and for values that are nested too deeply."""


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

    def __init__(self, max_bytes: int = limits.MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        """Limit of the next body."""
        self._buffer = bytearray()

    @property
    def num_waiting(self) -> int:
        """Bytes of a body that is not complete."""
        return len(self._buffer)

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Bodies that are complete with this part. Raises BadFrame."""
        self._buffer += part
        while len(self._buffer) >= HEADER_BYTES:
            end = HEADER_BYTES + frame_length(bytes(self._buffer[:HEADER_BYTES]), self.max_bytes)
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            yield body
