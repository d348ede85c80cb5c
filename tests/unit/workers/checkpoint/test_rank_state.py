"""State of single ranks in shard files: restored to the same rank, refused or dropped by name in
another world size, bounded, and known to verify, export and the sums of coverage."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.checkpoint import rank_state
from holdfast.workers.checkpoint.coverage import coverage_sum
from holdfast.workers.checkpoint.layout import parse_header
from holdfast.workers.checkpoint.rank_state import PerRank, RankState
from holdfast.workers.checkpoint.restore import restore
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from tests.unit.workers.checkpoint.fake_ranks import Memory, ShardInBytes


class Together:
    """Twins in threads of this process."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks, self._given = ranks, {}  # type: ignore[var-annotated]
        self._barrier = threading.Barrier(len(ranks))

    def of(self, rank: int) -> Any:
        owner = self

        class OfRank:
            """One rank's view of them."""

            ranks = owner.ranks

            def largest(self, number: int) -> int:
                return int(max(owner.gather(rank, number)))

            def exchange(self, mine: Tensor, into: Tensor) -> None:
                into.copy_(torch.stack(owner.gather(rank, mine)))

        return OfRank()

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self._barrier.wait(30)
        found = [self._given[one] for one in self.ranks]
        self._barrier.wait(30)
        return found


class Rank:
    """One rank of a mesh, with a model of which it holds everything, and state of its own."""

    def __init__(self, rank: int, mesh: Mesh, given: Any, twins: Any = None) -> None:
        torch.manual_seed(1)
        self.rank, self.mesh = rank, mesh
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.own = RankState(given, rank, mesh)
        self.own.join(twins)
        self.state = TrainingState(self.model, self.optimizer, None, self.own)
        self.memory = Memory()
        self.stager = Stager(
            self.state, self.memory, generation=1, shard=mesh.shard_index(rank),
            num_shards=mesh.num_shards, device=torch.device("cpu"),
        )  # fmt: skip

    def stage(self, step: int) -> bytes:
        self.stager.stage(step)
        return self.memory.file

    def restore(self, files: dict[int, bytes], step: int) -> list[int]:
        """Returns the shards that it opened."""
        opened = []

        def open_shard(index: int) -> ShardInBytes:
            opened.append(index)
            return ShardInBytes(files[index], f"shard {index}")

        extra = restore(
            self.state, open_shard, shard=self.mesh.shard_index(self.rank),
            num_shards=self.mesh.num_shards, num_stored=len(files), step=step,
        )  # fmt: skip
        self.state.import_extra(extra)
        return opened


def ddp(size: int, make: Any) -> list[Rank]:
    mesh, together = Mesh(replicate=size), Together(tuple(range(size)))
    return [Rank(rank, mesh, make(rank), together.of(rank)) for rank in range(size)]


def on_all(ranks: list[Rank], call: Any) -> list[Any]:
    found: dict[int, Any] = {}

    def run(one: Rank) -> None:
        try:
            found[one.rank] = call(one)
        except UserError as error:
            found[one.rank] = error

    threads = [threading.Thread(target=run, args=(one,)) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[one.rank] for one in ranks]


def seen(rank: int) -> dict[str, Any]:
    return {"loader": {"seen": rank * 10}}


def test_each_copy_of_a_shard_has_the_state_of_all_ranks_that_hold_it() -> None:
    ranks = ddp(3, seen)
    files = on_all(ranks, lambda one: one.stage(4))
    assert files[0] == files[1] == files[2]
    again = ddp(3, lambda rank: {"loader": {"seen": -1, "kept": rank}})
    on_all(again, lambda one: one.restore({0: files[2]}, 4))
    for rank, one in enumerate(again):
        (held,) = one.own._objects.values()
        assert held.held == {"seen": rank * 10, "kept": rank}
        assert one.own.has_room, "buffers can be requested before the first step"


def test_only_the_step_that_was_staged_counts() -> None:
    (one,) = ddp(1, seen)
    held = one.own._objects["loader"].held
    one.stage(0)
    held["seen"] = 7
    file = one.stage(1)
    held["seen"] = 8
    (again,) = ddp(1, seen)
    again.restore({0: file}, 1)
    assert again.own._objects["loader"].held == {"seen": 7}


def shards(size: int, make: Any = seen) -> dict[int, bytes]:
    """Files of ranks that hold a shard each. They hold the whole model, so that any can be read."""
    mesh = Mesh(shard=size)
    return {rank: Rank(rank, mesh, make(rank)).stage(0) for rank in range(size)}


def resized(on_resize: Any, rank: int, size: int, before: int) -> tuple[dict[str, Any], list[int]]:
    held = {"seen": -1}
    one = Rank(rank, Mesh(shard=size), {"loader": PerRank(held, on_resize)})
    return held, one.restore(shards(before), 0)


def test_another_world_size_is_refused_by_name_unless_something_else_is_declared() -> None:
    with pytest.raises(UserError) as error:
        resized("refuse", 0, 2, 3)
    assert "per_rank['loader']: got state of 3 ranks for 2" in str(error.value)
    assert "elasticity: fixed" in str(error.value) and "on_resize='restart'" in str(error.value)


