"""What workers print shows in the agent's output, each line whole and with its rank."""

from __future__ import annotations

import os

from holdfast.workers.agent.pool.log_forwarder import MAX_LINE_BYTES, LogForwarder


def printed(*writes: tuple[str, bytes]) -> list[bytes]:
    """What comes out when these are written, each by a worker with that prefix."""
    read, write = os.pipe()
    echo = LogForwarder(write)
    ends = {prefix: echo.pipe(prefix) for prefix, _ in writes}
    for prefix, data in writes:
        os.write(ends[prefix], data)
    for end in ends.values():
        os.close(end)
    echo.finish()
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        return stream.read().splitlines()


def test_every_line_says_which_rank_printed_it() -> None:
    lines = printed(("[rank 0] ", b"a\nb\n"), ("[rank 1] ", b"c\n"))
    assert sorted(lines) == [b"[rank 0] a", b"[rank 0] b", b"[rank 1] c"]


def test_a_line_that_comes_in_pieces_stays_one_line() -> None:
    lines = printed(("[rank 0] ", b"half "), ("[rank 0] ", b"and half\n"))
    assert lines == [b"[rank 0] half and half"]


def test_last_words_without_a_newline_are_not_lost() -> None:
    assert printed(("[rank 3] ", b"Killed")) == [b"[rank 3] Killed"]


def test_a_line_that_never_ends_is_cut() -> None:
    lines = printed(("", b"x" * (MAX_LINE_BYTES + 1)))
    assert b"".join(lines) == b"x" * (MAX_LINE_BYTES + 1)
