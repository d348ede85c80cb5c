"""The order of samples as a function of (seed, position).

The global batch of step k has the positions k G to k G + G - 1 of an endless order that has each
sample once an epoch, in another order every epoch. So a restart or resize needs no transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 6
"""Rounds of the Feistel network; four are enough to look random, more cost little."""

Numbers = npt.NDArray[np.uint64]


def mix(*numbers: int) -> int:
    """A 63-bit hash of integers: splitmix64's finaliser over a running sum.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state >> 1


def permuted(positions: Numbers, size: int, key: int) -> Numbers:
    """The places of `positions`, each below `size`, in a permutation of range(size).

    A Feistel network permutes the next power of four, and is repeated while a place is beyond
    `size`. Source: Black, Rogaway, "Ciphers with arbitrary finite domains", 2002, section 4.
    """
    bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(bits)) - 1)
    keys = [np.uint64(mix(key, number)) for number in range(_ROUNDS)]
    out = positions.copy()
    todo = np.ones(len(out), dtype=bool)
    while todo.any():
        left, right = out[todo] >> bits, out[todo] & low
        for round_key in keys:
            mixed = (right ^ round_key) * np.uint64(_FIRST)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & low)
        out[todo] = left << bits | right
        todo = out >= np.uint64(size)
    return out


def sample_ids(indices: Sequence[int], size: int, seed: int) -> list[int]:
    """The samples, of `size`, at these positions of the order."""
    ids = np.empty(len(indices), dtype=np.uint64)
    epochs = np.array([index // size for index in indices])
    places = np.array([index % size for index in indices], dtype=np.uint64)
    for epoch in set(epochs.tolist()):
        in_epoch = epochs == epoch
        ids[in_epoch] = permuted(places[in_epoch], size, mix(seed, epoch))
    return [int(number) for number in ids]


@dataclass(frozen=True)
class BatchShare:
    """One rank's part of one global batch, padded so that all ranks have the same number of
    samples."""

    indices: tuple[int, ...]
    weights: tuple[float, ...]
    """1 for a sample, 0 for padding."""


def share(step: int, global_batch: int, rank: int, num_ranks: int) -> BatchShare:
    """The slice of data-parallel rank `rank`; over all ranks each sample occurs once."""
    per_rank = -(-global_batch // num_ranks)
    first = step * global_batch
    positions = range(rank * per_rank, (rank + 1) * per_rank)
    return BatchShare(
        tuple(first + min(p, global_batch - 1) for p in positions),
        tuple(1.0 if p < global_batch else 0.0 for p in positions),
    )
