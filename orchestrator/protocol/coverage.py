"""Do the shards of a checkpoint together hold every value of every tensor? Pure.

Each agent reports two sums for its file (facts.CoverageSum), made of a hash H of every corner of
every box. The alternating sum of H over the corners of a box is additive: if boxes tile a tensor,
their sums add up to that of the whole tensor, and if it is split into n of the N parts that its
ranks could hold, each part is held N / n times. So sum(n x corners) over N ranks equals N x corners
of the whole exactly if every value is held equally often. That costs 16 bytes per rank, whatever
the number of tensors. It proves one direction only: shards may cover all values unevenly, which
`uncovered` counts exactly from the boxes themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from .facts import ShardFile
from .mesh import Mesh

MODULUS = 2**64
MAX_CELLS = 10**6
"""A second of work; the boxes of a mesh do not overlap, so each has a few cells."""

BoxKey = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) of a part."""


def proved(files: Sequence[ShardFile], mesh: Mesh) -> bool:
    """True if the sums of all shards prove that every value is held. `files` in order of shards."""
    per_stage = mesh.num_shards // mesh.pipeline
    for begin in range(0, len(files), per_stage):
        sums = [file.coverage for file in files[begin : begin + per_stage]]
        wholes = {part.whole for part in sums}
        weighted = sum(part.weighted for part in sums) % MODULUS
        if len(wholes) > 1 or weighted != per_stage * wholes.pop() % MODULUS:
            return False
    return True


def uncovered(global_shape: tuple[int, ...], boxes: Iterable[BoxKey]) -> int:
    """Number of values of a tensor that are in none of the boxes. Raises ValueError if the boxes
    cut the tensor into more cells than a mesh does."""
    distinct = [(offset, shape) for offset, shape in dict.fromkeys(boxes) if math.prod(shape)]
    if any(shape == global_shape for _offset, shape in distinct):
        return 0
    edges: list[list[int]] = []
    for axis, size in enumerate(global_shape):
        ends = {0, size}
        for offset, shape in distinct:
            ends |= {offset[axis], offset[axis] + shape[axis]}
        edges.append(sorted(ends))
    places = [{edge: index for index, edge in enumerate(axis)} for axis in edges]
    held: set[tuple[int, ...]] = set()
    num_cells = 0
    for offset, shape in distinct:
        ranges = [
            range(place[at], place[at + size])
            for place, at, size in zip(places, offset, shape, strict=True)
        ]
        num_cells += math.prod(map(len, ranges))
        if num_cells > MAX_CELLS:
            raise ValueError(f"its boxes cut it into more than {MAX_CELLS} cells")
        held.update(itertools.product(*ranges))
    volumes = (_volume(edges, cell) for cell in held)
    return math.prod(global_shape) - sum(volumes)


def _volume(edges: list[list[int]], cell: tuple[int, ...]) -> int:
    return math.prod(axis[at + 1] - axis[at] for axis, at in zip(edges, cell, strict=True))
