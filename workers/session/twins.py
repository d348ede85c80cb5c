"""The ranks that hold one shard: they exchange their own state, and agree on the steps that are
staged.

The agents ask for steps and intervals, and a request reaches one rank a step later than another.
Where ranks exchange state, all or none of them must stage a step. So after each step a rank says
whether the next one is due, as far as it knows, and it is staged if it is due for one of the twins.
That costs no wait: the answers are there when the next step has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .store import TIMEOUT


class TwinGroup:
    """A process group of its own, over main memory. Made by all its ranks together."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        self._group: Any = dist.new_group(
            list(self.ranks), timeout=TIMEOUT, backend="gloo", use_local_synchronization=True
        )
        self._shared = torch.zeros(2, dtype=torch.int32)
        self._pending: Any = None

    def largest(self, number: int) -> int:
        """The largest of their numbers. Collective."""
        held = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(held, op=dist.ReduceOp.MAX, group=self._group)
        return int(held.item())

    def exchange(self, mine: Tensor, into: Tensor) -> None:
        """Fills the rows of `into` with what each gives, in order of ranks. Collective."""
        dist.all_gather(list(into.unbind(0)), mine, group=self._group)

    def share(self, *, due: bool, hold: bool) -> None:
        """Tell the others whether to stage the next step and wait after it, without waiting."""
        self._shared = torch.tensor([due, hold], dtype=torch.int32)
        self._pending = dist.all_reduce(
            self._shared, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def agreed(self) -> tuple[bool, bool]:
        """Answers of the twins together, as (due, hold). Waits for them."""
        self._pending.wait()
        due, hold = self._shared.tolist()
        return bool(due), bool(hold)
