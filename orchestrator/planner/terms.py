"""One contribution to an estimate of memory, and sums over the phases of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

Category = Literal[
    "weights", "gradients", "master", "moments", "activations", "transients", "logits", "context"
]
"""weights: parameters in the format of forward and backward; master: their float32 shards;
transients: gathered blocks and their gradients; context: what CUDA and NCCL take."""

CATEGORIES: tuple[Category, ...] = (
    "master", "moments", "gradients", "weights", "activations", "transients", "logits", "context",
)  # fmt: skip

PHASES = (
    "forward", "loss", "backward begins", "backward ends", "backward of the embedding",
    "optimizer step",
)  # fmt: skip
"""Phases of a step. backward begins: in the last block, with the activations of all blocks; it ends
in the first one, with the gradients of nearly all; the embedding comes after it."""

FORWARD, LOSS, BACKWARD_BEGINS, BACKWARD_ENDS, EMBEDDING, STEP = (
    1 << number for number in range(len(PHASES))
)
ALWAYS = (1 << len(PHASES)) - 1
_NUMBERS = tuple(
    tuple(n for n in range(len(PHASES)) if bits >> n & 1) for bits in range(ALWAYS + 1)
)
"""Bits -> indices of PHASES."""


class Term(NamedTuple):
    category: Category
    what: str
    num_bytes: float
    phases: int
    """A bit for each of PHASES."""
    formula: Callable[[], str]
    """The formula with the numbers of this case. Made when it is asked for: a search asks for few
    of many."""
    source: str
    exact: bool = False


def by_phase(terms: Iterable[Term]) -> tuple[float, ...]:
    """Bytes in each of PHASES."""
    sums = [0.0] * len(PHASES)
    for term in terms:
        size = term.num_bytes
        for number in _NUMBERS[term.phases]:
            sums[number] += size
    return tuple(sums)


def peak(terms: Iterable[Term]) -> float:
    return max(by_phase(terms))
