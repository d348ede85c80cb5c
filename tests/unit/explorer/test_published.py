"""TorchTitan's published tables: which rows the planner reproduces, and how it ranks them."""

from __future__ import annotations

import functools

import pytest

from bench.plan_published import (
    DECEMBER,
    H200,
    JUNE,
    PAGE,
    WITHIN_TOKENS,
    Compared,
    check,
    compare,
    page,
    today,
)

compared = functools.cache(compare)


def row(page: str, table: str, what: str) -> Compared:
    wanted = (page, table, what)
    return next(one for one in compared() if one.row[:3] == wanted)


@pytest.mark.parametrize("one", compared(), ids=lambda one: one.name)
def test_every_row_is_within_a_fifth_of_the_published_throughput(one: Compared) -> None:
    assert one.tokens_error == pytest.approx(0, abs=WITHIN_TOKENS)


def test_all_rows_of_the_three_pages_are_compared() -> None:
    tables = [(one.row.page, one.row.table) for one in compared()]
    assert {table: tables.count(table) for table in tables} == {
        (DECEMBER, "1"): 3,
        (DECEMBER, "2"): 4,
        (DECEMBER, "3"): 3,
        (DECEMBER, "4"): 2,
        (DECEMBER, "5"): 2,
        (DECEMBER, "6"): 4,
        (JUNE, "70B"): 4,
        (JUNE, "8B"): 4,
        (H200, "1"): 2,
    }


@pytest.mark.parametrize("table", ["1", "3"])
def test_compiled_blocks_and_float8_are_ranked_as_published(table: str) -> None:
    ways = [row(DECEMBER, table, what) for what in ("FSDP", "compile", "compile, float8")]
    for figures in ([one.row.tokens for one in ways], [one.predicted.tokens for one in ways]):
        assert figures == sorted(figures)
        assert figures[0] < figures[1] < figures[2]


def test_an_interleaved_schedule_is_ranked_as_published() -> None:
    plain, interleaved = row(DECEMBER, "5", "1F1B"), row(DECEMBER, "5", "interleaved 1F1B")
    assert plain.row.tokens < interleaved.row.tokens
    assert plain.predicted.tokens < interleaved.predicted.tokens


def test_longer_sequences_are_ranked_as_published() -> None:
    for table in ("2", "6"):
        ways = [one for one in compared() if (one.row.page, one.row.table) == (DECEMBER, table)]
        published = sorted(ways, key=lambda one: one.row.tokens)
        assert published == sorted(ways, key=lambda one: one.predicted.tokens)


def test_the_estimate_of_memory_is_below_what_the_allocator_reserved() -> None:
    """TorchTitan states reserved memory, which is more than what tensors take; the allocator's
    fragments are why only USABLE of a device is planned with."""
    ratios = {
        one.name: 1 + one.memory_error
        for one in compared()
        if one.memory_error is not None and one.row.page == DECEMBER
    }
    assert len(ratios) == 18
    assert all(0.69 < ratio < 1 for ratio in ratios.values()), ratios
    # With one pipeline stage the share of fragments is nearly constant.
    plain = [ratio for name, ratio in ratios.items() if " 5: " not in name and " 6: " not in name]
    assert max(plain) / min(plain) < 1.15


def test_more_ranks_and_longer_sequences_change_memory_as_published() -> None:
    for what in ("FSDP", "compile", "compile, float8"):
        few, many = row(DECEMBER, "1", what), row(DECEMBER, "3", what)
        saved = few.predicted.gib - many.predicted.gib
        assert few.row.gib is not None and many.row.gib is not None
        assert saved == pytest.approx(few.row.gib - many.row.gib, rel=0.35)


def test_throughput_that_was_not_fitted_is_within_a_tenth() -> None:
    for one in check():
        assert one.predicted == pytest.approx(one.tflops, rel=0.1), one.what


def test_the_power_limit_leaves_less_than_the_peak() -> None:
    assert 0.7 < today().sustained < 1


def test_the_page_is_current() -> None:
    fix = "python -m bench.plan_published"
    assert PAGE.read_text(encoding="utf-8") == page(compared()), fix
