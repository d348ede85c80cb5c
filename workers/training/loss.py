"""The loss of each token: cross entropy, and the z-loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


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


def losses_in_chunks(
    head: Callable[[Tensor], Tensor], x_btd: Tensor, targets_bt: Tensor, chunk_tokens: int,
    z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """Losses (B, T) of the logits that `head` makes of activations (B, T, D), `chunk_tokens` tokens
    at a time: logits are freed after the loss, and computed again in backward. The weight's
    gradient is summed over the chunks in the format of the weight."""

    def losses(x_nd: Tensor, targets_n: Tensor) -> Tensor:
        return token_losses(head(x_nd), targets_n, z_loss)

    chunks = zip(
        torch.split(x_btd.flatten(0, 1), chunk_tokens),
        torch.split(targets_bt.flatten(), chunk_tokens),
        strict=True,
    )
    kept = [
        checkpoint(losses, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    return torch.cat(kept).view_as(targets_bt)
