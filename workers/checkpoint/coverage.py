"""Values that a shard file holds: sums for the controller (protocol/coverage.py). No torch."""

from __future__ import annotations

import itertools
import os
from functools import lru_cache

import xxhash

from holdfast.orchestrator.protocol.coverage import MODULUS
from holdfast.orchestrator.protocol.facts import CoverageSum

from .layout import RANK, Box, DamagedCheckpoint, Header, header_length, parse_header

PROVES_NOTHING = CoverageSum(1, 0)


def coverage_of_file(fd: int) -> CoverageSum:
    """Sum of a whole shard file."""
    try:
        length = header_length(os.pread(fd, 8, 0), "the buffer")
        return coverage_sum(parse_header(os.pread(fd, length, 0), "the buffer"))
    except DamagedCheckpoint:
        return PROVES_NOTHING


def coverage_sum(header: Header) -> CoverageSum:
    weighted = whole = 0
    for name, entry in header.entries.items():
        box = entry.box
        if name.startswith(RANK):
            continue  # only one shard has it, and it is whole
        zeros = (0,) * len(box.global_shape)
        whole += _corners(name, Box(box.global_shape, zeros, box.global_shape))
        if box.num_elements:
            weighted += box.parts * _corners(name, box)
    return CoverageSum(weighted % MODULUS, whole % MODULUS)


@lru_cache(maxsize=2**15)  # boxes stay the same over a generation
def _corners(name: str, box: Box) -> int:
    """The alternating sum over the corners of a box."""
    total = 0
    ends = [(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)]
    for picks in itertools.product((0, 1), repeat=len(ends)):
        corner = [end[pick] for end, pick in zip(ends, picks, strict=True)]
        value = xxhash.xxh3_64_intdigest(f"{name}|{corner}".encode())
        total += -value if (len(ends) - sum(picks)) % 2 else value
    return total
