"""Quantities with units in a catalogue file: 80GiB, 900GB/s, 989TFLOP/s, 12us, 3.39USD/h.

A number without a unit is rejected, as 80 could be GB or GiB, and 400 could be GB/s or Gbit/s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)", re.DOTALL)


class WrongQuantity(ValueError):
    """The text is not a quantity of this kind. `fix`: a text that the user can write instead."""

    def __init__(self, got: str, fix: str = "") -> None:
        self.got, self.fix = got, fix
        super().__init__(got)


@dataclass(frozen=True)
class Kind:
    """One kind of quantity: the factor from each unit to the unit in which Holdfast computes."""

    what: str
    """A noun for messages."""
    example: str
    units: Mapping[str, float]
    whole: bool = False
    """Rounded to an integer."""

    @property
    def expected(self) -> str:
        return f"{self.what} with its unit ({', '.join(self.units)}), such as {self.example}"

    def parse(self, written: object) -> float:
        """The value in the base unit. Raises WrongQuantity."""
        if isinstance(written, bool) or not isinstance(written, (str, int, float)):
            raise WrongQuantity(repr(written))
        text = str(written).strip()
        match = NUMBER.fullmatch(text)
        if match is None:
            raise WrongQuantity(repr(written))
        number, unit = float(match[1]), match[2].strip()
        if not unit:
            raise WrongQuantity(f"{text} without a unit", f"write {text}{self._usual}")
        if unit not in self.units:
            raise WrongQuantity(text, self._suggest(match[1], unit))
        value = number * self.units[unit]
        if not (value > 0 and math.isfinite(value)):
            raise WrongQuantity(text, "write a number above zero")
        return round(value) if self.whole else value

    @property
    def _usual(self) -> str:
        match = NUMBER.fullmatch(self.example)
        assert match is not None
        return match[2]

    def _suggest(self, number: str, unit: str) -> str:
        if self.what == RATE.what and unit in ("Gb/s", "Gbps", "Gbit", "Mb/s", "Mbps"):
            return f"bits are written {number}{unit[0]}bit/s"
        likely = [name for name in self.units if name.lower() in _spellings(unit)]
        return f"write {number}{likely[0]}" if len(likely) == 1 else ""


def _spellings(unit: str) -> set[str]:
    """Spellings of a unit in small letters, one of which may be known."""
    small = unit.lower().replace("µ", "u").replace("$", "usd").replace("hour", "h")
    per_second = re.sub("ps$", "/s", small)
    return {small, f"{small}/s", per_second, re.sub("flops?$", "flop/s", small)}


_BYTES = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_BITS = {"Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}

SIZE = Kind("a size", "80GiB", _BYTES, whole=True)
RATE = Kind("a bandwidth", "900GB/s", {f"{u}/s": f for u, f in _BYTES.items()} | _BITS)
SPEED = Kind(
    "a speed", "989TFLOP/s", {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15, "FLOP/s": 1.0}
)
TIME = Kind("a time", "12us", {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0})
PRICE = Kind("a price", "3.39USD/h", {"USD/h": 1.0})
