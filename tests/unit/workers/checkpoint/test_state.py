"""Staging and restoring: any mesh to any mesh, damage found, other models refused."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.layout import DamagedCheckpoint, parse_header
from holdfast.workers.checkpoint.restore import WrongModel, restore
from holdfast.workers.checkpoint.shard_sources import UnreadableCheckpoint
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from holdfast.workers.checkpoint.tensors import box_of
from holdfast.workers.session.shards import local_parameter
from tests.unit.workers.checkpoint.fake_ranks import (
    Memory,
    ShardInBytes,
    as_rank,
    build,
    restored,
    staged,
    step,
)

MESHES = [(1, 1), (1, 2), (2, 2), (1, 3), (1, 8)]
staged_once = cache(staged)


@cache
def expected(replicate: int, shard: int, rank: int) -> dict[str, torch.Tensor]:
    """State of a rank that trained on this mesh from the start."""
    model, optimizer = build(replicate, shard, seed=1)
    for number in range(2):
        step(model, optimizer, seed=100 + number)
    state = TrainingState(model, optimizer, None)
    return {held.name: held.local.clone() for held in state.tensors()}


@pytest.mark.parametrize("old", MESHES, ids=lambda m: f"from-{m[0]}x{m[1]}")
@pytest.mark.parametrize("new", MESHES, ids=lambda m: f"to-{m[0]}x{m[1]}")
def test_any_mesh_restores_what_any_other_staged(
    old: tuple[int, int], new: tuple[int, int]
) -> None:
    files = staged_once(*old)
    for rank in range(new[1]):
        with as_rank(rank, new[0] * new[1]):
            got, _ = restored(files, *new, rank)
            want = expected(*new, rank)
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                assert torch.equal(got[name], tensor), name


def test_with_the_same_shard_count_a_rank_reads_only_its_shard() -> None:
    files = staged(1, 4)
    with as_rank(2, 4):
        _, opened = restored(files, 1, 4, 2)
    assert opened == [2]


def test_on_another_mesh_a_rank_opens_the_shards_that_it_needs() -> None:
    """16 parts of 50 rows are 13 of 4, 12 are 10 of 5: rank 9 needs rows 45 to 49, of 11 and 12."""
    files = staged(1, 16, width=50)
    with as_rank(9, 12):
        _, opened = restored(files, 1, 12, 9, width=50)
    assert opened == [12, 13, 11]


def test_optimizer_state_is_laid_out_like_its_parameter_without_a_step() -> None:
    files = staged(1, 3)
    with as_rank(0, 2):
        model, optimizer = build(1, 2, seed=2)
        state = TrainingState(model, optimizer, None)
        held = state.make_optimizer_tensor("optim.first.weight.exp_avg", (7, 3), "F32")
        assert held is not None
        assert held.box == box_of(model.first.weight)
        assert optimizer.state[model.first.weight]["exp_avg"].placements == (
            model.first.weight.placements
        )
        got, _ = restored(files, 1, 2, 0)
    assert got["optim.first.weight.step"].item() == 2.0


def test_a_flipped_bit_is_named_with_its_file_and_tensor() -> None:
    files = staged(1, 2)
    header = parse_header(files[1], "shard 1")
    entry = header.entries["optim.second.weight.exp_avg"]
    broken = bytearray(files[1])
    broken[header.data_start + entry.begin] ^= 1
    files[1] = bytes(broken)
    with as_rank(1, 2), pytest.raises(DamagedCheckpoint) as error:
        restored(files, 1, 2, 1)
    assert str(error.value).startswith("shard 1: optim.second.weight.exp_avg: damaged checkpoint")
    with as_rank(0, 1), pytest.raises(DamagedCheckpoint):
        restored(files, 1, 1, 0)


def test_a_checkpoint_of_another_model_names_what_differs() -> None:
    files = staged(1, 2)
    with as_rank(0, 2), pytest.raises(WrongModel) as error:
        restored(files, 1, 2, 0, width=9)
    text = str(error.value)
    assert "first.weight: got F32[7, 3]; expected F32[9, 3]" in text
    assert "use the model settings of the run that wrote it" in text
    assert error.value.exit_code == 2


def test_missing_and_unexpected_tensors_are_listed_separately() -> None:
    files = staged(1, 1)
    with as_rank(0, 1):
        model = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 7), "new": torch.nn.Linear(2, 2)})
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(WrongModel) as error:
            restore(
                TrainingState(model, optimizer, None),
                lambda k: ShardInBytes(files[k], f"shard {k}"),
                shard=0, num_shards=1, num_stored=1, step=1,
            )  # fmt: skip
    assert "missing from it (2): new.weight, new.bias" in str(error.value)
    assert "not in the model (4): second.weight, seen, third.bias, third.weight" in str(error.value)


def test_a_shard_that_no_node_has_is_unreadable() -> None:
    files = staged(1, 2)
    del files[1]
    with as_rank(1, 2), pytest.raises(UnreadableCheckpoint, match="shard 1 is in no memory"):
        restored({0: files[0], 2: b""}, 1, 2, 1)


def test_a_file_of_another_step_is_damage() -> None:
    files = staged(1, 2)
    with as_rank(0, 2), pytest.raises(DamagedCheckpoint, match="expected step 5"):
        restored(files, 1, 2, 0, after_step=5)


def test_extra_state_is_restored() -> None:
    files = staged(1, 2, extra={"seen": 17, "name": 'a "quoted" \\ name', "list": [1, 2.5]})
    extra: dict[str, object] = {}
    with as_rank(0, 1):
        restored(files, 1, 1, 0, extra=extra)
    assert extra == {"seen": 17, "name": 'a "quoted" \\ name', "list": [1, 2.5]}


def test_extra_state_that_json_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"extra\['weights'\]: got Tensor; expected numbers"):
        staged(1, 1, extra={"weights": torch.zeros(2)})


def test_buffers_are_requested_once_and_every_step_is_a_whole_file() -> None:
    with as_rank(0, 2):
        model, optimizer = build(1, 2, seed=1)
        extra: dict[str, object] = {"n": 0}
        state = TrainingState(model, optimizer, extra)
        memory = Memory()
        stager = Stager(
            state, memory, generation=4, shard=0, num_shards=2, device=torch.device("cpu")
        )
        lengths = set()
        for number in range(3):
            step(model, optimizer, seed=number)
            extra["n"] = 10**number
            stager.stage(number)
            header = parse_header(memory.file, "file")
            assert (header.step, header.generation, header.extra["user"]["n"]) == (
                number, 4, 10**number,
            )  # fmt: skip
            lengths.add(len(memory.file))
    assert len(lengths) == 1
    assert memory.requested == 1


def test_an_optimizer_of_foreign_parameters_is_refused() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="make the optimizer from its parameters"):
        TrainingState(model, torch.optim.SGD(other.parameters(), lr=0.1), None)


def test_an_optimizer_over_local_parts_reads_what_one_over_whole_parameters_wrote() -> None:
    files = staged(1, 2)
    with as_rank(1, 3):
        model, _ = build(1, 3, seed=2)
        parts = [local_parameter(p) for p in model.parameters()]
        optimizer = torch.optim.AdamW(parts, lr=0.5, fused=True)
        state = TrainingState(model, optimizer, None)
        extra = restore(
            state, lambda k: ShardInBytes(files[k], f"shard {k}"),
            shard=1, num_shards=3, num_stored=2, step=1,
        )  # fmt: skip
        state.import_extra(extra)
        want = expected(1, 3, 1)
        got = {held.name: held.local for held in state.tensors()}
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert optimizer.state[parts[0]]["exp_avg"].shape == parts[0].shape


def test_buffers_have_the_names_under_which_they_are_staged() -> None:
    with as_rank(0, 2):
        model, optimizer = build(1, 2, seed=2)
        step(model, optimizer, seed=100)
        state = TrainingState(model, optimizer, None)
        assert state.buffers() == {"model.seen"}
        assert state.buffers() < {held.name for held in state.tensors()}
