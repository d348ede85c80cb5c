"""AdamW with moments of 8 bits: close to AdamW, and every mesh continues its state."""

from __future__ import annotations

import sys
from functools import cache

import pytest
import torch
from torch import nn

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.restore import restore
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from holdfast.workers.checkpoint.tensors import empty_like
from holdfast.workers.session.shards import Shards
from holdfast.workers.training.initial_values import fill
from holdfast.workers.training.optimizers.adamw8bit import AdamW8bit
from tests.unit.workers.checkpoint.fake_ranks import Memory, Net, ShardInBytes, as_rank, build

WIDTH = 1024
"""Width of the only matrix that is kept in 8 bits: 5 rows of four blocks."""
MESHES = [(1, 1), (1, 2), (2, 2), (1, 3)]
CPU = torch.device("cpu")


def trained(replicate: int, shard: int, steps: int) -> tuple[Net, AdamW8bit, TrainingState]:
    """This rank's part after steps whose gradients are the same on any mesh."""
    model, _ = build(replicate, shard, seed=1, width=WIDTH)
    shards = Shards(model, CPU, 1)
    optimizer = AdamW8bit(shards.parameters(), lr=0.01, betas=(0.9, 0.95))
    for number in range(steps):
        for name, parameter in model.named_parameters():
            gradient = empty_like(parameter)
            fill(gradient, 10 + number, name, 1.0)
            parameter.grad = gradient
        shards.clip_grad_norm_(0)
        optimizer.step()
    return model, optimizer, TrainingState(model, optimizer, None)


@cache
def files(replicate: int, shard: int) -> dict[int, bytes]:
    found = {}
    for rank in range(shard):
        with as_rank(rank, replicate * shard):
            state, memory = trained(replicate, shard, steps=2)[2], Memory()
            Stager(state, memory, generation=1, shard=rank, num_shards=shard, device=CPU).stage(0)
            found[rank] = memory.file
    return found


@pytest.mark.parametrize("to", MESHES, ids=str)
@pytest.mark.parametrize("written", MESHES, ids=str)
def test_every_mesh_continues_the_state_of_every_other(
    written: tuple[int, int], to: tuple[int, int]
) -> None:
    stored, (replicate, shard) = files(*written), to
    for rank in range(shard):
        with as_rank(rank, replicate * shard):
            state = trained(replicate, shard, steps=0)[2]
            extra = restore(
                state, lambda index: ShardInBytes(stored[index], f"shard {index}"),
                shard=rank, num_shards=shard, num_stored=len(stored), step=0,
            )  # fmt: skip
            state.import_extra(extra)
            got = {held.name: held.local for held in state.tensors()}
            expected = {h.name: h.local for h in trained(replicate, shard, steps=2)[2].tensors()}
            assert got.keys() == expected.keys()
            assert sum(name.endswith("_scales") for name in got) == 2
            for name, values in got.items():
                assert torch.equal(values, expected[name]), name


def test_it_follows_adamw_and_keeps_two_bytes_for_a_parameter() -> None:
    torch.manual_seed(0)
    one = nn.Parameter(torch.randn(16, 512))
    other = nn.Parameter(one.detach().clone())
    optimizer = AdamW8bit([one], lr=0.01, betas=(0.9, 0.95))
    exact = torch.optim.AdamW([other], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    before = one.detach().clone()
    for _ in range(20):
        one.grad = torch.randn(16, 512) + 1
        other.grad = one.grad.clone()
        optimizer.step()
        exact.step()
    moved = (other - before).abs().mean()
    assert (one - other).abs().mean() < 0.02 * moved
    state = optimizer.state[one]
    kept = sum(t.numel() * t.element_size() for key, t in state.items() if key != "step")
    assert kept == 2 * (1 + 4 / 256) * one.numel()


def test_small_and_odd_parameters_keep_moments_like_themselves() -> None:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((8, 256), (64, 200), (8192,))]
    optimizer = AdamW8bit(parameters, lr=0.01, betas=(0.9, 0.95))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in parameters:
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


def test_without_torchao_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", None)
    with pytest.raises(UserError, match=r"optimizer\.adamw8bit: got it .*pip install torchao"):
        AdamW8bit([nn.Parameter(torch.ones(2))], lr=0.01, betas=(0.9, 0.95))
