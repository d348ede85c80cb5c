"""Initial values of parameters, the same on any mesh: they depend on (seed, name, position)."""

from __future__ import annotations

import math

import torch
import xxhash
from torch import Tensor

from holdfast.workers.checkpoint.tensors import box_of, local_of
from holdfast.workers.session.order import mix

_BLOCK = 2**20
"""Number of values drawn from one seed. With blocks a rank draws only its own part of a huge
tensor."""


def fill(parameter: Tensor, seed: int, name: str, deviation: float | None) -> None:
    """Initial values of one parameter: ones, or normal values from (seed, name, position).

    Value number i of the whole tensor comes from block i // _BLOCK, so values do not depend on
    the mesh, and a rank draws only the blocks that overlap the rows of its part.
    """
    with torch.no_grad():
        local = local_of(parameter)
        if deviation is None:
            local.fill_(1.0)
            return
        if local.numel() == 0:
            return
        box = box_of(parameter)
        if tuple(local.shape[1:]) == tuple(box.global_shape[1:]):  # whole rows
            width = math.prod(box.global_shape[1:])
            begin = (box.offset[0] if box.offset else 0) * width
            _draw(local.view(-1), begin, parameter.numel(), seed, name, deviation)
            return
        width = box.global_shape[1]  # of a matrix that is divided by columns
        first, rows = box.offset[1], max(1, _BLOCK // width)
        for at in range(0, local.shape[0], rows):
            part = local[at : at + rows]
            whole = torch.empty(part.shape[0], width, dtype=local.dtype, device=local.device)
            begin = (box.offset[0] + at) * width
            _draw(whole.view(-1), begin, parameter.numel(), seed, name, deviation)
            part.copy_(whole[:, first : first + part.shape[1]])


def _draw(flat: Tensor, begin: int, total: int, seed: int, name: str, deviation: float) -> None:
    """The values from position `begin` on of a tensor with `total` values."""
    end = begin + flat.numel()
    key = xxhash.xxh3_64_intdigest(name.encode())
    generator = torch.Generator(device=flat.device)
    for block in range(begin // _BLOCK, -(-end // _BLOCK)):
        first = block * _BLOCK
        size = min(_BLOCK, total - first)
        generator.manual_seed(mix(seed, key, block))
        values = torch.empty(size, device=flat.device).normal_(0.0, deviation, generator=generator)
        low, high = max(begin, first), min(end, first + size)
        flat[low - begin : high - begin] = values[low - first : high - first]
