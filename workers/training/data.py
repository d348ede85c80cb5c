"""Samples as a function of (seed, index): the global batches are the same at every world size.

Documents are packed: sample i of a corpus has the tokens i T to i T + T, of which the last is only
predicted. The global batch of step k has the positions k G to k G + G - 1 of an endless order that
has each sample once an epoch, in another order every epoch. So nothing has to be stored, and a
restart or a resize needs no transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.orchestrator.api.v1alpha1.recipe import Pretrain
from holdfast.orchestrator.errors import UserError

from .corpus import FIELD, Corpus

_MASK = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 6
"""Rounds of the Feistel network; four are enough to look random, more cost little."""
_VALIDATION_SAMPLES = 64
"""Samples of one evaluation with data.validation.samples: auto."""

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


@dataclass(frozen=True)
class BatchShare:
    """One rank's part of one global batch, padded so that all ranks have the same number of
    samples."""

    indices: tuple[int, ...]
    weights: tuple[float, ...]
    """1 for a sample, 0 for padding."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass: inputs and next tokens (B, T) of int64, weights (B), and where
    the tokens are in their samples (T) of int64; None: they are all of them."""

    inputs_bt: Tensor
    targets_bt: Tensor
    weights_b: Tensor
    positions_t: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """On another device, before it is divided over a context axis."""
        return MicroBatch(
            _to(self.inputs_bt, device), _to(self.targets_bt, device), _to(self.weights_b, device)
        )


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that a GPU fetches by itself: from memory that is not page-locked the host would wait
    for everything that is queued."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def share(step: int, global_batch: int, rank: int, num_ranks: int) -> BatchShare:
    """The slice of data-parallel rank `rank`; over all ranks each sample occurs once."""
    per_rank = -(-global_batch // num_ranks)
    first = step * global_batch
    positions = range(rank * per_rank, (rank + 1) * per_rank)
    return BatchShare(
        tuple(first + min(p, global_batch - 1) for p in positions),
        tuple(1.0 if p < global_batch else 0.0 for p in positions),
    )


class Samples:
    """Consecutive samples of a corpus."""

    def __init__(self, corpus: Corpus, length: int, first: int, count: int) -> None:
        self._corpus, self._length, self._first, self._count = corpus, length, first, count

    def __len__(self) -> int:
        return self._count

    def read(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens of these samples, from 0: two (B, T) tensors of int64. Raises
        UserError for data that cannot be read, or is outside the vocabulary."""
        rows = np.empty((len(ids), self._length + 1), dtype=np.int64)
        for row, number in enumerate(ids):
            rows[row] = self._corpus.read((self._first + number) * self._length, self._length + 1)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:]


class Dataset:
    """The samples that a recipe trains on, in their order, and those that it evaluates."""

    def __init__(self, config: Pretrain, directory: str) -> None:
        """Relative sources are below `directory`. Raises UserError for data that cannot be read,
        is too short, or has fewer samples than data.validation requires."""
        data = config.data
        self._seed = config.seed
        corpus, count = _open(config, data.source, directory, FIELD, at_least=2)
        held_out = 0
        if data.validation.source is None and data.validation.held_out_share > 0:
            held_out = max(1, int(count * data.validation.held_out_share))
        self.train = Samples(corpus, data.sequence_length, 0, count - held_out)
        self.validation = Samples(corpus, data.sequence_length, count - held_out, held_out)
        if data.validation.source is not None:
            field = FIELD.replace("source", "validation.source")
            corpus, count = _open(config, data.validation.source, directory, field, at_least=1)
            self.validation = Samples(corpus, data.sequence_length, 0, count)
        wanted, there = data.validation.samples, len(self.validation)
        self.num_evaluated = min(_VALIDATION_SAMPLES, there) if wanted == "auto" else wanted
        """Samples of one evaluation."""
        if config.evaluate_every_steps and self.num_evaluated > there:
            raise UserError(
                f"{FIELD.replace('source', 'validation.samples')}: got {wanted}; expected at most "
                f"{there}, the samples of the validation data; raise validation.share, or lower "
                "the number"
            )

    def epoch(self, index: int) -> int:
        """The epoch, from 0, of the sample at this position of the order."""
        return index // len(self.train)

    def ids(self, indices: tuple[int, ...]) -> list[int]:
        """The training samples at these positions of the order."""
        size, ids = len(self.train), np.empty(len(indices), dtype=np.uint64)
        epochs = np.array([self.epoch(index) for index in indices])
        places = np.array([index % size for index in indices], dtype=np.uint64)
        for epoch in set(epochs.tolist()):
            of_epoch = epochs == epoch
            ids[of_epoch] = permuted(places[of_epoch], size, mix(self._seed, epoch))
        return [int(number) for number in ids]

    def batch(self, indices: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens of the training samples at these positions of the order."""
        return self.train.read(self.ids(indices))

    def validation_batch(self, indices: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The same as `batch`, of the `num_evaluated` samples that lie evenly over the validation
        data."""
        there = len(self.validation)
        return self.validation.read([index * there // self.num_evaluated for index in indices])


def _open(
    config: Pretrain, source: str, directory: str, field: str, *, at_least: int
) -> tuple[Corpus, int]:
    """A corpus and its number of samples."""
    data, length = config.data, config.data.sequence_length
    corpus = Corpus(source, directory, data.format, config.model.vocab_size, field)
    count = (len(corpus) - 1) // length
    if count < at_least:
        raise UserError(
            f"{field}: got {len(corpus)} tokens in {source}; expected at least "
            f"{at_least * length + 1}: {at_least} samples of sequenceLength {length} and the token "
            "after them"
        )
    return corpus, count
