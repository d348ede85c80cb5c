"""The fields that a catalogue file may give a device, a link or an architecture, and their readers.

Every problem is collected with the dotted path of its field, so one message lists them all.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import Problem
from ..planner.model import Architecture
from .quantities import PRICE, RATE, SIZE, SPEED, TIME, Kind, WrongQuantity
from .types import Device, Link, Price

FORMATS = ("float32", "bfloat16", "float16", "float8")
"""Formats of matrix products of which a device has a peak."""

Reader = Callable[[str, object, list[Problem]], Any]
"""Path of the field, what stands there, and where problems go -> the value."""


class Field(NamedTuple):
    attribute: str
    """Field's name in the type."""
    read: Reader
    required: bool = True


def _quantity(kind: Kind) -> Reader:
    def read(path: str, written: object, problems: list[Problem]) -> float | None:
        try:
            return kind.parse(written)
        except WrongQuantity as wrong:
            problems.append(Problem(path, wrong.got, kind.expected, wrong.fix))
            return None

    return read


def _number(path: str, written: object, problems: list[Problem]) -> int | None:
    if isinstance(written, int) and not isinstance(written, bool) and written > 0:
        return written
    problems.append(Problem(path, repr(written), "a whole number above zero, without a unit"))
    return None


def _share(path: str, written: object, problems: list[Problem]) -> float | None:
    if isinstance(written, (int, float)) and not isinstance(written, bool) and 0 < written <= 1:
        return float(written)
    problems.append(Problem(path, repr(written), "a share above 0 and up to 1, such as 0.72"))
    return None


def _truth(path: str, written: object, problems: list[Problem]) -> bool | None:
    if isinstance(written, bool):
        return written
    problems.append(Problem(path, repr(written), "true or false"))
    return None


def _text(path: str, written: object, problems: list[Problem]) -> str | None:
    if isinstance(written, str) and written.strip():
        return written.strip()
    fix = f'write "{written}" in quotes' if isinstance(written, int) else ""
    problems.append(Problem(path, repr(written), "a text", fix))
    return None


def _names(path: str, written: object, problems: list[Problem]) -> tuple[str, ...]:
    if not isinstance(written, list):
        problems.append(Problem(path, repr(written), "a list of names, such as [H100, H100-SXM]"))
        return ()
    texts = (_text(f"{path}[{i}]", name, problems) for i, name in enumerate(written))
    return tuple(text for text in texts if text)


def _date(path: str, written: object, problems: list[Problem]) -> str | None:
    if isinstance(written, datetime.date) and not isinstance(written, datetime.datetime):
        return written.isoformat()
    try:
        return datetime.date.fromisoformat(str(written)).isoformat()
    except ValueError:
        problems.append(Problem(path, repr(written), "a day, such as 2026-11-25"))
        return None


def _flops(path: str, written: object, problems: list[Problem]) -> dict[str, float]:
    fields = {name: Field(name, _quantity(SPEED), required=False) for name in FORMATS}
    if written == {}:
        problems.append(Problem(path, "no format", f"at least one of {', '.join(FORMATS)}"))
    return read_fields(path, written, fields, problems)


def _price(path: str, written: object, problems: list[Problem]) -> Price | None:
    before = len(problems)
    prices = read_fields(path, written, PRICE_FIELDS, problems)
    lacking(path, prices, PRICE_FIELDS, problems)
    return Price(**{"source": "", **prices}) if len(problems) == before else None


PRICE_FIELDS = {
    "per_hour": Field("per_hour", _quantity(PRICE)),
    "date": Field("date", _date),
    "source": Field("source", _text, required=False),
}
DEVICE_FIELDS = {
    "aliases": Field("aliases", _names, required=False),
    "memory": Field("memory_bytes", _quantity(SIZE)),
    "flops": Field("flops", _flops),
    "sustained": Field("sustained", _share, required=False),
    "matmul_share": Field("matmul_share", _share, required=False),
    "attention_share": Field("attention_share", _share, required=False),
    "memory_bandwidth": Field("memory_bandwidth", _quantity(RATE)),
    "link": Field("link", _text),
    "per_node": Field("per_node", _number, required=False),
    "host_bandwidth": Field("host_bandwidth", _quantity(RATE)),
    "price": Field("price", _price, required=False),
    "source": Field("source", _text, required=False),
}
LINK_FIELDS = {
    "aliases": Field("aliases", _names, required=False),
    "bandwidth": Field("bandwidth", _quantity(RATE)),
    "latency": Field("latency", _quantity(TIME)),
    "shared": Field("shared", _truth, required=False),
    "source": Field("source", _text, required=False),
}
_SIZES = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
_COUNTS = ("learned_positions", "max_sequence_length")
_SWITCHES = ("gated_ffn", "qk_norm", "qkv_bias", "biases", "layer_norm", "tied_embeddings")
ARCHITECTURE_FIELDS = {
    "aliases": Field("aliases", _names, required=False),
    **{name: Field(name, _number) for name in _SIZES},
    **{name: Field(name, _number, required=False) for name in _COUNTS},
    **{name: Field(name, _truth, required=False) for name in _SWITCHES},
    "source": Field("source", _text, required=False),
}


class Section(NamedTuple):
    """One part of a catalogue file."""

    fields: Mapping[str, Field]
    type: type[Device] | type[Link] | type[Architecture]


SECTIONS = {
    "devices": Section(DEVICE_FIELDS, Device),
    "links": Section(LINK_FIELDS, Link),
    "architectures": Section(ARCHITECTURE_FIELDS, Architecture),
}


def read_fields(
    path: str, written: object, fields: Mapping[str, Field], problems: list[Problem]
) -> dict[str, Any]:
    """Attribute -> value of the fields that are written; problems of the others."""
    if not isinstance(written, dict):
        expected = f"fields with values: {', '.join(fields)}"
        problems.append(Problem(path, repr(written), expected))
        return {}
    values = {}
    for key, value in written.items():
        field = fields.get(key)
        if field is None:
            close = difflib.get_close_matches(str(key), fields, n=1)
            fix = f"did you mean {close[0]}?" if close else ""
            expected = f"one of {', '.join(fields)}"
            problems.append(Problem(path, f"the unknown field {key!r}", expected, fix))
            continue
        values[field.attribute] = field.read(f"{path}.{key}", value, problems)
    return values


def lacking(
    path: str, found: Mapping[str, Any], fields: Mapping[str, Field], problems: list[Problem]
) -> None:
    """Adds a problem for each required field that an entry does not have."""
    missing = [name for name, f in fields.items() if f.required and f.attribute not in found]
    if missing:
        fix = f"add {', '.join(missing)}"
        problems.append(Problem(path, f"no {', '.join(missing)}", "all required fields", fix))


def inconsistent(path: str, one: Architecture) -> list[Problem]:
    """Problems of a model whose fields are right one by one, and contradict each other."""
    if one.num_heads % one.num_kv_heads:
        got = f"{one.num_kv_heads} with num_heads {one.num_heads}"
        return [Problem(f"{path}.num_kv_heads", got, "a divisor of num_heads")]
    return []
