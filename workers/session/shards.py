"""A model's parameters as this rank's own parts, in plain tensors: all that an optimizer needs.

Owns: these views, and the norm and clipping of their gradients. Must not: wrap a model, or know
what an optimizer does.

An optimizer works value by value and needs no global view. On DTensors its first step, and that of
`clip_grad_norm_`, derive every operator's layout anew for each mesh, which is each recovery: a
quarter of a second on two cores for a model of 40 parameters, and a little of every later step.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.state import local_of


class Shards:
    """Made by `Session.shards(model)` after the model is sharded and has real memory."""

    def __init__(self, model: nn.Module, device: torch.device, world_size: int) -> None:
        self._model, self._device, self._world_size = model, device, world_size
        whole = list(model.parameters())
        self._shards = [local_parameter(parameter) for parameter in whole]
        self._shares = [num_shards(parameter) / world_size for parameter in whole]

    def parameters(self) -> list[nn.Parameter]:
        """What to make the optimizer from, in the order of `model.parameters()`. They share the
        model's memory; those that are not sharded are the model's own."""
        return list(self._shards)

    def take_gradients(self) -> list[Tensor]:
        """Gives each part its gradient, takes it from the model's parameter, and returns all.

        To be called between backward and the optimizer's step, unless something is clipped.
        """
        return [gradient for gradient, _ in self._taken()]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Takes the gradients and scales them to a norm of at most `max_norm` (0: not).

        Returns their L2 norm before that, over all ranks: a scalar on the session's device. As
        `torch.nn.utils.clip_grad_norm_` on the model's parameters, with one all-reduce.
        """
        return self.reduce_and_clip(torch.zeros((), device=self._device), max_norm)[1]

    def reduce_and_clip(self, loss: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
        """As `clip_grad_norm_`, and sums `loss` over all ranks in the same all-reduce.

        Returns (summed loss, norm), scalars.
        """
        taken = self._taken()
        gradients = [gradient for gradient, _ in taken]
        squares = torch.zeros((), device=self._device)
        if gradients:
            # A part that n ranks hold counts 1/n on each of them.
            squares_p = torch.stack(torch._foreach_norm(gradients)).float().square()
            shares_p = torch.tensor([share for _, share in taken], device=squares_p.device)
            squares = (squares_p @ shares_p).to(self._device)
        both = torch.stack([loss.detach().float().to(self._device), squares])
        if self._world_size > 1:
            dist.all_reduce(both)
        norm = both[1].sqrt()
        if gradients and max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        return both[0], norm

    def _taken(self) -> list[tuple[Tensor, float]]:
        """(gradient, share of it that counts here) of each part that has one."""
        taken = []
        whole = self._model.parameters()
        for shard, share, parameter in zip(self._shards, self._shares, whole, strict=True):
            if shard is not parameter:
                local = local_of(parameter)
                if local.data_ptr() != shard.data_ptr():  # FSDP2 may pad its shards when it starts
                    shard.data = local
                shard.grad = _local_gradient(parameter)
                parameter.grad = None
            if shard.grad is not None:
                taken.append((shard.grad, share))
        return taken


def _local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's part of its gradient, laid out as the parameter is: a sequence-parallel layer
    leaves partial sums, which an optimizer over DTensors would add up."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        wanted = parameter.placements
        if gradient.placements != wanted:
            gradient = gradient.redistribute(placements=wanted)
    return None if gradient is None else local_of(gradient)


def num_shards(parameter: Tensor) -> int:
    """How many different parts of it there are over all ranks; 1: all hold the whole of it.

    Raises UserError for partial sums, of which no rank holds a part of the values."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh, placements = parameter.device_mesh, parameter.placements
    if any(placement.is_partial() for placement in placements):
        raise UserError(
            f"session.shards: got a parameter of shape {tuple(parameter.shape)} placed as "
            f"{placements}; expected shards and replicas, as partial sums are no values yet; "
            "redistribute it first"
        )
    # Not is_shard(): FSDP2 over a tensor axis gives _StridedShard, which is none for some versions.
    dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    return math.prod(mesh.size(dim) for dim in dims)


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's part of a DTensor parameter, in the same memory; others as they are. `whole`
    tells a checkpoint which parameter it is a part of."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = nn.Parameter(local_of(parameter), requires_grad=parameter.requires_grad)
    local.whole = parameter  # type: ignore[attr-defined]
    return local
