"""Size of a simulated job's state, and the speed of its copies."""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.orchestrator import limits

PUSH_STEPS = (0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0)
"""Steps that the pushes of a node take."""
STALL_STEPS = (0.0, 0.01, 0.05, 0.2)
"""Steps that the copy into a staging buffer takes."""


@dataclass(frozen=True)
class Sizes:
    shard_bytes: int
    copy_bytes_per_s: float
    """Bytes/s from a worker's memory into its staging buffer."""
    network_bytes_per_s: float
    """Bytes/s of one node, in each direction."""

    @classmethod
    def of(
        cls, push_steps: float, stall_steps: float, step_s: float, slots: int, shard_bytes: int
    ) -> Sizes:
        """Sizes whose push from all slots, at its share of the network, takes `push_steps`."""
        share = limits.BUDDY_NETWORK_PERCENT / 100
        network = slots * shard_bytes / (push_steps * step_s * share)
        copy = shard_bytes / (stall_steps * step_s) if stall_steps else float("inf")
        return cls(shard_bytes, copy, network)

    @classmethod
    def draw(cls, seed: int, step_s: float, slots: int) -> Sizes:
        """Draw from their own random numbers: other draws of the seed stay what they are."""
        rng = random.Random(f"sizes {seed}")
        shard_bytes = rng.choice((10**6, 10**9, 13 * 10**9, 52 * 10**9))
        return cls.of(rng.choice(PUSH_STEPS), rng.choice(STALL_STEPS), step_s, slots, shard_bytes)

    @property
    def stall_s(self) -> float:
        return self.shard_bytes / self.copy_bytes_per_s

    def push_s(self, slots: int) -> float:
        """All slots of a node push at the same time."""
        share = limits.BUDDY_NETWORK_PERCENT / 100
        return slots * self.shard_bytes / (self.network_bytes_per_s * share)

    @property
    def fetch_s(self) -> float:
        return self.shard_bytes / self.network_bytes_per_s
