"""The base model of the spec and the types that several of its parts use.

Fields are snake_case with the unit as a suffix in Python, camelCase with the unit as a word in
YAML. Values are read as the API server reads them: `max: true` and `max: "2"` are not numbers.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator
from pydantic.alias_generators import to_camel

from holdfast.orchestrator import limits

Auto = Literal["auto"]


def yaml_name(python_name: str) -> str:
    """`heartbeat_timeout_s` -> `heartbeatTimeoutSeconds`: one rule for every field."""
    if python_name.endswith("_s"):
        python_name = python_name.removesuffix("_s") + "_seconds"
    return to_camel(python_name)


def whole(value: Any) -> Any:
    """2.0 -> 2: JSON has no integers of its own."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Part(BaseModel):
    """A part of the spec. Unknown keys are errors: a misspelt key must never be ignored."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=yaml_name,
        populate_by_name=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _convert_json_value(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else whole(value)


class Choice(Part):
    """A part with fields that exclude each other: the field that is written is the choice, and has
    the settings that only this choice has."""

    choices: ClassVar[tuple[str, ...]]
    default_choice: ClassVar[str] = ""
    """The choice if none is written; "": one must be."""

    @pydantic.model_validator(mode="after")
    def _check_one_choice(self) -> Self:
        written = [name for name in self.choices if getattr(self, name) is not None]
        if len(written) > 1 or not (written or self.default_choice):
            got = " and ".join(written) or "none of them"
            raise ValueError(f"got {got}; expected {self.one_of()}")
        return self

    @classmethod
    def one_of(cls) -> str:
        """The choices, for a message."""
        return f"{'at most' if cls.default_choice else 'exactly'} one of {', '.join(cls.choices)}"

    @property
    def chosen(self) -> str:
        written = (name for name in self.choices if getattr(self, name) is not None)
        return next(written, self.default_choice)


def number_as_text(value: Any) -> Any:
    """2 -> "2": the words of a command line and the values of variables are texts."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if is_number else value


Word = Annotated[str, BeforeValidator(number_as_text)]
Seconds = Annotated[float, Field(gt=0, le=limits.MAX_SECONDS, allow_inf_nan=False)]
Wait = Annotated[float, Field(ge=0, le=limits.MAX_SECONDS, allow_inf_nan=False)]
"""Seconds, 0 included."""
Steps = Annotated[int, Field(ge=1, le=limits.MAX_COUNT)]
Count = Annotated[int, Field(ge=1, le=limits.MAX_COUNT)]


def expect_empty(value: Any) -> Any:
    if isinstance(value, dict) and value:
        raise ValueError("expected {}, a choice without settings")
    return value


NoSettings = Annotated[dict[str, str], Field(max_length=0), BeforeValidator(expect_empty)]
"""A choice without settings: {}."""
AutoOrCount = Auto | Count

# Quantities, as in https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_SUFFIXES = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "E": 1e18, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
    "Ei": 2.0**60,
}  # fmt: skip
QUANTITY_PATTERN = (
    r"^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
)


def _quantity_fix(value: Any) -> str:
    """Fix for a quantity with another unit, such as 64GB or 4 cores; empty: none."""
    match = re.fullmatch(r"([0-9.]+) *([A-Za-z]+)", value) if isinstance(value, str) else None
    if match is None:
        return ""
    number, word = match[1], match[2].lower()
    if word in ("b", "byte", "bytes", "core", "cores", "cpu", "cpus"):
        return f"; write {number}"
    for letter in "KMGTPE":
        if word in (f"{letter}B".lower(), f"{letter}IB".lower(), f"{letter}I".lower()):
            decimal = "k" if letter == "K" else letter
            return f"; write {number}{letter}i (powers of 1024) or {number}{decimal} (of 1000)"
    return ""


def parse_quantity(value: Any) -> float:
    """A Kubernetes quantity ("500m", "4Gi", 2) as a number >= 0. Raises ValueError."""
    number: float = -1
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and (match := re.fullmatch(QUANTITY_PATTERN, value)):
        number = float(match[1] + (match[2] or "")) * _SUFFIXES[match[3] or ""]
    if not number >= 0:  # also true for NaN
        fix = _quantity_fix(value)
        got = f"got {value!r}; " if fix else ""
        raise ValueError(f"{got}expected a quantity such as 2, 500m or 4Gi{fix}")
    if number > limits.MAX_QUANTITY:
        raise ValueError(f"expected a quantity of at most {limits.MAX_QUANTITY:g}, such as 4Gi")
    return float(number)


Quantity = Annotated[
    float,
    BeforeValidator(parse_quantity),
    WithJsonSchema(
        {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    ),
]

# A qualified name, as Kubernetes has it: an optional DNS prefix and a name.
RESOURCE_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
QualifiedName = Annotated[str, Field(pattern=RESOURCE_PATTERN, max_length=253)]
