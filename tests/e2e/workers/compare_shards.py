"""Trains two copies of a model, one with an optimizer over DTensors and torch's clipping, one with
`Session.shards`; rank 0 prints their difference. Run by torchrun."""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from holdfast import session

MAX_NORM = 0.05
STEPS = 4


def main(shard: int, tensor: int) -> None:
    torch.set_num_threads(1)
    s = session.init(shard=shard)
    make = build if tensor == 1 else build_tensor_parallel
    ours, theirs = make(s, tensor), make(s, tensor)
    shards = s.shards(ours)
    quick = torch.optim.AdamW(shards.parameters(), lr=0.01)
    usual = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        torch.manual_seed(1000 * step + s.rank // tensor)
        inputs = torch.randn(3, 5)
        if tensor > 1:  # each rank has a part of the sequence
            inputs = torch.randn(3, 2 * tensor, 4).chunk(tensor, 1)[s.rank % tensor]
        for model in (ours, theirs):
            model(inputs).square().mean().backward()
        if shard == tensor == 1:  # models that are not wrapped do not average their gradients
            for model in (ours, theirs):
                average(model)
        quick_norm = shards.clip_grad_norm_(MAX_NORM)
        usual_norm = whole(torch.nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM))
        norms.append((float(quick_norm), float(usual_norm)))
        for optimizer in (quick, usual):
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in ours.parameters())
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    apart = max(float((whole(a) - whole(b)).abs().max()) for a, b in pairs)
    if s.rank == 0:
        print(json.dumps({"norms": norms, "apart": apart}))
    session.leave()
    sys.stdout.flush()
    os._exit(0)  # like a worker: threads of gloo abort a process during interpreter teardown


def build(s: session.Session, tensor: int) -> nn.Module:
    """Sizes that do not divide evenly: some ranks hold less of a parameter, or nothing."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))
    if s.shape.shard > 1:
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=s.fsdp_mesh)
        fully_shard(model, mesh=s.fsdp_mesh)
    return model


def build_tensor_parallel(s: session.Session, tensor: int) -> nn.Module:
    """Sharded over `tensor` ranks, and with FSDP2 over the others: weights are split twice."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    shape = (s.world_size // tensor, tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tensor"))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], plan)
    if s.world_size > tensor:
        fully_shard(model, mesh=mesh["shard"])
    return model


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