def test_what_restarts_stays_as_it_was_made_and_that_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held, opened = resized("restart", 0, 2, 3)
    assert held == {"seen": -1} and 2 not in opened
    assert (
        "3 ranks wrote the state of 'loader', and 2 run now: it begins as the script made it"
        in (capsys.readouterr().err)
    )
    resized("restart", 1, 2, 3)
    assert capsys.readouterr().err == "", "rank 0 says it"


@pytest.mark.parametrize(
    ("rank", "size", "before", "expected", "said"),
    [
        (0, 2, 3, 0, "the state of ranks 2 to 2 is dropped"),
        (1, 2, 3, 10, ""),
        (2, 4, 3, 20, ""),
        (3, 4, 3, -1, ""),
        (0, 4, 3, 0, "on ranks 3 to 3 it begins as the script made it"),
    ],
)
def test_the_rank_with_the_same_number_takes_the_state_where_that_is_declared(
    rank: int, size: int, before: int, expected: int, said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    held, _ = resized("same-rank", rank, size, before)
    assert held == {"seen": expected}
    assert said in capsys.readouterr().err


def test_objects_without_a_counterpart_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    files = shards(1)
    Rank(0, Mesh(), {"rng": torch.Generator()}).restore(files, 0)
    text = capsys.readouterr().err
    assert "the checkpoint has no state of 'rng'; it begins as the script made it" in text
    assert "has state of 'loader', which the script does not give" in text


def test_a_checkpoint_from_before_there_was_such_state_is_restored(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (one,) = ddp(1, seen)
    old = TrainingState(one.model, one.optimizer, None)
    memory = Memory()
    place = {"generation": 1, "shard": 0, "num_shards": 1, "device": torch.device("cpu")}
    Stager(old, memory, **place).stage(0)  # type: ignore[arg-type]
    one.restore({0: memory.file}, 0)
    assert "the checkpoint has no state of 'loader'" in capsys.readouterr().err
    one.stage(1)


def test_state_that_outgrows_its_room_is_refused_on_all_twins_and_a_larger_room_is_possible() -> (
    None
):
    ranks = ddp(2, lambda rank: {"loader": {"buffer": "x"}})
    on_all(ranks, lambda one: one.stage(0))
    ranks[1].own._objects["loader"].held["buffer"] = "x" * 5000
    for error in on_all(ranks, lambda one: one.stage(1)):
        assert isinstance(error, UserError)
        assert "the state of rank 1 grew to 50" in str(error) and "room_bytes=50" in str(error)
    ranks = ddp(2, lambda rank: {"loader": PerRank({"buffer": "x"}, room_bytes=6000)})
    on_all(ranks, lambda one: one.stage(0))
    ranks[1].own._objects["loader"].held["buffer"] = "x" * 5000
    files = on_all(ranks, lambda one: one.stage(1))
    assert files[0] == files[1]


def test_more_state_than_twins_can_exchange_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_state, "MAX_FILE_BYTES", 9 * 1024)
    ranks = ddp(3, lambda rank: {"loader": {"buffer": "x" * 2000}})
    for error in on_all(ranks, lambda one: one.stage(0)):
        assert "got 15360 bytes of loader for the 3 ranks that hold one shard" in str(error)
        assert "raise spec.parallelism.shard" in str(error)


def test_a_wrong_setting_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"per_rank\['a'\].on_resize: got 'keep'; expected refuse"):
        RankState({"a": PerRank({}, "keep")}, 0, Mesh())  # type: ignore[arg-type]


def test_damage_in_the_state_of_a_rank_is_found(tmp_path: Path) -> None:
    file = bytearray(shards(1)[0])
    header = parse_header(bytes(file), "file")
    entry = header.entries["rank.0"]
    file[header.data_start + entry.begin + 20] ^= 1
    with pytest.raises(Exception, match=r"shard 0: rank.0: damaged checkpoint"):
        Rank(0, Mesh(), seen(0)).restore({0: bytes(file)}, 0)


def test_the_sums_that_prove_coverage_are_those_of_the_tensors() -> None:
    own = coverage_sum(parse_header(shards(1)[0], "file"))
    without = Rank(0, Mesh(), {})
    without.state.rank_state = None
    assert own == coverage_sum(parse_header(without.stage(0), "file"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torchdata_continues_after_the_batch_of_the_step(workers: int) -> None:
    why = "torchdata is not installed"
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason=why)

    def loader() -> Any:
        shuffled = torch.Generator().manual_seed(5)
        return loaders.StatefulDataLoader(
            range(40), batch_size=2, shuffle=True, generator=shuffled, num_workers=workers
        )

    (one,) = ddp(1, lambda rank: {"loader": loader()})
    first = one.own._objects["loader"].held
    batches = iter(first)
    for step in range(3):
        next(batches)
        file = one.stage(step)
    rest = [batch.tolist() for batch in batches]
    assert len(rest) == 17
    (again,) = ddp(1, lambda rank: {"loader": loader()})
    again.restore({0: file}, 2)
    assert [batch.tolist() for batch in again.own._objects["loader"].held] == rest
