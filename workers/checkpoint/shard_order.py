"""In which order a rank opens the shards of another mesh. Pure.

With another number of shards a rank needs those that overlap its parts, and only their headers show
which do. Every shard that is opened in vain costs requests, and from another node's memory the
transfer of a whole shard. An even split is a good first guess; where a dimension is not divisible
the parts lie elsewhere (5,000 rows in 4,096 parts are 2,500 parts of 2 rows), and each header that
has been read shows where. The order changes nothing but the time: in the end all are opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .layout import Box


class ShardOrder:
    """Iterates over the stored shards; `missing` is called with what is still missing after each,
    and makes the order better."""

    def __init__(self, shard: int, num_shards: int, num_stored: int) -> None:
        """`shard` of `num_shards` is this rank."""
        self._num_stored = num_stored
        self._even = range(
            shard * num_stored // num_shards, -(-(shard + 1) * num_stored // num_shards)
        )
        self._unopened = dict.fromkeys(range(num_stored))
        self._likely: dict[int, None] = {}

    def __iter__(self) -> Iterator[int]:
        for index in self._even:
            del self._unopened[index]
            yield index
        while self._unopened:
            index = next((i for i in self._likely if i in self._unopened), self._nearest())
            del self._unopened[index]
            yield index

    def _nearest(self) -> int:
        middle = self._even[len(self._even) // 2]
        return min(self._unopened, key=lambda index: abs(index - middle))

    def missing(self, opened: int, parts: Iterable[tuple[Box, Box]]) -> None:
        """After shard `opened`: for each tensor that is not complete, its box in that shard and the
        box that this rank has to fill."""
        found: dict[int, None] = {}
        for stored, wanted in parts:
            if stored.parts and wanted.num_elements:
                found |= dict.fromkeys(_holders(opened, stored, wanted, self._num_stored))
        if found:
            self._likely = found


def _holders(opened: int, stored: Box, wanted: Box, num_stored: int) -> Iterator[int]:
    """The shards that hold values of `wanted`, if each rank has the next part of the dimension in
    which the boxes differ, as with torch.chunk."""
    sizes = list(zip(stored.global_shape, stored.shape, strict=True))
    for axis, (size, held) in enumerate(sizes):
        first, end = wanted.offset[axis], wanted.offset[axis] + wanted.shape[axis]
        begin = stored.offset[axis]
        if held == size or (begin <= first and end <= begin + held):
            continue
        others = 1
        for other, (whole, part) in enumerate(sizes):
            if other != axis and part:
                others *= -(-whole // part)
        chunk = -(-size // max(1, stored.parts // others))
        stride = max(1, num_stored * others // stored.parts)
        # An empty part has no position: it comes after all others.
        here = begin // chunk if held else opened // stride
        for part in range(first // chunk, (end - 1) // chunk + 1):
            yield opened + (part - here) * stride
        return
