"""Compares how a model is really sharded with the mesh of the job, before anything is staged.

The controller relies on the mesh: it takes ranks with one shard index for holders of the same
state, keeps one copy of it in storage, and deletes the others. A model that is split in another way
would lose every value that only the other ranks have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.mesh import Mesh

from .tensors import num_parts, split_dims


class WrongSharding(UserError):
    """The model is not sharded as the mesh of the job says."""


class ShardedOverWorld(WrongSharding):
    """The model is sharded over all ranks, and the mesh of the job is another one. The controller
    launches again with `shard: world` where the spec leaves the choice to it."""


_IN_CODE = "write fully_shard(..., mesh=s.fsdp_mesh) in the script"


def expect_mesh(tensors: Mapping[str, Tensor], shape: Mesh, rank: int) -> bool:
    """Raises WrongSharding unless ranks with one shard index hold the same part of every tensor,
    and the most divided tensor has a part for each rank that shares one copy of the model.

    Returns whether any tensor is divided.
    """
    checked: set[tuple[int, tuple[str, ...]]] = set()
    most, name_of_most = 1, ""
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        kind = id(tensor.device_mesh), tuple(map(repr, tensor.placements))
        if kind in checked:
            continue
        checked.add(kind)
        expect_no_sums(f"model: got {name}", tensor)
        parts = num_parts(tensor)
        _expect_same_part_on_twins(name, tensor, parts, shape, rank)
        if parts > most:
            most, name_of_most = parts, name
    expected = shape.num_shards // shape.pipeline
    if name_of_most and most != expected:
        raise _mismatch(name_of_most, tensors[name_of_most], most, shape)
    return bool(name_of_most)


def expect_no_sums(got: str, tensor: DTensor) -> None:
    """Raises UserError for partial sums."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise UserError(
            f"{got} placed as {tensor.placements}; expected shards or replicas, not partial sums; "
            "redistribute it first"
        )


def _expect_same_part_on_twins(
    name: str, tensor: DTensor, parts: int, shape: Mesh, rank: int
) -> None:
    ranks = tensor.device_mesh.mesh
    here = (ranks == rank).nonzero()
    split = split_dims(tensor)
    for twin in shape.twins(rank):
        there = (ranks == twin).nonzero()
        if len(here) and len(there) and here[0][split].tolist() != there[0][split].tolist():
            raise _mismatch(name, tensor, parts, shape)


def _mismatch(name: str, tensor: Tensor, parts: int, shape: Mesh) -> WrongSharding:
    assert isinstance(tensor, DTensor)
    inner = shape.tensor * shape.context
    shard, rest = divmod(parts, inner)
    fix, kind, ranks = _IN_CODE, WrongSharding, parts * shape.pipeline
    if rest == 0 and shard != shape.shard and shape.world_size % ranks == 0:
        size: int | str = shard
        if shape.world_size == ranks:
            size, kind = "world", ShardedOverWorld
        fix += f", or `parallelism: {{shard: {size}}}` below `spec:` in the job's YAML"
    return kind(
        f"spec.parallelism: got {name} in {parts} parts, placed as {tensor.placements} on "
        f"{tensor.device_mesh.size()} ranks; expected {shape.num_shards // shape.pipeline} parts "
        f"as in the mesh of the job ({shape.describe()}), where ranks of the replicate axis hold "
        f"the same part; {fix}"
    )


def refuse_fsdp1(model: nn.Module) -> None:
    """Raises WrongSharding for FullyShardedDataParallel: its flat parameters do not tell which
    tensors are in them, so no other mesh could read them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrapper = getattr(fsdp, "FullyShardedDataParallel", None)
    if wrapper is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, wrapper):
            raise WrongSharding(
                f"model: got FullyShardedDataParallel (FSDP1) at {name or 'its root'}; expected "
                "fully_shard (FSDP2), whose parameters tell which part a rank holds; replace "
                "FullyShardedDataParallel(module, ...) by fully_shard(module, mesh=s.fsdp_mesh)"
            )
