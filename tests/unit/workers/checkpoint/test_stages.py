"""Checkpoints of a pipeline: each rank has the tensors of its stage only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.optimizer_state import WrongOptimizer
from holdfast.workers.checkpoint.restore import WrongModel, restore
from holdfast.workers.checkpoint.shard_order import ShardOrder
from holdfast.workers.checkpoint.shard_sources import UnreadableCheckpoint
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState

from .fake_ranks import Memory, ShardInBytes

ALL = ("first", "second", "third", "last")
HALVES = (ALL[:2], ALL[2:])
THIRDS = (ALL[:1], ALL[1:3], ALL[3:])


class Rank:
    """A stage, its optimizer with and without decay, and what it knows of the other stages."""

    def __init__(self, names: tuple[str, ...], seed: int) -> None:
        torch.manual_seed(seed)
        every = {name: nn.Linear(3, 3) for name in ALL}
        self.model = nn.ModuleDict({name: every[name] for name in names})
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.state = TrainingState(self.model, self.optimizer, None)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def staged(self, shard: int, num_shards: int) -> bytes:
        memory = Memory()
        Stager(
            self.state, memory,
            generation=1, shard=shard, num_shards=num_shards, device=torch.device("cpu"),
        ).stage(0)  # fmt: skip
        return memory.file


def ranks(stages: tuple[tuple[str, ...], ...], seed: int) -> list[Rank]:
    """One for each stage, joined as in Session.restore."""
    found = [Rank(names, seed) for names in stages]
    if len(found) > 1:
        for rank in found:
            rank.state.join_stages([other.state.stage_part() for other in found])
    return found


def written(stages: tuple[tuple[str, ...], ...]) -> dict[int, bytes]:
    files = {}
    for number, rank in enumerate(ranks(stages, seed=1)):
        rank.step()
        files[number] = rank.staged(number, len(stages))
    return files


def fill(rank: Rank, at: int, num: int, files: dict[int, bytes], num_stored: int) -> list[int]:
    """Restores; returns the shards that were opened."""
    opened = []

    def open_shard(index: int) -> ShardInBytes:
        opened.append(index)
        if index not in files:
            raise UnreadableCheckpoint(f"shard {index} is lost")
        return ShardInBytes(files[index], f"shard {index}")

    extra = restore(
        rank.state, open_shard, shard=at, num_shards=num, num_stored=num_stored, step=0,
        stages=num, stored_stages=num_stored,
    )  # fmt: skip
    rank.state.import_extra(extra)
    return opened


@pytest.mark.parametrize("new", [(ALL,), HALVES, THIRDS], ids=["one", "halves", "thirds"])
@pytest.mark.parametrize("old", [(ALL,), HALVES, THIRDS], ids=["one", "halves", "thirds"])
def test_a_checkpoint_of_some_stages_is_restored_to_others(
    old: tuple[tuple[str, ...], ...], new: tuple[tuple[str, ...], ...]
) -> None:
    (whole,) = ranks((ALL,), seed=1)
    whole.step()
    expected = {held.name: held.local for held in whole.state.tensors()}
    seen: set[str] = set()
    for number, rank in enumerate(ranks(new, seed=2)):
        opened = fill(rank, number, len(new), written(old), len(old))
        got = {held.name: held.local for held in rank.state.tensors()}
        assert len(got) == 4 * len(list(rank.model.parameters()))  # itself, moments, step
        for name, tensor in got.items():
            assert torch.equal(tensor, expected[name]), name
        if old == new:
            assert opened == [number]
        seen |= got.keys()
    assert seen == expected.keys()


def test_a_tensor_that_no_stage_has_is_refused_by_name() -> None:
    files = written((ALL,))
    first, _ = ranks((ALL[:2], ALL[2:3]), seed=2)
    with pytest.raises(WrongModel, match=r"not in the model \(2\): last.bias, last.weight"):
        fill(first, 0, 2, files, 1)


def test_a_lost_shard_of_another_stage_is_not_taken_for_another_model() -> None:
    files = written(HALVES)
    (whole,) = ranks((ALL,), seed=2)
    with pytest.raises(UnreadableCheckpoint, match="shard 1 is lost"):
        fill(whole, 0, 1, {0: files[0]}, 2)


def test_groups_are_compared_over_all_stages() -> None:
    files = written((ALL,))
    moved = ranks(HALVES, seed=2)
    for rank in moved:
        parameters = list(rank.model.parameters())
        rank.optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])
        rank.state = TrainingState(rank.model, rank.optimizer, None)
    parts = [rank.state.stage_part() for rank in moved]
    moved[0].state.join_stages(parts)
    with pytest.raises(WrongOptimizer, match=r"groups of \[4, 4\] parameters; got \[2, 6\]"):
        fill(moved[0], 0, 2, files, 1)


def test_stages_with_different_numbers_of_groups_are_refused() -> None:
    first, second = (Rank(names, seed=1) for names in HALVES)
    second.optimizer = torch.optim.AdamW(second.model.parameters())
    second.state = TrainingState(second.model, second.optimizer, None)
    with pytest.raises(UserError, match="expected the same number of groups on each"):
        first.state.join_stages([first.state.stage_part(), second.state.stage_part()])


def test_the_shards_of_the_own_stage_are_opened_first() -> None:
    def first(*args: int) -> list[int]:
        order = iter(ShardOrder(*args))
        return [next(order) for _ in range(2)]

    assert first(5, 8, 8, 2, 2) == [5, 4]  # the own one, then a neighbour
    assert first(3, 4, 8, 2, 2) == [6, 7]  # the second half of the second stage
    assert first(3, 4, 8, 2, 1) == [4, 5]  # no stages before: the second half
    assert first(0, 4, 8, 1, 2) == [0, 4]  # the first quarter of both stages
    order = ShardOrder(0, 1, 4, 1, 2)
    opened = []
    for index in order:
        opened.append(index)
        if index < 2:
            order.missing(index, [])  # the first stage is complete
    assert opened == [0, 2, 3, 1] or opened == [0, 3, 2, 1]
