"""Dion: orthonormal updates of low rank. Its state has another shape than the parameter.

For a matrix W (m, n) with momentum M and a right factor Q (n, r):
    B = M + G;  P = orthonormal columns of B Q;  R = B^T P
    M = B - (1 - mu) P R^T;  Q = R with columns of length 1;  W = W - rate P Q^T
Source: Ahn et al., "Dion: distributed orthonormalized updates", 2025, algorithm 1.

W, G and M are divided by rows. Q is kept in rows over the same ranks and gathered for a step; what
else is sent are sums of (r, r) and (n, r) numbers. No rank needs a whole W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from holdfast.workers.checkpoint.tensors import box_of, empty_on_mesh

_JITTER = 1e-7
"""Share of the mean square that is added to a Gram matrix: a direction without update stays 0."""


class Dion(torch.optim.Optimizer):
    """A parameter may be this rank's part of a DTensor, which is its `whole` (see
    Session.shards)."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        rank_fraction: float = 0.25,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "rank_fraction": rank_fraction,
        }
        super().__init__(params, defaults)

    def state_placements(self, key: str, whole: DTensor) -> Sequence[Any] | None:
        """Placements of a parameter's state of this key in checkpoints (see optimizer_state.py)."""
        if key != "right":
            return None
        return [Replicate() if p.is_replicate() else Shard(0) for p in whole.placements]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """`closure` is not called."""
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._step(group, number, parameter)
        return None

    def _step(self, group: dict[str, Any], number: int, parameter: nn.Parameter) -> None:
        whole = getattr(parameter, "whole", None)
        m, n = parameter.shape if whole is None else whole.shape
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            rank = max(1, math.ceil(group["rank_fraction"] * min(m, n)))
            state["momentum"] = torch.zeros_like(gradient)
            state["right"] = self._first(number, (n, rank), parameter, whole)
        both = state["momentum"].add_(gradient)
        right = state["right"]
        whole_right = right.full_tensor() if isinstance(right, DTensor) else right
        left = both @ whole_right
        for _ in range(2):
            left = _orthonormal(left, whole)
        product = _sum_of_parts(both.T @ left, whole)
        state["momentum"].sub_(left @ product.T, alpha=1 - group["momentum"])
        whole_right = product / product.norm(dim=0, keepdim=True).clamp(min=1e-12)
        _copy_part(right, whole_right)
        rate = group["lr"] * 0.2 * math.sqrt(max(m, n))  # as Muon, so that AdamW's rate serves
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(left @ whole_right.T, alpha=rate)

    def _first(
        self, number: int, shape: tuple[int, int], parameter: Tensor, whole: DTensor | None
    ) -> Tensor:
        """The same on any mesh: it depends on the parameter's number and the shape only."""
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(shape, generator=generator).to(parameter)
        if whole is None:
            return values
        placements = self.state_placements("right", whole)
        assert placements is not None
        mesh, device = whole.device_mesh, parameter.device
        right = empty_on_mesh(shape, parameter.dtype, device, mesh, placements)
        _copy_part(right, values)
        return right


def _orthonormal(left: Tensor, whole: DTensor | None) -> Tensor:
    """Cholesky QR of a matrix whose rows are divided; twice, it is orthonormal to rounding. The
    Gram matrix has the square of its condition number: in float32 a gradient of lower rank, as of a
    few tokens, would make it indefinite. Source: Fukaya et al., "CholeskyQR2", 2014."""
    wide = left.double()
    gram = _sum_of_parts(wide.T @ wide, whole)
    gram.diagonal().add_(_JITTER * gram.diagonal().mean() + torch.finfo(left.dtype).tiny)
    factor = torch.linalg.cholesky(gram)
    orthonormal: Tensor = torch.linalg.solve_triangular(factor, wide.T, upper=False).T
    return orthonormal.to(left.dtype)


def _sum_of_parts(local: Tensor, whole: DTensor | None) -> Tensor:
    """The sum over the ranks that have different rows of `whole`."""
    if whole is None:
        return local
    mesh: DeviceMesh = whole.device_mesh
    kinds = [p if p.is_replicate() else Partial() for p in whole.placements]
    return DTensor.from_local(local, mesh, kinds, run_check=False).full_tensor()


def _copy_part(target: Tensor, values: Tensor) -> None:
    """Fill this rank's rows of `target` from the whole values."""
    if isinstance(target, DTensor):
        box = box_of(target)
        target._local_tensor.copy_(values[box.offset[0] : box.offset[0] + box.shape[0]])
    else:
        target.copy_(values)
