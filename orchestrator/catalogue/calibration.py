"""Measured time of the parts of a step over the planner's estimate of them, and which of several
measurements fits a job best. measurements.py reads and writes them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from ..planner.workload import ParallelLayout, Workload
from .types import Link


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Factors on estimated seconds: measured / estimated."""

    block: float = 1.0
    head: float = 1.0
    """Head and loss."""
    optimizer: float = 1.0
    date: str = ""
    """The day of the measurement, as 2026-11-25."""
    link: Link | None = None
    """Measured link between the workers of the machine; None: use the catalogue's."""

    def describe(self) -> str:
        text = f"blocks x {self.block:.2f}, head x {self.head:.2f}"
        text = f"calibrated on {self.date}: {text}, optimizer x {self.optimizer:.2f}"
        if self.link is not None:
            text += f"; link {self.link.bandwidth / 1e9:.2f} GB/s, {self.link.latency * 1e6:.0f} us"
        return text


NOT_CALIBRATED = Calibration()


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of a measurement. Device and formats must be the same; of the others the nearest
    are taken, as the share of a peak that is reached changes slowly with them."""

    device: str
    width: int
    """Bytes of a parameter in forward and backward."""
    float8: bool
    compiled: bool
    dim: int
    tokens: int
    """Tokens of a micro-batch."""
    sequence_length: int
    vocab_size: int
    chunk_tokens: int
    """Tokens of the loss's chunks; 0: in one piece."""
    checkpointing: str
    """Choice of activation checkpointing."""


class CalibrationEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    key: Key
    calibration: Calibration


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Output of the measuring process: medians, in seconds."""

    block_s: float
    """Forward and backward of a block for one micro-batch."""
    head_s: float
    """Norm, head and loss, forward and backward."""
    optimizer_s: float | None
    """A step over `parameters`; None: not measured."""
    parameters: int
    link_latency_s: float | None = None
    """Latency of one step of a ring; None: one worker, or on GPUs."""
    link_bandwidth: float | None = None
    """Bytes/s that one worker sends in an all-reduce."""


def key_of(work: Workload, layout: ParallelLayout, device: str) -> Key:
    return Key(
        device=device,
        width=work.width,
        float8=work.float8,
        compiled=work.compiled,
        dim=work.model.dim,
        tokens=layout.micro_batch * work.sequence_length,
        sequence_length=work.sequence_length,
        vocab_size=work.model.vocab_size,
        chunk_tokens=layout.chunk_tokens,
        checkpointing=layout.checkpointing.chosen,
    )


def nearest(entries: Iterable[CalibrationEntry], wanted: Key) -> CalibrationEntry | None:
    """The measurement of the same device and formats whose sizes differ by the smallest factors;
    None: there is none."""
    alike = [entry for entry in entries if _kind(entry.key) == _kind(wanted)]
    return min(alike, key=lambda one: _distance(one.key, wanted), default=None)


def _kind(key: Key) -> tuple[object, ...]:
    return key.device, key.width, key.float8, key.compiled


def _distance(one: Key, other: Key) -> float:
    pairs = (
        (one.dim, other.dim),
        (one.tokens, other.tokens),
        (one.sequence_length, other.sequence_length),
        (one.vocab_size, other.vocab_size),
    )
    differ = [
        one.checkpointing != other.checkpointing,
        bool(one.chunk_tokens) != bool(other.chunk_tokens),
    ]
    return sum(differ) + sum(abs(math.log2(mine / theirs)) for mine, theirs in pairs)


def with_entry(
    entries: Iterable[CalibrationEntry], new: CalibrationEntry
) -> tuple[CalibrationEntry, ...]:
    """The entries with a new one in place of an older one of the same key."""
    return (*(entry for entry in entries if entry.key != new.key), new)
