"""Published runs on A100, H100 and H200 to which no share was fitted, and their differences."""

from __future__ import annotations

import pytest

from bench.plan_devices import PAGE, Group, groups, page, rows, speed_ratios

EVERY = rows()
GROUPS = groups(EVERY)


@pytest.mark.parametrize(
    ("device", "least"), [("A100-40", 0.95), ("A100-80", 0.95), ("H100-80", 0.9), ("H200", 0.6)]
)
def test_rows_that_were_not_fitted_are_within_a_fifth(device: str, least: float) -> None:
    unseen = next(one for one in GROUPS if one.device == device and not one.fitted)
    assert unseen.within / len(unseen.errors) >= least
    assert abs(unseen.errors[len(unseen.errors) // 2]) < 0.17


def test_most_rows_are_unseen() -> None:
    def number(found: list[Group]) -> int:
        return sum(len(one.errors) for one in found)

    assert number(GROUPS) == len(EVERY) == 230
    assert number([one for one in GROUPS if one.fitted]) == 21


def test_an_h100_is_as_much_faster_than_an_a100_as_published() -> None:
    ratios = speed_ratios(EVERY, "H100-80", "A100-80")
    assert len(ratios) > 20
    published, predicted = (sorted(one) for one in zip(*ratios, strict=True))
    middle = len(ratios) // 2
    assert predicted[middle] == pytest.approx(published[middle], rel=0.1)


def test_the_page_of_the_devices_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m bench.plan_devices"
