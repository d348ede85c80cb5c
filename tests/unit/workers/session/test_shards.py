"""Steps within backward: as those after it, with the gradients of one group at a time."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.workers.session.shards import Shards


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def test_steps_within_backward_give_the_weights_and_the_norm_of_those_after_it() -> None:
    weights, norms = [], []
    for within in (False, True):
        model = model_of()
        shards = Shards(model, torch.device("cpu"), 1)
        optimizer = torch.optim.AdamW(shards.parameters(), lr=0.1)
        if within:
            shards.step_in_backward([model[1].parameters(), model[2].parameters()], optimizer.step)
        for step in range(3):
            model(torch.full((2, 8), 1.0 + step)).square().sum().backward()
            _, norm = shards.reduce_and_clip(torch.zeros(()), 0.0)
            norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    for after, inside in zip(*weights, strict=True):
        assert torch.equal(after, inside)
    assert torch.allclose(torch.tensor(norms[:3]), torch.tensor(norms[3:]))


def test_memory_holds_the_gradients_of_one_group_at_a_time() -> None:
    model = model_of()
    shards = Shards(model, torch.device("cpu"), 1)
    optimizer = torch.optim.SGD(shards.parameters(), lr=0.1)
    held = []

    def step() -> None:
        held.append(sum(p.grad is not None for p in model.parameters()))
        optimizer.step()

    shards.step_in_backward([layer.parameters() for layer in model[:3]], step)
    model(torch.ones(2, 8)).sum().backward()
    assert held == [1, 1, 2, 2, 2]  # the last layer has no group
    assert all(p.grad is None for p in model.parameters())
