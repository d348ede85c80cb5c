"""Samples of the recipe. Documents are packed: sample i of a corpus has the tokens i T to i T + T,
of which the last is only predicted. Their order is that of session/order.py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from holdfast.orchestrator.api.v1alpha1.recipe import Pretrain
from holdfast.orchestrator.errors import UserError
from holdfast.workers.session.context import divide
from holdfast.workers.session.order import sample_ids

from .corpus import FIELD, Corpus

_VALIDATION_SAMPLES = 64
"""Samples of one evaluation with data.validation.samples: auto."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass: inputs and next tokens (B, T) of int64, weights (B), and where
    the tokens are in their samples (T), or in their documents (B, T), of int64; None: they are all
    of their samples."""

    inputs_bt: Tensor
    targets_bt: Tensor
    weights_b: Tensor
    positions_t: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Copy on another device, before the batch is divided over a context axis."""
        positions_t = None if self.positions_t is None else _to(self.positions_t, device)
        inputs_bt, targets_bt = _to(self.inputs_bt, device), _to(self.targets_bt, device)
        return MicroBatch(inputs_bt, targets_bt, _to(self.weights_b, device), positions_t)


@contextlib.contextmanager
def divide_batches(
    mesh: DeviceMesh | None, batches: Sequence[MicroBatch]
) -> Iterator[Sequence[MicroBatch]]:
    """The same as `divide`, for micro-batches. Without a mesh there is no context axis, and they
    stay whole."""
    if mesh is None:
        yield batches
        return
    inputs, targets = [b.inputs_bt for b in batches], [b.targets_bt for b in batches]
    with divide(mesh, *inputs, *targets) as (*parts, positions_t):
        halves = zip(parts[: len(batches)], parts[len(batches) :], strict=True)
        yield [
            replace(batch, inputs_bt=inputs_bt, targets_bt=targets_bt, positions_t=positions_t)
            for batch, (inputs_bt, targets_bt) in zip(batches, halves, strict=True)
        ]


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that a GPU fetches by itself: from memory that is not page-locked the host would wait
    for everything that is queued."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


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
        self._length = data.sequence_length
        self._seed, self.end = config.seed, sys.maxsize
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
        return sample_ids(indices, len(self.train), self._seed)

    def num_targets(self, indices: Sequence[int], evaluation: bool = False) -> int:
        """Tokens of these samples that have a loss."""
        return len(indices) * self._length

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
