"""The state of one rank's own objects as bytes: loaders, random generators. No pickle.

8 bytes little-endian length, JSON text of so many bytes, then the bytes of all tensors and arrays;
the JSON has for each what it is, its dtype, shape, and place.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.orchestrator.errors import UserError

from .layout import UnsupportedValue, pack, unpack
from .tensors import DTYPES, TORCH_DTYPES

_LENGTH_BYTES = 8
_PLAIN_ARRAYS = "biufc"
"""Kinds of numpy's dtypes that are numbers."""


class _Blobs:
    """Values that JSON lacks, one after another."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind in (bytes, bytearray):
            return ["bytes", "", [], *self._place(bytes(value))]
        if kind is torch.Tensor and value.dtype in DTYPES:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            place = self._place(flat.numpy().tobytes())
            return ["tensor", DTYPES[value.dtype], list(value.shape), *place]
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _PLAIN_ARRAYS:
            what = "array" if isinstance(value, np.ndarray) else "number"
            return [what, value.dtype.str, list(value.shape), *self._place(value.tobytes())]
        of = f" of {value.dtype}" if kind in (torch.Tensor, np.ndarray) else ""
        raise UnsupportedValue(kind.__name__ + of)

    def _place(self, data: bytes) -> tuple[int, int]:
        begin = len(self.data)
        self.data += data
        return begin, len(self.data)


def encode(values: dict[str, Any]) -> bytes:
    """The states of objects by their names. Raises UserError for a value without a form here."""
    blobs, packed = _Blobs(), {}
    for name, value in values.items():
        try:
            packed[name] = pack(value, blobs.add)
        except UnsupportedValue as error:
            raise UserError(
                f"per_rank[{name!r}]: got {error} in its state; expected numbers, text, lists, "
                "mappings, bytes, plain tensors and arrays of numbers"
            ) from None
    text = json.dumps(packed, separators=(",", ":")).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + bytes(blobs.data)


def decode(data: bytes) -> dict[str, Any]:
    """The result of what `encode` was given. Raises ValueError for other bytes."""
    at = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    packed, value_of = json.loads(data[_LENGTH_BYTES:at]), _reader(data[at:])
    return {name: unpack(value, value_of) for name, value in packed.items()}


def to_json(value: Any) -> list[Any]:
    """One value as JSON values: itself, and the bytes that it refers to. Raises UnsupportedValue
    for one without a form here."""
    blobs = _Blobs()
    return [pack(value, blobs.add), base64.b64encode(blobs.data).decode()]


def from_json(held: list[Any]) -> Any:
    """The value that `to_json` was given."""
    return unpack(held[0], _reader(base64.b64decode(held[1])))


def _reader(data: bytes) -> Callable[[Any], Any]:
    blobs = memoryview(data)

    def value_of(held: Any) -> Any:
        what, dtype, shape, begin, end = held
        part = bytearray(blobs[begin:end])
        if what == "bytes":
            return bytes(part)
        if what == "tensor":
            if not part:
                return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
            return torch.frombuffer(part, dtype=torch.uint8).view(TORCH_DTYPES[dtype]).view(shape)
        array = np.frombuffer(part, dtype=dtype).reshape(shape)
        return array if what == "array" else array[()]

    return value_of


class Access(NamedTuple):
    """Access to the state of an object, for reading and writing."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def access(name: str, held: Any) -> Access:
    """Access to an object given as `per_rank`. Raises UserError for one of an unknown kind."""
    for read, write in (
        ("state_dict", "load_state_dict"),
        ("get_state", "set_state"),  # torch.Generator, the module numpy.random
        ("getstate", "setstate"),  # random.Random, the module random
    ):
        if hasattr(held, read) and hasattr(held, write):
            return Access(getattr(held, read), getattr(held, write))
    if isinstance(held, np.random.Generator):
        source = held.bit_generator

        def write_generator(state: Any) -> None:
            source.state = state

        return Access(lambda: source.state, write_generator)
    if isinstance(held, MutableMapping):
        return Access(lambda: dict(held), held.update)
    raise UserError(
        f"session.restore: got {type(held).__name__} as per_rank[{name!r}]; expected an object "
        "with state_dict and load_state_dict, a generator of torch, numpy or random, or a dict"
    )
