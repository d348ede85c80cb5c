"""Samples as a function of (seed, index): the global batches are the same at every world size.

The global batch of step k is samples k*G to k*G+G-1. Sample i starts at a hashed position of the
text, so nothing has to be shuffled or stored, and a resize needs no transfer.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import files

STDLIB = "stdlib"
MAX_STDLIB_BYTES = 8 * 2**20
"""Enough text for a small model; read in about 10 ms."""
MAX_TEXT_BYTES = 4 * 2**30
HELD_OUT_FRACTION = 0.05
"""Share of the text, at its end, that is used for evaluation only."""
_SKIPPED_DIRECTORIES = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
_MASK = 2**64 - 1

Bytes = npt.NDArray[np.uint8]


def mix(*numbers: int) -> int:
    """A 63-bit hash of integers: splitmix64's finaliser over a running sum.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@dataclass(frozen=True)
class BatchShare:
    """One rank's part of one global batch, padded so that all ranks have the same number of
    samples."""

    indices: tuple[int, ...]
    weights: tuple[float, ...]
    """1 for a sample, 0 for padding."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass: inputs and next tokens (B, T) of int64, weights (B)."""

    inputs_bt: Tensor
    targets_bt: Tensor
    weights_b: Tensor

    def to(self, device: torch.device) -> MicroBatch:
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


class Text:
    """A text as bytes, and the samples in it."""

    def __init__(self, source: str, directory: str, sequence_length: int, seed: int) -> None:
        """A relative source is below `directory`. Raises UserError."""
        text = load(source, directory)
        held_out = max(int(len(text) * HELD_OUT_FRACTION), sequence_length + 1)
        if len(text) < 4 * (sequence_length + 1):
            raise UserError(
                f"spec.entrypoint.recipe.config.data.source: got {len(text)} bytes in {source}; "
                f"expected at least {4 * (sequence_length + 1)} (four samples of sequenceLength "
                f"{sequence_length} and the byte to predict)"
            )
        self._train, self._held_out = text[:-held_out], text[-held_out:]
        self._length, self._seed = sequence_length, seed

    def batch(self, indices: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Inputs and next bytes of these samples: two (B, T) tensors of int64."""
        return self._take(self._train, indices, 0)

    def held_out_batch(self, indices: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `batch`, from the held-out text."""
        return self._take(self._held_out, indices, 1)

    def _take(self, text: Bytes, indices: tuple[int, ...], stream: int) -> tuple[Tensor, Tensor]:
        num_starts = len(text) - self._length
        rows = np.empty((len(indices), self._length + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            at = mix(self._seed, stream, index) % num_starts
            rows[row] = text[at : at + self._length + 1]
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:]


def load(source: str, directory: str) -> Bytes:
    """The text of a source as bytes. Raises UserError if it cannot be read."""
    if source == STDLIB:
        return _stdlib()
    field = "spec.entrypoint.recipe.config.data.source"
    try:
        path = files.resolve(directory, source)
        if path.is_dir():
            return _concatenate(sorted(p for p in path.rglob("*") if p.is_file()), MAX_TEXT_BYTES)
        return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else _empty()
    except OSError as error:
        raise UserError(
            f"{field}: got {source!r}, which cannot be read ({error.filename}: {error.strerror}); "
            "expected stdlib, or a file or directory relative to the spec file's workingDirectory"
        ) from None


@functools.cache
def _stdlib() -> Bytes:
    """Cached: a worker forked from a warm process inherits it."""
    root = Path(sysconfig.get_path("stdlib"))
    text = _concatenate(_stdlib_files(root), MAX_STDLIB_BYTES)
    if len(text) == 0:
        raise UserError(
            f"spec.entrypoint.recipe.config.data.source: got stdlib, but {root} has no .py "
            "files; expected an installation with its source; name a file or directory instead"
        )
    return text


def _stdlib_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_DIRECTORIES)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name)


def _concatenate(files: Iterator[Path] | list[Path], max_bytes: int) -> Bytes:
    out = bytearray()
    for file in files:
        out += file.read_bytes()
        if len(out) >= max_bytes:
            break
    return np.frombuffer(bytes(out[:max_bytes]), dtype=np.uint8)


def _empty() -> Bytes:
    return np.empty(0, dtype=np.uint8)
