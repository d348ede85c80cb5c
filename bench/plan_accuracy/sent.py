"""Bytes that one rank sends in a step, by kind of collective and by group.

A ring over N ranks moves (N-1)/N of the whole for a gather or a reduce-scatter and twice that for
an all-reduce, as the planner counts. An all-to-all sends what is not this rank's own part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from holdfast.orchestrator.protocol.mesh import AXES, Mesh

_WITHOUT_BYTES = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class Sent:
    """Observes operators; `num_bytes` are those since the last `clear`."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh, self._rank = mesh, rank
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        """(kind, axes of the group) -> bytes."""
        self.calls: Counter[tuple[str, str]] = Counter()

    def clear(self) -> None:
        self.num_bytes.clear()
        self.calls.clear()

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func.namespace not in ("c10d", "_c10d_functional", "_dtensor", "symm_mem"):
            return
        name = func._opname
        if name in _WITHOUT_BYTES:
            return
        ranks = _ranks(func, args, kwargs)
        kind, size = _sent(name, args, kwargs, len(ranks), ranks.index(self._rank))
        if size:
            self.num_bytes[kind, self._axes(ranks)] += int(size)
            self.calls[kind, self._axes(ranks)] += 1

    def _axes(self, ranks: Sequence[int]) -> str:
        """The axes along which the ranks of a group differ."""
        at = [self._mesh.coordinates(rank) for rank in ranks]
        return " x ".join(axis for axis in AXES if len({one[axis] for one in at}) > 1)


def _ranks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in ("process_group", "group_name", "group"):
        if name in given:
            value = given[name]
            group = _resolve_process_group(value) if isinstance(value, str) else _unboxed(value)
            return dist.get_process_group_ranks(group)
    raise NotImplementedError(f"no group among the arguments of {func}: {names}")


def _unboxed(value: Any) -> Any:
    return value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)


def _sent(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], num: int, index: int
) -> tuple[str, float]:
    ring = (num - 1) / num
    match name:
        case "_allgather_base_":
            return "all-gather", _bytes(args[0]) * ring
        case "allgather_into_tensor_coalesced_":
            return "all-gather", _bytes(args[0]) * ring
        case "allgather_":
            return "all-gather", _bytes(args[0]) * ring
        case "all_gather_into_tensor" | "all_gather_into_tensor_coalesced":
            return "all-gather", _bytes(args[0]) * (num - 1)
        case "all_gather_into_tensor_out":
            return "all-gather", _bytes(args[0]) * (num - 1)
        case "_reduce_scatter_base_":
            return "reduce-scatter", _bytes(args[1]) * ring
        case "reduce_scatter_tensor" | "reduce_scatter_tensor_coalesced":
            return "reduce-scatter", _bytes(args[0]) * ring
        case "allreduce_" | "all_reduce" | "all_reduce_" | "allreduce_coalesced_":
            return "all-reduce", _bytes(args[0]) * 2 * ring
        case "broadcast_" | "broadcast":
            return "broadcast", _bytes(args[0])
        case "alltoall_base_":
            return "all-to-all", _all_to_all(args[1], args[4], num, index)
        case "all_to_all_single":
            return "all-to-all", _all_to_all(args[0], args[2], num, index)
        case "shard_dim_alltoall":
            return "all-to-all", _bytes(args[0]) * ring
        case "send":
            return "send", _bytes(args[0])
        case "recv_":
            return "send", 0
    raise NotImplementedError(f"the bytes of {name} are not known")


def _all_to_all(given: Tensor, splits: Sequence[int] | None, num: int, index: int) -> float:
    if not splits:
        return _bytes(given) * (num - 1) / num
    row = _bytes(given) / max(1, given.shape[0])
    return row * (sum(splits) - splits[index])


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(one) for one in value)
