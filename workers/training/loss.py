"""The loss of each token: cross entropy, and the z-loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor
from torch.distributed.tensor import DTensor


def token_losses(logits_nv: Tensor, targets_n: Tensor, z_loss: float = 0.0) -> Tensor:
    """Losses (N) in float32 of logits (N, V) in any format: cross entropy, and `z_loss` times the
    square of log Z, where Z is the sum of exp(logits). Source of the z-loss: Chowdhery et al.,
    "PaLM", 2022, section 5.

    Logits that are divided over a tensor axis come as a DTensor, inside `loss_parallel()`; there
    `z_loss` must be 0, as its sum would gather them. The losses are then the same on its ranks.
    """
    logits_nv = logits_nv.float()
    losses_n = F.cross_entropy(logits_nv, targets_n, reduction="none")
    if isinstance(losses_n, DTensor):
        losses_n = losses_n.to_local()
    if z_loss:
        losses_n = losses_n + z_loss * torch.logsumexp(logits_nv, dim=-1).square()
    return losses_n
