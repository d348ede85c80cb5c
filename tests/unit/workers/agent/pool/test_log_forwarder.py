"""Output of workers in the output of the agent: whole lines with their rank."""

from __future__ import annotations

import os

from holdfast.workers.agent.pool.log_forwarder import MAX_LINE_BYTES, LogForwarder


def printed(*writes: tuple[str, bytes]) -> list[bytes]:
    """The forwarded lines of these writes (prefix, data)."""
    read, write = os.pipe()
    forwarder = LogForwarder(write)
    ends = {prefix: forwarder.pipe(prefix) for prefix, _ in writes}
    for prefix, data in writes:
        os.write(ends[prefix], data)
    for end in ends.values():
        os.close(end)
    forwarder.finish()
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        return stream.read().splitlines()


def test_every_line_has_the_rank_that_printed_it() -> None:
    lines = printed(("[rank 0] ", b"a\nb\n"), ("[rank 1] ", b"c\n"))
    assert sorted(lines) == [b"[rank 0] a", b"[rank 0] b", b"[rank 1] c"]


def test_a_line_that_comes_in_pieces_stays_one_line() -> None:
    lines = printed(("[rank 0] ", b"half "), ("[rank 0] ", b"and half\n"))
    assert lines == [b"[rank 0] half and half"]


def test_a_last_line_without_a_newline_is_not_lost() -> None:
    assert printed(("[rank 3] ", b"Killed")) == [b"[rank 3] Killed"]


def test_a_line_above_the_limit_is_cut() -> None:
    lines = printed(("", b"x" * (MAX_LINE_BYTES + 1)))
    assert b"".join(lines) == b"x" * (MAX_LINE_BYTES + 1)
