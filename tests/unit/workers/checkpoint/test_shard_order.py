"""Number of shards that a rank opens when it restores on another mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from holdfast.workers.checkpoint.layout import Box
from holdfast.workers.checkpoint.shard_order import ShardOrder

LLAMA = [(128256, 8192), (8192, 8192), (1024, 8192), (28672, 8192), (8192,)]
UNEVEN = [(5000, 64), (8192,), (129, 16)]


def part(shape: Sequence[int], index: int, rows: int, columns: int = 1) -> Box:
    """Part of rank `index` of rows x columns, columns varying fastest, as torch.chunk divides."""
    sizes = [rows, columns] if len(shape) > 1 else [rows]
    places = [index // columns, index % columns]
    offset, held = [0] * len(shape), list(shape)
    for axis, (parts, place) in enumerate(zip(sizes, places, strict=False)):
        chunk = -(-shape[axis] // parts)
        begin = min(shape[axis], place * chunk)
        offset[axis], held[axis] = begin, min(shape[axis], begin + chunk) - begin
    if 0 in held:
        offset = [0] * len(shape)
    return Box(tuple(shape), tuple(offset), tuple(held), math.prod(sizes))


def opened(
    shapes: list[tuple[int, ...]], rank: int, new: tuple[int, int], old: tuple[int, int]
) -> tuple[int, int]:
    """Number of shards that a rank opens, and how many of them have values that it needs."""
    num_new, num_old = math.prod(new), math.prod(old)
    wanted = [part(shape, rank, *new) for shape in shapes]
    filled = [0] * len(shapes)
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    order = ShardOrder(rank, num_new, num_old)
    num_opened, useful = 0, 0
    for index in order:
        num_opened += 1
        stored = [part(shape, index, *old) for shape in shapes]
        for number, (box, target) in enumerate(zip(stored, wanted, strict=True)):
            ranges = box.overlap(target)
            key = (number, box.offset, box.shape)
            if ranges is not None and key not in seen:  # vectors are the same on each column
                seen.add(key)
                filled[number] += math.prod(end - begin for begin, end in ranges)
        boxes = zip(stored, wanted, strict=True)
        useful += any(box.overlap(target) is not None for box, target in boxes)
        left = [n for n, target in enumerate(wanted) if filled[n] < target.num_elements]
        if not left:
            break
        order.missing(index, [(stored[n], wanted[n]) for n in left])
    return num_opened, useful


@pytest.mark.parametrize("shapes", [LLAMA, UNEVEN], ids=["llama", "uneven"])
@pytest.mark.parametrize(("old", "new"), [(4096, 3072), (3072, 4096), (4096, 512), (512, 4096)])
def test_of_4096_shards_a_rank_opens_few_in_vain(
    shapes: list[tuple[int, ...]], old: int, new: int
) -> None:
    for rank in range(0, new, 61):
        num, useful = opened(shapes, rank, (new, 1), (old, 1))
        assert num - useful <= 2 + old // new, f"rank {rank} opened {num} for {useful}"


def test_the_shards_of_another_tensor_axis_are_found() -> None:
    for rank in range(0, 3072, 61):
        num, useful = opened(UNEVEN, rank, (384, 8), (512, 8))
        assert num - useful <= 40, f"rank {rank} opened {num} for {useful}"


def test_all_shards_are_opened_in_the_end_each_once() -> None:
    order = ShardOrder(2, 5, 9)
    seen = []
    for index in order:
        seen.append(index)
        order.missing(index, [(Box((9,), (index,), (1,), 9), Box((9,), (0,), (9,), 9))])
    assert sorted(seen) == list(range(9)) and seen[:2] == [3, 4]
