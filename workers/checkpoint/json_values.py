"""Values of Python as values of JSON, and back as they were.

Owns: what state that is no tensor may consist of, and how JSON holds what it has no word for: an
infinite float, a tuple, a mapping whose keys are not text. Must not: know what the values mean.

What JSON lacks is a mapping with one of the marks below as its only key. A mapping that happens to
look like one is stored as pairs. Files written before there were marks are read as they stand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

_FLOAT, _TUPLE, _PAIRS, _COUNTER = "__float__", "__tuple__", "__pairs__", "__counter__"
_MARKS = frozenset((_FLOAT, _TUPLE, _PAIRS, _COUNTER))
_AS_THEY_ARE = frozenset((str, int, bool, type(None)))


class NotKept(TypeError):
    """A value that a checkpoint cannot hold; the text is the name of its type."""


def pack(value: Any) -> Any:
    """As what JSON can hold. Raises NotKept where `unpack` could not give an equal value back."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, Mapping):
        return _pack_mapping(value)
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    for plain in (str, int, float):  # an enum's member, a number of numpy
        if isinstance(value, plain):
            return pack(plain(value) if plain is not str else str.__str__(value))
    raise NotKept(kind.__name__)


def _pack_mapping(value: Mapping[Any, Any]) -> Any:
    texts = all(type(key) is str for key in value)
    like_ours = len(value) == 1 and not _MARKS.isdisjoint(value)
    if texts and not like_ours and not isinstance(value, Counter):
        return {key: pack(item) for key, item in value.items()}
    mark = _COUNTER if isinstance(value, Counter) else _PAIRS
    return {mark: [[pack(key), pack(item)] for key, item in value.items()]}


def unpack(value: Any) -> Any:
    """What was packed, from what a JSON decoder made of it."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, held),) = value.items()
        if mark == _FLOAT:
            return float(held)
        if mark == _TUPLE:
            return tuple(unpack(item) for item in held)
        if mark == _PAIRS:
            return {unpack(key): unpack(item) for key, item in held}
        if mark == _COUNTER:
            return Counter({unpack(key): unpack(item) for key, item in held})
    return {key: unpack(item) for key, item in value.items()}
