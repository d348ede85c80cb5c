"""torch's Muon over this rank's parts of matrices.

Muon orthogonalises the update of a whole matrix; that of a part is another one. The parts of as
many equal matrices as there are ranks are exchanged, so that each rank gets one whole matrix,
orthogonalises it, and returns the parts: two all-to-alls in bfloat16, and no matrix is computed
twice within a shard group.
Source of the exchange: Ahn et al., "Dion: distributed orthonormalized updates", 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from holdfast.workers.checkpoint.tensors import num_parts


class WholeMuon(torch.optim.Muon):
    """The same as torch.optim.Muon, with its options and state. A parameter may be this rank's
    part of a DTensor, which is its `whole` (see Session.shards)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """`closure` is not called."""
        for group in self.param_groups:
            for bucket in _buckets(group["params"]):
                self._step(group, bucket)
        return None

    def _step(self, group: dict[str, Any], bucket: list[nn.Parameter]) -> None:
        momentum, updates = group["momentum"], []
        for parameter in bucket:
            gradient = parameter.grad
            assert gradient is not None
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            updates.append(gradient.lerp(average, momentum) if group["nesterov"] else average)

        def orthogonal(matrix: Tensor) -> Tensor:
            coefficients = group["ns_coefficients"]
            return _zeropower_via_newtonschulz(
                matrix, coefficients, group["ns_steps"], group["eps"]
            )

        parts = on_whole(updates, getattr(bucket[0], "whole", None), orthogonal)
        shape = torch.Size(getattr(bucket[0], "whole", bucket[0]).shape)
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], shape)
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(part, alpha=-rate)


def on_whole(
    parts: list[Tensor], like: DTensor | None, function: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """`function` of each whole matrix, of which `parts` are this rank's parts: this rank's parts of
    the results, in bfloat16. `like` is a DTensor that is divided like each of them; None: they are
    whole. Collective over its mesh."""
    if like is None:
        return [function(part.bfloat16()) for part in parts]
    mesh, shape = like.device_mesh, (len(parts), *like.shape)
    stride = (like.shape[0] * like.shape[1], like.shape[1], 1)
    divided = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in like.placements]
    by_matrix = [Shard(0) if isinstance(p, Shard) else p for p in like.placements]

    def tensor(local: Tensor, placements: list[Any]) -> DTensor:
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    stacked = tensor(torch.stack(parts).bfloat16(), divided)
    mine = stacked.redistribute(placements=by_matrix).to_local()
    done = torch.stack([function(matrix) for matrix in mine]) if len(mine) else mine
    return list(tensor(done, by_matrix).redistribute(placements=divided).to_local().unbind(0))


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters with a gradient, in the same order on all ranks: those of one shape and division,
    as many at a time as a matrix has parts."""
    alike: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            whole = getattr(parameter, "whole", None)
            kind: Any = (tuple(parameter.shape), None)
            if whole is not None:
                kind = (tuple(whole.shape), (id(whole.device_mesh), whole.placements))
            alike.setdefault(kind, []).append(parameter)
    for members in alike.values():
        size = num_parts(getattr(members[0], "whole", members[0]))
        for at in range(0, len(members), size):
            yield members[at : at + size]
