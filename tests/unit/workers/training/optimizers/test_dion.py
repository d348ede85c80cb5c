"""Dion: orthonormal updates, and state of another shape that every mesh can continue."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.workers.checkpoint.restore import restore
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from holdfast.workers.session.shards import Shards
from holdfast.workers.training.optimizers.dion import Dion
from tests.unit.workers.checkpoint.fake_ranks import Memory, ShardInBytes, as_rank, build

MATRICES = ("first.weight", "second.weight", "third.weight")


def optimizer_of(model: nn.Module) -> Dion:
    parts = Shards(model, torch.device("cpu"), 1).parameters()
    named = dict(zip((name for name, _ in model.named_parameters()), parts, strict=True))
    return Dion([named[name] for name in MATRICES], lr=0.01, rank_fraction=0.5)


def fill_state(state: TrainingState, optimizer: Dion) -> None:
    """State as after a step, whose values tell their place: fake collectives sum nothing."""
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            whole = getattr(parameter, "whole", None)
            m, n = parameter.shape if whole is None else whole.shape
            rank = max(1, -(-min(m, n) // 2))
            kept = optimizer.state[parameter]
            kept["momentum"] = torch.zeros_like(parameter)
            kept["right"] = optimizer._first(number, (n, rank), parameter, whole)
    for held in state.tensors():
        if held.name.endswith(".momentum"):
            rows = torch.arange(held.box.offset[0], held.box.offset[0] + held.box.shape[0])
            held.local.copy_(rows[:, None].expand(held.local.shape))


def files(replicate: int, shard: int) -> dict[int, bytes]:
    found = {}
    for rank in range(shard):
        with as_rank(rank, replicate * shard):
            model, _ = build(replicate, shard, seed=1)
            optimizer = optimizer_of(model)
            state = TrainingState(model, optimizer, None)
            fill_state(state, optimizer)
            memory = Memory()
            cpu = torch.device("cpu")
            stager = Stager(state, memory, generation=1, shard=rank, num_shards=shard, device=cpu)
            stager.stage(0)
            found[rank] = memory.file
    return found


@pytest.mark.parametrize("to", [(1, 1), (1, 2), (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("written", [(1, 1), (1, 2), (2, 2), (1, 3)], ids=str)
def test_every_mesh_continues_the_state_of_every_other(
    written: tuple[int, int], to: tuple[int, int]
) -> None:
    stored = files(*written)
    replicate, shard = to
    for rank in range(shard):
        with as_rank(rank, replicate * shard):
            model, _ = build(replicate, shard, seed=2)
            optimizer = optimizer_of(model)
            state = TrainingState(model, optimizer, None)
            extra = restore(
                state, lambda index: ShardInBytes(stored[index], f"shard {index}"),
                shard=rank, num_shards=shard, num_stored=len(stored), step=0,
            )  # fmt: skip
            state.import_extra(extra)
            got = {held.name: held.local.clone() for held in state.tensors()}
            fill_state(state, optimizer)
            expected = {held.name: held.local for held in state.tensors()}
            assert got.keys() == expected.keys()
            assert sum(name.endswith(".right") for name in got) == len(MATRICES)
            for name, values in got.items():
                if "model." not in name:
                    assert torch.equal(values, expected[name]), name


def one_matrix(rank_fraction: float, m: int = 24, n: int = 16) -> tuple[nn.Parameter, Dion]:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(m, n))
    options: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "rank_fraction": rank_fraction}
    return parameter, Dion([parameter], **options)


def test_the_update_of_full_rank_is_the_orthogonal_factor_of_the_gradient() -> None:
    parameter, optimizer = one_matrix(1.0)
    before, gradient = parameter.detach().clone(), torch.randn(24, 16)
    u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
    # Power iteration keeps the subspace; with all of it P Q^T has columns of length 1 only.
    parameter.grad = gradient
    optimizer.step()
    update = (before - parameter.detach()) / (0.2 * 24**0.5)
    assert torch.linalg.matrix_rank(update) == 16
    assert float((update * (u @ vh)).sum()) > 0.7 * 16  # 16: the same


def test_the_update_has_the_given_rank_and_what_it_leaves_stays_in_the_momentum() -> None:
    parameter, optimizer = one_matrix(0.25)
    before, gradient = parameter.detach().clone(), torch.randn(24, 16)
    parameter.grad = gradient
    optimizer.step()
    update = before - parameter.detach()
    state = optimizer.state[parameter]
    assert torch.linalg.matrix_rank(update) == 4 and state["right"].shape == (16, 4)
    torch.testing.assert_close(state["right"].norm(dim=0), torch.ones(4))
    left = update @ torch.linalg.pinv(state["right"].T) / (0.2 * 24**0.5)
    torch.testing.assert_close(left.T @ left, torch.eye(4), atol=1e-4, rtol=1e-4)
    kept = gradient - (1 - 0.95) * left @ (left.T @ gradient)
    torch.testing.assert_close(state["momentum"], kept, atol=1e-4, rtol=1e-4)


def test_a_matrix_without_gradients_does_not_move() -> None:
    parameter, optimizer = one_matrix(0.25)
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(parameter.detach(), before)


@pytest.mark.parametrize("gradient_rank", [1, 3])
def test_a_gradient_of_lower_rank_than_the_update_trains(gradient_rank: int) -> None:
    parameter, optimizer = one_matrix(0.25, 704, 256)
    for step in range(3):
        before = parameter.detach().clone()
        parts = torch.randn(704, gradient_rank), torch.randn(gradient_rank, 256)
        parameter.grad = parts[0] @ parts[1] * 10.0**-step
        optimizer.step()
        update = before - parameter.detach()
        assert torch.isfinite(update).all()
        largest = torch.linalg.svd(parameter.grad, full_matrices=False)
        u, vh = largest.U[:, :gradient_rank], largest.Vh[:gradient_rank]
        along = (u.T @ update @ vh.T).diagonal() / (0.2 * 704**0.5)
        assert (along > (0.9 if step == 0 else 0.0)).all(), along  # later momentum of others counts
