"""The boxes in the headers of shard files, read where the sums of the agents prove nothing.

The format is that of workers/checkpoint/layout.py, whose readers check it; here only shapes count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol.coverage import uncovered
from holdfast.orchestrator.protocol.mesh import Mesh

MAX_NAMED = 3
"""Tensors named in a refusal."""


class HeldBox(NamedTuple):
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    parts: int


def read_boxes(system: Any, path: str) -> dict[str, HeldBox]:
    """Of one file, by tensor. Raises HoldfastError if it has no such header, or what the store's
    library raises."""
    start = bytes(system.cat_file(path, start=0, end=8))
    end = 8 + int.from_bytes(start, "little")
    try:
        document = json.loads(bytes(system.cat_file(path, start=8, end=end)))
        held = json.loads(document["__metadata__"]["holdfast"])["tensors"]
        return {
            name: HeldBox(
                tuple(box["global_shape"]),
                tuple(box["offset"]),
                tuple(document[name]["shape"]),
                int(box.get("parts", 0)),
            )
            for name, box in held.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise HoldfastError(f"{path}: its header cannot be read ({error})") from None


def gaps(shards: Sequence[dict[str, HeldBox]], mesh: Mesh) -> str:
    """What no shard holds, and what to change; empty: nothing is missing."""
    boxes: dict[tuple[str, tuple[int, ...]], list[HeldBox]] = {}
    for shard in shards:
        for name, box in shard.items():
            boxes.setdefault((name, box.global_shape), []).append(box)
    missing = {}
    for (name, shape), held in boxes.items():
        if count := uncovered(shape, ((one.offset, one.shape) for one in held)):
            missing[name] = f"{name} lacks {count} values"
    if not missing:
        return ""
    more = len(missing) - MAX_NAMED
    named = ", ".join(list(missing.values())[:MAX_NAMED]) + (f" and {more} more" * (more > 0))
    text = f"the {len(shards)} shards ({mesh.describe()}) do not hold every value: {named}"
    ranks, parts = mesh.num_shards // mesh.pipeline, max(b[0].parts for b in boxes.values())
    if parts > ranks:
        text += (
            f"; the model is split into {parts} parts and the mesh of the spec into {ranks}: set "
            f"spec.parallelism.shard to {parts}, or shard the model over session.fsdp_mesh"
        )
    return text
