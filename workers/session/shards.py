"""Shards: this rank's parts of a model's parameters as plain tensors, for an optimizer, with
gradient norm and clipping.

An optimizer works element by element and needs no global view. On DTensors, its first step and that
of `clip_grad_norm_` derive the layout of every operator for each new mesh, so in each recovery: a
quarter of a second on two cores for a model of 40 parameters, and a little time in every later
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.workers.checkpoint.placement import expect_no_sums
from holdfast.workers.checkpoint.tensors import local_of, num_parts


class Shards:
    """This rank's parts of a model; `Session.shards(model)` makes it."""

    def __init__(
        self, model: nn.Module, device: torch.device, world_size: int, num_stages: int = 1
    ) -> None:
        """Each stage of a pipeline has other parameters, on as many of the ranks."""
        self._model, self._device = model, device
        self._num_stages = num_stages
        self._shards = [local_parameter(parameter) for parameter in model.parameters()]
        self._waiting: list[set[int]] = []
        """Parameters that have their gradients, of each group that is stepped in backward."""
        self.resized(world_size)
        self._copied: tuple[list[float], Tensor] | None = None
        """The shares of the last call, and the same on the device."""

    def resized(self, world_size: int) -> None:
        """The job has this many ranks now, and a backward was perhaps interrupted."""
        self._world_size, holders = world_size, world_size // self._num_stages
        self._shares = [num_shards(parameter) / holders for parameter in self._model.parameters()]
        self._stepped: Tensor | None = None
        """Sum of the squares of gradients that were used and freed within backward."""
        for waiting in self._waiting:
            waiting.clear()

    def parameters(self) -> list[nn.Parameter]:
        """Parameters for the optimizer, in the order of `model.parameters()`. They share the
        model's memory; parameters that are not sharded are the model's own."""
        return list(self._shards)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Moves the gradients from the model's parameters to these parts, and clips their norm to
        `max_norm` (0: no clipping), as `torch.nn.utils.clip_grad_norm_` on the model, with one
        all-reduce. Call it between backward and the optimizer's step.

        Returns the L2 norm before clipping, over all ranks: a scalar on the session's device.
        """
        return self.reduce_and_clip(torch.zeros((), device=self._device), max_norm)[1]

    def reduce_and_clip(
        self, loss: Tensor, max_norm: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The same as clip_grad_norm_, and sums the scalar `loss` over all ranks in the same
        all-reduce. Gradients that come multiplied by `scale` are divided by it.

        Returns (summed loss, norm), two scalars on the session's device.
        """
        moved = self._moved()
        gradients = [gradient for gradient, _ in moved]
        squares = torch.zeros((), device=self._device) if self._stepped is None else self._stepped
        self._stepped = None
        if gradients:
            # A part that n ranks have counts 1/n on each of them.
            squares_p = torch.stack(torch._foreach_norm(gradients)).float().square()
            shares_p = self._shares_on(squares_p.device, [share for _, share in moved])
            squares = squares + (squares_p @ shares_p).to(self._device)
        both = torch.stack([loss.detach().float().to(self._device), squares])
        if self._world_size > 1:
            dist.all_reduce(both)
        norm = both[1].sqrt() / scale
        if gradients and (max_norm > 0 or scale != 1.0):
            factor = torch.full_like(norm, 1.0 / scale)
            if max_norm > 0:
                factor *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        return both[0], norm

    def _shares_on(self, device: torch.device, shares: list[float]) -> Tensor:
        """Copied to the device when they change only: the host would wait for the device."""
        if self._copied is None or self._copied[0] != shares:
            self._copied = shares, torch.tensor(shares, device=device)
        return self._copied[1]

    def step_in_backward(
        self, groups: Iterable[Iterable[nn.Parameter]], step: Callable[[], object]
    ) -> None:
        """Call `step`, of an optimizer over these parts, within backward from now on, as soon as
        all parameters of one of the `groups` have their gradients, which are then freed: memory
        holds the gradients of one group. Parameters in no group are stepped one by one.

        Each backward is a step: gradients are neither accumulated nor clipped, though
        reduce_and_clip still gives their norm. Not for DDP, which reduces after these hooks.
        """
        index = {id(p): number for number, p in enumerate(self._model.parameters())}
        members = [[index[id(p)] for p in group] for group in groups]
        grouped = {number for group in members for number in group}
        members += [[number] for number in index.values() if number not in grouped]
        whole = list(self._model.parameters())
        for group in members:
            waiting: set[int] = set()
            self._waiting.append(waiting)

            def ready(_: Tensor, number: int, waiting: set[int], group: list[int]) -> None:
                waiting.add(number)
                if len(waiting) == len(group):
                    waiting.clear()
                    self._step_group(group, whole, step)

            for number in group:
                hook = partial(ready, number=number, waiting=waiting, group=group)
                whole[number].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _step_group(
        self, group: list[int], whole: list[nn.Parameter], step: Callable[[], object]
    ) -> None:
        moved = [s for number in group if (s := self._move(number, whole[number])) is not None]
        for gradient, share in moved:
            square = gradient.float().square().sum().to(self._device) * share
            self._stepped = square if self._stepped is None else self._stepped + square
        step()
        for number in group:
            self._shards[number].grad = None

    def _moved(self) -> list[tuple[Tensor, float]]:
        """(gradient, the share of it that this rank counts) of each part with a gradient."""
        whole = enumerate(self._model.parameters())
        moved = (self._move(number, parameter) for number, parameter in whole)
        return [s for s in moved if s is not None]

    def _move(self, number: int, parameter: nn.Parameter) -> tuple[Tensor, float] | None:
        shard = self._shards[number]
        if not parameter.requires_grad:
            return None
        if shard is not parameter:
            local = local_of(parameter)
            if local.data_ptr() != shard.data_ptr():  # FSDP2 may pad them in its first forward
                shard.data = local
            shard.grad = _local_gradient(parameter)
            parameter.grad = None
        return None if shard.grad is None else (shard.grad, self._shares[number])


def _local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's part of the gradient, sharded like the parameter. A sequence-parallel layer
    leaves partial sums, which are reduced here, as an optimizer over DTensors would."""
    gradient = parameter.grad
    if (
        isinstance(gradient, DTensor)
        and isinstance(parameter, DTensor)
        and gradient.placements != parameter.placements
    ):
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local_of(gradient)


def num_shards(parameter: Tensor) -> int:
    """Number of different parts of a parameter. Raises UserError for partial sums."""
    if isinstance(parameter, DTensor):
        got = f"session.shards: got a parameter of shape {tuple(parameter.shape)}"
        expect_no_sums(got, parameter)
    return num_parts(parameter)


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's part of a DTensor parameter, in the same memory, with the parameter as `whole`
    for the checkpoint; other parameters as they are."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = nn.Parameter(local_of(parameter), requires_grad=parameter.requires_grad)
    local.whole = parameter  # type: ignore[attr-defined]
    return local
