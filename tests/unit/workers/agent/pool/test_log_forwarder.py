"""Output of workers in the output of the agent: whole lines with their rank and generation."""

from __future__ import annotations

import os

from holdfast.workers.agent.pool.log_forwarder import MAX_LINE_BYTES, LogForwarder


def printed(*writes: tuple[int, int, bytes]) -> list[bytes]:
    """The forwarded lines of these writes (generation, rank, data)."""
    read, write = os.pipe()
    forwarder = LogForwarder(write)
    ends = {(one[0], one[1]): forwarder.pipe(one[0], one[1]) for one in writes}
    for generation, rank, data in writes:
        os.write(ends[generation, rank], data)
    for end in ends.values():
        os.close(end)
    forwarder.finish()
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        return stream.read().splitlines()


def test_every_line_has_the_rank_and_the_generation_that_printed_it() -> None:
    lines = printed((1, 0, b"a\nb\n"), (1, 1, b"c\n"), (12, 0, b"d\n"))
    assert sorted(lines) == [
        b"[rank 0, gen 12] d",
        b"[rank 0, gen 1] a",
        b"[rank 0, gen 1] b",
        b"[rank 1, gen 1] c",
    ]


def test_a_line_that_comes_in_pieces_stays_one_line() -> None:
    lines = printed((1, 0, b"half "), (1, 0, b"and half\n"))
    assert lines == [b"[rank 0, gen 1] half and half"]


def test_a_last_line_without_a_newline_is_not_lost() -> None:
    assert printed((2, 3, b"Killed")) == [b"[rank 3, gen 2] Killed"]


def test_a_line_above_the_limit_is_cut() -> None:
    prefix, lines = b"[rank 0, gen 1] ", printed((1, 0, b"x" * (MAX_LINE_BYTES + 1)))
    assert all(line.startswith(prefix) for line in lines)
    assert b"".join(line.removeprefix(prefix) for line in lines) == b"x" * (MAX_LINE_BYTES + 1)


def test_the_last_output_of_a_rank_is_kept_for_the_cause_of_an_abort() -> None:
    read, write = os.pipe()
    forwarder = LogForwarder(write)
    end = forwarder.pipe(4, 1)
    os.write(end, b"Watchdog caught collective operation timeout\n")
    os.close(end)
    forwarder.finish()
    assert forwarder.last_output(1) == "Watchdog caught collective operation timeout\n"
    assert forwarder.last_output(0) == ""
    os.close(read)
    os.close(write)
