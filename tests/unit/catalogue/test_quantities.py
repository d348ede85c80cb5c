"""Quantities with units, and what is refused."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.catalogue.quantities import (
    PRICE,
    RATE,
    SIZE,
    SPEED,
    TIME,
    Kind,
    WrongQuantity,
)


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [(SIZE, "80GiB", 80 * 2**30), (SIZE, "79.1 GiB", 84_932_977_459),
     (SIZE, "80GB", 80_000_000_000), (RATE, "900GB/s", 900e9), (RATE, "3.35TB/s", 3.35e12),
     (RATE, "400Gbit/s", 50e9), (SPEED, "989TFLOP/s", 989e12), (SPEED, "1.3PFLOP/s", 1.3e15),
     (TIME, "12us", 12e-6), (PRICE, "3.39USD/h", 3.39), (PRICE, ".5 USD/h", 0.5)],
)  # fmt: skip
def test_a_quantity_is_read_in_its_base_unit(kind: Kind, written: str, value: float) -> None:
    assert kind.parse(written) == pytest.approx(value)
    assert isinstance(kind.parse(written), int) is (kind is SIZE)


@pytest.mark.parametrize(
    ("kind", "written", "got", "fix"),
    [(SIZE, 80, "80 without a unit", "write 80GiB"),
     (SIZE, "80", "80 without a unit", "write 80GiB"), (SIZE, "80Gi", "80Gi", ""),
     (SIZE, "80gb", "80gb", "write 80GB"), (SIZE, "0GiB", "0GiB", "write a number above zero"),
     (SIZE, "-80GiB", "-80GiB", "write a number above zero"),
     (SIZE, "1e400GiB", "1e400GiB", "write a number above zero"), (SIZE, "much", "'much'", ""),
     (SIZE, True, "True", ""), (SIZE, None, "None", ""), (SIZE, ["80GiB"], "['80GiB']", ""),
     (RATE, "900GB", "900GB", "write 900GB/s"), (RATE, "900GBps", "900GBps", "write 900GB/s"),
     (RATE, "400Gb/s", "400Gb/s", "bits are written 400Gbit/s"),
     (RATE, "400Gbps", "400Gbps", "bits are written 400Gbit/s"),
     (SPEED, "989TFLOPS", "989TFLOPS", "write 989TFLOP/s"),
     (SPEED, "989TFLOPs", "989TFLOPs", "write 989TFLOP/s"), (TIME, "12µs", "12µs", "write 12us"),
     (PRICE, "3.39$/h", "3.39$/h", "write 3.39USD/h"),
     (PRICE, "3.39USD/hour", "3.39USD/hour", "write 3.39USD/h"), (PRICE, "3EUR/h", "3EUR/h", ""),
     (PRICE, 3.39, "3.39 without a unit", "write 3.39USD/h")],
)  # fmt: skip
def test_a_wrong_unit_is_refused_with_what_to_write(
    kind: Kind, written: object, got: str, fix: str
) -> None:
    with pytest.raises(WrongQuantity) as raised:
        kind.parse(written)
    assert (raised.value.got, raised.value.fix) == (got, fix)
