"""The file format of one rank's training state: safetensors with metadata of Holdfast. No torch, no
IO.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
padded with spaces, then the bytes of all entries without a gap. Entries are `model.<name>`,
`optim.<name>.<key>` and `rank.<rank>` (rank_state.py). The header's `__metadata__` has two keys.
`holdfast` is JSON text with step, generation, shard, num_shards, per entry its global_shape, offset
and checksum (xxh3_64 of its bytes), and `extra`, the state that is not a tensor, as `pack` encodes
it. `holdfast-header` is the xxh3_64 of the header and its length, with zeros in its own place. So
every byte of a file is covered, and `parse_header` checks the header wherever it is read.

The length of a header is fixed over a generation: numbers that change from step to step are padded,
so a staging buffer is updated in place and is a complete file whenever it is not being written.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import HoldfastError

MODEL, OPTIMIZER, RANK = "model.", "optim.", "rank."
MODULES = "modules"
"""Key in `extra`: what modules return from get_extra_state."""
METADATA_KEY = "holdfast"
HEADER_CHECKSUM_KEY = "holdfast-header"
_CHECKSUM_FIELD = b'"%s":"' % HEADER_CHECKSUM_KEY.encode()
ALIGNMENT = 64
"""Data starts on a cache line, so copies of aligned tensors are aligned."""
MAX_HEADER_BYTES = limits.MAX_HEADER_BYTES
"""The bound of the safetensors library."""

DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip

INTEGER_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Element size -> a numpy type of that size, to copy elements of any dtype."""

_STEP_WIDTH, _CHECKSUM_WIDTH = 20, 16
_NO_CHECKSUM = b"0" * _CHECKSUM_WIDTH
_EXTRA_MIN_BYTES = 4096
_LENGTH_BYTES = 8
_HEADER_START = b'{"__metadata__":{' + _CHECKSUM_FIELD
_HEADER_CHECKSUM_AT = _LENGTH_BYTES + len(_HEADER_START)


MAX_DIMENSIONS, MAX_TENSOR_BYTES = 64, 2**63 - 1
"""A tensor of torch and an array of numpy have no more."""


class DamagedCheckpoint(HoldfastError):
    """Bytes of a checkpoint are not those that were written. Names the file and, if known, the
    tensor."""

    def __init__(self, file: str, what: str, tensor: str = "") -> None:
        self.file, self.tensor, self.what = file, tensor, what
        where = f"{file}: {tensor}" if tensor else file
        super().__init__(f"{where}: damaged checkpoint: {what}; use an earlier one")


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a global tensor that an entry holds."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    parts: int = field(default=1, compare=False)
    """Number of different parts of the tensor over the ranks of a replica."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: Box) -> tuple[tuple[int, int], ...] | None:
        """Per dimension the common (begin, end) in global positions; None: no overlap."""
        ranges = []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            begin, end = max(a, b), min(a + n, b + m)
            if begin >= end:
                return None
            ranges.append((begin, end))
        return tuple(ranges)

    def slices(self, ranges: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
        """Global ranges as slices of this entry's own array."""
        return tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, self.offset, strict=True))


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; begin and end are bytes after the header."""

    name: str
    dtype: str
    box: Box
    begin: int = 0
    end: int = 0
    checksum: str = ""

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """The header of a shard file."""

    step: int
    generation: int
    shard: int
    num_shards: int
    entries: Mapping[str, Entry]
    extra: dict[str, Any]
    data_start: int

    @property
    def num_bytes(self) -> int:
        """Length of the whole file."""
        return self.data_start + max((entry.end for entry in self.entries.values()), default=0)


@dataclass
class Layout:
    """The positions of all data in the files that one rank writes in one generation."""

    entries: tuple[Entry, ...]
    template: bytearray
    """The header with its length; `render` fills in the numbers."""
    num_bytes: int
    digest: int
    """Equal for layouts whose files differ in numbers, checksums and extra state only."""
    _step_at: int
    _checksums_at: list[int]
    _extra_at: int
    _extra_room: int

    @property
    def data_start(self) -> int:
        return len(self.template)

    def fits(self, extra: bytes) -> bool:
        """True if the header has room for this encoded `extra`; if not, a new layout is needed."""
        return len(extra) <= self._extra_room

    def render_part(self, step: int, checksums: Mapping[int, int], extra: bytes) -> bytearray:
        """The header of one step with the checksums of some entries, by index. Its own checksum,
        and those of other entries, are not valid."""
        assert self.fits(extra)
        out = self.template
        out[self._step_at : self._step_at + _STEP_WIDTH] = b"%20d" % step
        out[self._extra_at : self._extra_at + self._extra_room] = extra.ljust(self._extra_room)
        for index, checksum in checksums.items():
            at = self._checksums_at[index]
            out[at : at + _CHECKSUM_WIDTH] = b"%016x" % checksum
        return out

    def header_ranges(self, entries: Collection[int], *, first: bool) -> list[tuple[int, int]]:
        """The bytes of the header with the checksums of these entries, and what precedes each in
        the header. `first`: also all that belongs to no entry."""
        start = self._checksums_at[0] if self._checksums_at else self.data_start
        ends = [start, *(at + _CHECKSUM_WIDTH for at in self._checksums_at)]
        ranges = [(ends[index], ends[index + 1]) for index in sorted(entries)]
        if first:
            ranges = [(0, start), *ranges, (ends[-1], self.data_start)]
        return merged(ranges)

    def render(self, step: int, checksums: Sequence[int], extra: bytes) -> bytearray:
        """The header of one step. `checksums` are in the order of `entries`."""
        assert len(checksums) == len(self.entries)
        out = self.render_part(step, dict(enumerate(checksums)), extra)
        seal_header(out)
        return out


def seal_header(header: bytearray) -> None:
    """Writes the checksum of a complete header into it."""
    at = _HEADER_CHECKSUM_AT
    header[at : at + _CHECKSUM_WIDTH] = _NO_CHECKSUM
    header[at : at + _CHECKSUM_WIDTH] = b"%016x" % xxhash.xxh3_64_intdigest(header)


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending ranges, with those joined that touch."""
    out: list[tuple[int, int]] = []
    for begin, end in ranges:
        if out and out[-1][1] == begin:
            begin = out.pop()[0]
        out.append((begin, end))
    return out


