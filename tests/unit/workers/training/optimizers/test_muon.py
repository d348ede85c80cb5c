"""Muon over parts of matrices: what one rank sends, and torch's own result for whole ones."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.training.loop import train_step
from holdfast.workers.training.optimizers import Optimizers
from holdfast.workers.training.optimizers.muon import WholeMuon
from tests.unit.workers.training.parallel.recorded import Recorder, job_of, rank_of


def test_whole_matrices_are_stepped_as_torch_does() -> None:
    torch.manual_seed(0)
    here = [nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8, 20))]
    there = [nn.Parameter(p.detach().clone()) for p in here]
    ours, theirs = WholeMuon(here, lr=0.1), torch.optim.Muon(there, lr=0.1)
    for _ in range(3):
        for a, b in zip(here, there, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        theirs.step()
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
        state = theirs.state[b]["momentum_buffer"]
        torch.testing.assert_close(ours.state[a]["momentum_buffer"], state)


def test_matrices_of_the_blocks_are_exchanged_in_bfloat16_and_the_rest_is_stepped_by_adamw() -> (
    None
):
    job = job_of({"shard": 2}, {"optimizer": {"muon": {}}})
    with rank_of(job, Mesh(shard=2)) as trainer:
        train_step(trainer, 0)
        with Recorder() as recorder:
            trainer_optimizer = trainer.optimizer
            for parameter in trainer.parallel.shards.parameters():
                parameter.grad = torch.ones_like(parameter)
            trainer_optimizer.step()
    assert isinstance(trainer_optimizer, Optimizers)
    matrices = trainer_optimizer.optimizers["muon"].param_groups[0]["params"]
    # 3 blocks: query, key, value, output of one shape (12, six pairs); gate with up (3 pairs);
    # down (2 buckets). Each goes there and back.
    assert len(matrices) == 3 * 7
    # gloo has no all-to-all: torch gathers, and takes a part.
    exchanges = ("all_to_all_single", "all_gather_into_tensor")
    assert {one.dtype for one in recorder.sent} == {torch.bfloat16}
    assert sum(one.operation in exchanges for one in recorder.sent) == 2 * (6 + 3 + 2)
    names = trainer.parallel.named_shards()
    others = {
        id(p) for g in trainer_optimizer.optimizers["adamw"].param_groups for p in g["params"]
    }
    assert {n for n, p in names.items() if id(p) in others} == {
        n for n in names if "norm" in n or n.startswith(("embedding", "head"))
    }
