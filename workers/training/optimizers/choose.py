"""Choice of the optimizer for each parameter.

Muon and Dion step the matrices within the blocks. Embedding, norms and head are stepped by AdamW:
their gradients are sparse, or they are no maps between hidden states.
Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from holdfast.orchestrator.api.v1alpha1.recipe import Optimizer

from .adamw8bit import AdamW8bit
from .dion import Dion
from .muon import WholeMuon

IN_BLOCKS = "blocks."


class Optimizers:
    """Several optimizers that step together, each with parameters of its own."""

    def __init__(self, optimizers: dict[str, torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()


def make_optimizer(
    config: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer | Optimizers:
    """The optimizer of `config` over this rank's parts of the parameters, by plain name."""
    if (settings := config.muon or config.dion) is None:
        return _adamw(config, list(parameters.values()))
    matrices = [p for name, p in parameters.items() if name.startswith(IN_BLOCKS) and p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in parameters.values() if id(p) not in chosen]
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "momentum": settings.momentum,
    }
    of_matrices: torch.optim.Optimizer
    if config.dion:
        of_matrices = Dion(matrices, rank_fraction=config.dion.rank_fraction, **options)
    else:
        of_matrices = WholeMuon(matrices, adjust_lr_fn="match_rms_adamw", **options)
    return Optimizers({config.chosen: of_matrices, "adamw": _adamw(config, others)})


def _adamw(config: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if config.chosen == "adamw8bit":
        return AdamW8bit(groups, config.learning_rate, betas)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)