def make_layout(
    entries: Sequence[Entry],
    *,
    generation: int,
    shard: int,
    num_shards: int,
    extra: bytes,
) -> Layout:
    """Places the entries (widest elements first, so each is aligned) and builds the header."""
    ordered = sorted(entries, key=lambda e: -DTYPE_BYTES[e.dtype])
    placed, at = [], 0
    for entry in ordered:
        end = at + entry.box.num_elements * DTYPE_BYTES[entry.dtype]
        placed.append(Entry(entry.name, entry.dtype, entry.box, at, end))
        at = end

    out = bytearray(_LENGTH_BYTES)
    out += _HEADER_START
    out += _NO_CHECKSUM + b'","%s":"' % METADATA_KEY.encode()
    out += _escape('{"step":')
    step_at = len(out)
    out += b" " * _STEP_WIDTH
    out += _escape(f',"generation":{generation},"shard":{shard},"num_shards":{num_shards},')
    out += _escape('"tensors":{')
    checksums_at = []
    for index, entry in enumerate(placed):
        held: dict[str, Any] = {
            "global_shape": list(entry.box.global_shape), "offset": list(entry.box.offset),
            "parts": entry.box.parts,
        }  # fmt: skip
        text = f"{',' if index else ''}{json.dumps(entry.name)}:{json.dumps(held)[:-1]}"
        out += _escape(text + ',"checksum":"')
        checksums_at.append(len(out))
        out += _NO_CHECKSUM + _escape('"}')
    out += _escape('},"extra":')
    # Not to the byte: that of twins may differ a little, and their layouts must not.
    room = max(_EXTRA_MIN_BYTES, 1 << (2 * len(extra)).bit_length())
    extra_at = len(out)
    out += b" " * room + _escape("}") + b'"}'
    for entry in placed:
        body = {
            "dtype": entry.dtype,
            "shape": list(entry.box.shape),
            "data_offsets": [entry.begin, entry.end],
        }
        out += f",{json.dumps(entry.name)}:{json.dumps(body)}".encode()
    out += b"}"
    out += b" " * (-len(out) % ALIGNMENT)
    out[:_LENGTH_BYTES] = (len(out) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    digest = xxhash.xxh3_64_intdigest(out)
    places = (step_at, checksums_at, extra_at, room)
    return Layout(tuple(placed), out, len(out) + at, digest, *places)


def encode_extra(value: Mapping[str, Any]) -> bytes:
    """State that is not a tensor, as the header holds it."""
    return _escape(json.dumps(value, separators=(",", ":"), allow_nan=False))


def header_length(start: bytes, file: str) -> int:
    """Bytes before the data, from the first 8 bytes. Raises DamagedCheckpoint."""
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if len(start) < _LENGTH_BYTES or not 2 <= length <= MAX_HEADER_BYTES:
        raise DamagedCheckpoint(file, "it has no safetensors header")
    return _LENGTH_BYTES + length


class _EntryMetadata(msgspec.Struct):
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    checksum: str
    parts: int


class _Metadata(msgspec.Struct):
    step: int
    generation: int
    shard: int
    num_shards: int
    tensors: dict[str, _EntryMetadata]
    extra: dict[str, Any]


class _TensorHeader(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def parse_header(start: bytes | memoryview, file: str) -> Header:
    """The header in the first bytes of a file. Raises DamagedCheckpoint."""
    data_start = header_length(bytes(start[:_LENGTH_BYTES]), file)
    if len(start) < data_start:
        raise DamagedCheckpoint(file, f"it ends after {len(start)} bytes, within its header")
    try:
        document = msgspec.json.decode(start[_LENGTH_BYTES:data_start], type=dict[str, msgspec.Raw])
        outer = msgspec.json.decode(document.pop("__metadata__"), type=dict[str, str])
        _check(outer, start[:data_start], file)
        inner = _metadata(outer[METADATA_KEY])
        tensors = {n: msgspec.json.decode(raw, type=_TensorHeader) for n, raw in document.items()}
    except KeyError:
        what = "it is not a shard of Holdfast (no `holdfast` metadata)"
        raise DamagedCheckpoint(file, what) from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise DamagedCheckpoint(file, f"its header cannot be read ({error})") from None
    entries = {
        name: _entry(name, tensors.get(name), held, file) for name, held in inner.tensors.items()
    }
    if len(entries) != len(tensors):
        raise DamagedCheckpoint(file, "tensors and metadata in its header disagree")
    header = (inner.step, inner.generation, inner.shard, inner.num_shards)
    return Header(*header, entries, inner.extra, data_start)


def _check(metadata: Mapping[str, str], header: bytes | memoryview, file: str) -> None:
    """Compares the header with its checksum. Raises DamagedCheckpoint, also for other keys."""
    plain = bytearray(header)
    at = plain.find(_CHECKSUM_FIELD) + len(_CHECKSUM_FIELD)
    plain[at : at + _CHECKSUM_WIDTH] = _NO_CHECKSUM
    expected = metadata.get(HEADER_CHECKSUM_KEY)
    got = f"{xxhash.xxh3_64_intdigest(plain):016x}"
    if metadata.keys() != {METADATA_KEY, HEADER_CHECKSUM_KEY} or got != expected:
        what = f"the checksum of its header is {got}; expected {expected}"
        raise DamagedCheckpoint(file, what)


def _metadata(text: str) -> _Metadata:
    """Raises ValueError, the base of msgspec's errors."""
    try:
        return msgspec.json.decode(text, type=_Metadata)
    except msgspec.DecodeError:
        # Python's decoder accepts what msgspec does not: half of a surrogate pair in a text.
        return msgspec.convert(json.loads(text), type=_Metadata)


def _entry(name: str, tensor: _TensorHeader | None, held: _EntryMetadata, file: str) -> Entry:
    if tensor is None:
        raise DamagedCheckpoint(file, "tensors and metadata in its header disagree", name)
    box = Box(held.global_shape, held.offset, tensor.shape, held.parts)
    begin, end = tensor.data_offsets
    fits = len(box.shape) == len(box.offset) == len(box.global_shape) and all(
        o >= 0 and n >= 0 and o + n <= g
        for o, n, g in zip(box.offset, box.shape, box.global_shape, strict=True)
    )
    size = DTYPE_BYTES.get(tensor.dtype)
    if not fits or size is None or begin < 0 or end - begin != box.num_elements * size:
        raise DamagedCheckpoint(file, "its header contradicts itself", name)
    num_dimensions = len(box.global_shape)
    if num_dimensions > MAX_DIMENSIONS:
        what = f"{num_dimensions} dimensions; at most {MAX_DIMENSIONS}"
        raise DamagedCheckpoint(file, what, name)
    if math.prod(max(n, 1) for n in box.global_shape) * size > MAX_TENSOR_BYTES:
        raise DamagedCheckpoint(file, f"its shape has more than {MAX_TENSOR_BYTES} bytes", name)
    return Entry(name, tensor.dtype, box, begin, end, held.checksum)


def _escape(text: str) -> bytes:
    """ASCII text as the inside of a JSON string."""
    return json.dumps(text)[1:-1].encode()


# -- checksums ----------------------------------------------------------------------------------
Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 256 * 1024
"""Fits a core's second-level cache, so the hash reads what the copy has just written: faster than
one plain copy of 40 MB (3.2 ms against 3.9 ms), which bypasses the cache."""


def copy_and_hash(target: Bytes, source: Bytes) -> int:
    """Copies `source` to `target`; returns the xxh3_64 of the new contents of `target`."""
    num_bytes = source.nbytes
    if num_bytes <= CHUNK_BYTES:
        target[:] = source
        return xxhash.xxh3_64_intdigest(target.data)
    state = xxhash.xxh3_64()
    copy_and_update(target, source, state)
    return state.intdigest()


def copy_and_update(target: Bytes, source: Bytes, state: xxhash.xxh3_64) -> None:
    """The same as copy_and_hash, for the next part of what `state` hashes."""
    for begin in range(0, source.nbytes, CHUNK_BYTES):
        chunk = target[begin : begin + CHUNK_BYTES]
        chunk[:] = source[begin : begin + CHUNK_BYTES]
        state.update(chunk.data)


def hash_bytes(data: Bytes) -> int:
    """xxh3_64 of all of `data`."""
    return xxhash.xxh3_64_intdigest(data.data)


# -- values that are not tensors, as JSON -------------------------------------------------------
# A value that JSON lacks (an infinite float, a tuple, a mapping whose keys are not text) is a
# mapping with one of these marks as its only key. A mapping that happens to look like one is stored
# as pairs.
_FLOAT, _TUPLE, _PAIRS, _COUNTER = "__float__", "__tuple__", "__pairs__", "__counter__"
_BLOB = "__blob__"
_MARKS = frozenset((_FLOAT, _TUPLE, _PAIRS, _COUNTER, _BLOB))
_JSON_TYPES = frozenset((str, int, bool, type(None)))


class UnsupportedValue(TypeError):
    """A value that a checkpoint cannot hold; the text is the name of its type, as a rule."""


def unsupported(value: Any) -> Any:
    raise UnsupportedValue(type(value).__name__)


def pack(value: Any, blob: Callable[[Any], Any] = unsupported) -> Any:
    """The value as JSON values. `blob` returns JSON values for one that has no form here, such as
    an array, and `unpack` needs its counterpart. Raises UnsupportedValue if `unpack` could not
    return an equal one."""
    try:
        return _pack(value, blob)
    except RecursionError:
        raise UnsupportedValue("a value that contains itself") from None


def _pack(value: Any, blob: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in _JSON_TYPES:
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, Mapping):
        return _pack_mapping(value, blob)
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item, blob) for item in value]}
    if isinstance(value, list):
        return [_pack(item, blob) for item in value]
    for plain in (str, int, float):  # a member of an enum, a number of numpy
        if isinstance(value, plain):
            return _pack(plain(value) if plain is not str else str.__str__(value), blob)
    return {_BLOB: blob(value)}


