"""The order in which a rank opens the shards of another mesh. Pure.

With another number of shards a rank needs those that overlap its parts, and only their headers show
which do. Every shard that is opened in vain costs requests, and from another node's memory the
transfer of a whole shard. An even split is a good first guess; where a dimension is not divisible
the parts lie elsewhere (5,000 rows in 4,096 parts are 2,500 parts of 2 rows), and each header that
has been read shows where. Each stage of a pipeline has tensors of its own, in an equal number of
shards. The order changes nothing but the time: in the end all are opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .layout import Box


class ShardOrder:
    """Iterates over the stored shards; `missing` is called with what is still missing after each,
    and makes the order better."""

    def __init__(
        self, shard: int, num_shards: int, num_stored: int, stages: int = 1, stored_stages: int = 1
    ) -> None:
        """`shard` of `num_shards` is this rank, and `stages` are those of a pipeline."""
        parts, self._per_stage = num_shards // stages, num_stored // stored_stages
        self._even = [
            of * self._per_stage + index
            for of in _overlap(shard // parts, stages, stored_stages)
            for index in _overlap(shard % parts, parts, self._per_stage)
        ]
        self._unopened = dict.fromkeys(range(num_stored))
        self._likely: dict[int, None] = {}
        self._done: set[int] = set()
        """Stored stages that seem to have nothing more for this rank."""

    def __iter__(self) -> Iterator[int]:
        while self._unopened:
            first = (i for i in (*self._even, *self._likely) if i in self._unopened)
            index = next((i for i in first if not self._is_done(i)), self._nearest())
            del self._unopened[index]
            yield index

    def _nearest(self) -> int:
        middle = self._even[len(self._even) // 2]
        return min(self._unopened, key=lambda i: (self._is_done(i), abs(i - middle)))

    def _is_done(self, index: int) -> bool:
        return index // self._per_stage in self._done

    def missing(self, opened: int, parts: Iterable[tuple[Box, Box]]) -> None:
        """Boxes after shard `opened`: for each of its tensors that is not complete, its box in that
        shard and the box that this rank has to fill."""
        shards: dict[int, None] = {}
        anything = False
        for stored, wanted in parts:
            anything = True
            if stored.parts and wanted.num_elements:
                shards |= dict.fromkeys(_holders(opened, stored, wanted, self._per_stage))
        if shards:
            self._likely = shards
        if not anything:
            self._done.add(opened // self._per_stage)


def _overlap(index: int, count: int, stored: int) -> range:
    """The pieces of `stored` equal ones that overlap piece `index` of `count`."""
    return range(index * stored // count, -(-(index + 1) * stored // count))


def _holders(opened: int, stored: Box, wanted: Box, num_stored: int) -> Iterator[int]:
    """The shards that hold values of `wanted`, of `num_stored` of one stage, if each rank has the
    next part of the dimension in which the boxes differ, as with torch.chunk."""
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
        here = begin // chunk if held else opened % num_stored // stride
        for part in range(first // chunk, (end - 1) // chunk + 1):
            yield opened + (part - here) * stride
        return
