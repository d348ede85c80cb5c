"""The boxes in the headers of shard files, read where the sums of the agents prove nothing.

workers/checkpoint/layout.py defines the format and its readers check it; here only shapes count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import HoldfastError, few
from holdfast.orchestrator.protocol.coverage import uncovered
from holdfast.orchestrator.protocol.mesh import Mesh

MAX_NAMED = 3
"""Tensors named in a refusal."""


class BadHeader(HoldfastError):
    """A shard file whose header shows no boxes that can be compared."""


class _StoredBox(msgspec.Struct):
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    parts: int


class _StoredTensor(msgspec.Struct):
    shape: tuple[int, ...]


class HeldBox(NamedTuple):
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    parts: int


def read_boxes(system: Any, path: str) -> dict[str, HeldBox]:
    """Boxes of one file, by tensor. Raises BadHeader if it has no such header, or what the
    store's library raises."""
    start = bytes(system.cat_file(path, start=0, end=8))
    size = int.from_bytes(start, "little")
    if size > limits.MAX_HEADER_BYTES:
        raise BadHeader(f"{path}: a header of {size} bytes; at most {limits.MAX_HEADER_BYTES}")
    text = bytes(system.cat_file(path, start=8, end=8 + size))
    try:
        return _boxes(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadHeader(f"{path}: its header cannot be read ({error})") from None


def _boxes(text: bytes) -> dict[str, HeldBox]:
    """Raises ValueError, KeyError, TypeError or RecursionError for other text."""
    document = json.loads(text)
    inner = json.loads(document["__metadata__"]["holdfast"])
    boxes = {}
    for name, held in msgspec.convert(inner["tensors"], dict[str, _StoredBox]).items():
        shape = msgspec.convert(document[name], _StoredTensor).shape
        places = zip(held.offset, shape, held.global_shape, strict=True)
        if any(at < 0 or size < 0 or at + size > whole for at, size, whole in places):
            raise ValueError(f"{name} does not fit its tensor")
        boxes[name] = HeldBox(held.global_shape, held.offset, shape, held.parts)
    return boxes


def gaps(shards: Sequence[dict[str, HeldBox]], mesh: Mesh) -> str:
    """Tensors that no shard holds, and the fix; empty: none is missing. Raises BadHeader."""
    boxes: dict[tuple[str, tuple[int, ...]], list[HeldBox]] = {}
    for shard in shards:
        for name, box in shard.items():
            boxes.setdefault((name, box.global_shape), []).append(box)
    missing = {}
    for (name, shape), held in boxes.items():
        try:
            count = uncovered(shape, ((part.offset, part.shape) for part in held))
        except ValueError as error:
            raise BadHeader(f"{name}: {error}") from None
        if count:
            missing[name] = f"{name} lacks {count} values"
    if not missing:
        return ""
    named = few([*missing.values()], MAX_NAMED)
    text = f"the {len(shards)} shards ({mesh.describe()}) do not hold every value: {named}"
    ranks, parts = mesh.num_shards // mesh.pipeline, max(b[0].parts for b in boxes.values())
    if parts > ranks:
        text += (
            f"; the model is split into {parts} parts and the mesh of the spec into {ranks}: set "
            f"spec.parallelism.shard to {parts}, or shard the model over session.fsdp_mesh"
        )
    return text