def _pack_mapping(value: Mapping[Any, Any], blob: Callable[[Any], Any]) -> Any:
    texts = all(type(key) is str for key in value)
    looks_marked = len(value) == 1 and not _MARKS.isdisjoint(value)
    if texts and not looks_marked and not isinstance(value, Counter):
        return {key: _pack(item, blob) for key, item in value.items()}
    mark = _COUNTER if isinstance(value, Counter) else _PAIRS
    return {mark: [[_pack(key, unsupported), _pack(item, blob)] for key, item in value.items()]}


def unpack(value: Any, blob: Callable[[Any], Any] = unsupported) -> Any:
    """The value that was packed, from decoded JSON. Raises DamagedCheckpoint for other JSON."""
    try:
        return _unpack(value, blob)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = f"a value that is not a tensor cannot be read ({error})"
        raise DamagedCheckpoint("the checkpoint", what) from None


def _unpack(value: Any, blob: Callable[[Any], Any]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, blob) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, held),) = value.items()
        if mark == _FLOAT:
            return float(held)
        if mark == _TUPLE:
            return tuple(_unpack(item, blob) for item in held)
        if mark == _PAIRS:
            return {_unpack(key, unsupported): _unpack(item, blob) for key, item in held}
        if mark == _COUNTER:
            return Counter({_unpack(key, unsupported): _unpack(item, blob) for key, item in held})
        if mark == _BLOB and blob is not unsupported:
            return blob(held)
    return {key: _unpack(item, blob) for key, item in value.items()}
