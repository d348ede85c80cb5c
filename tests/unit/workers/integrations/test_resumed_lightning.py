"""Skipping of trained batches by a training that resumes in the middle of an epoch. The fetcher has
the methods of Lightning's; tests/frameworks runs that one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from holdfast.workers.integrations import resumed_lightning


class Numbers(Dataset[int]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


class Fetcher:
    def __init__(self, loader: DataLoader[int]) -> None:
        self.combined_loader = SimpleNamespace(flattened=[loader], reset=lambda: None)
        self.length, self.fetched, self.done = 6, 0, False

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.combined_loader.flattened[0])
        self.fetched = 0
        return self

    def __next__(self) -> list[int]:
        batch = next(self.iterator).tolist()
        self.fetched += 1
        return list(batch)


@pytest.fixture(autouse=True)
def orders_are_noted() -> None:
    resumed_lightning._note_orders()


class OwnBatches(Sampler[list[int]]):
    """A user's batch sampler, which draws from torch's generator or from another one."""

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = self.draw()
        for at in range(0, 24, 4):
            yield order[at : at + 4]


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator()},
    "subset": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler(range(24))},
    "subset-generator": lambda: {
        "batch_size": 4,
        "sampler": SubsetRandomSampler(range(24), torch.Generator()),
    },
    "weighted": lambda: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler([1.0] * 24, 24, replacement=False),
    },
    "own": lambda: {"batch_sampler": OwnBatches(lambda: torch.randperm(24).tolist())},
}


def order_of(loader: DataLoader[int], num: int) -> dict[str, Any]:
    return resumed_lightning._notes(loader).kept(num, states=True)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("processes", [0, 1])
def test_the_rest_of_an_epoch_has_its_order_and_the_next_epoch_is_whole(
    sampler: str, processes: int
) -> None:
    loader = DataLoader(Numbers(), **SAMPLERS[sampler]())
    list(loader)
    whole = [batch.tolist() for batch in loader]
    order = order_of(loader, 4)
    following = [batch.tolist() for batch in loader]
    torch.manual_seed(5)  # of a new process
    data = Numbers()
    again = DataLoader(
        data, num_workers=processes, persistent_workers=processes > 0, **SAMPLERS[sampler]()
    )
    fetcher = Fetcher(again)
    assert resumed_lightning.skip(fetcher, 4, orders=[order])
    rest = [next(fetcher), next(fetcher)]
    assert rest == whole[4:] and fetcher.fetched == 2
    with pytest.raises(StopIteration):
        next(fetcher)
    assert processes or data.read == [*chain(*whole[4:])], "what was trained is not read"
    batches = list(fetcher)
    assert sorted(chain(*batches)) == [*range(24)]
    assert processes or batches == following, "the order of a training without a restart"


def test_an_order_that_cannot_be_repeated_is_known_as_such() -> None:
    def drawn() -> dict[str, Any]:
        return {"batch_sampler": OwnBatches(lambda: random.sample(range(24), 24))}

    loader = DataLoader(Numbers(), **drawn())
    list(loader)
    fetcher = Fetcher(DataLoader(Numbers(), **drawn()))
    assert not resumed_lightning.skip(fetcher, 4, orders=[order_of(loader, 4)])
    stream = DataLoader(Stream(), 4)
    list(stream)
    assert not resumed_lightning.skip(Fetcher(stream), 4, orders=[order_of(stream, 4)])


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: torch.randperm(24).tolist(), "skips the 4 batches of epoch 1 that were trained"),
        (lambda: random.sample(range(24), 24), "samples of this epoch may repeat or be left out"),
    ],
)
def test_the_line_says_whether_trained_batches_are_skipped(
    draw: Callable[[], list[int]], said: str
) -> None:
    loader = DataLoader(Numbers(), batch_sampler=OwnBatches(draw))
    list(loader)
    progress = SimpleNamespace(current=SimpleNamespace(ready=4))
    loop = type(
        "Loop", (), {"on_run_start": lambda _self, _fetcher: None, "batch_progress": progress}
    )()
    epoch = SimpleNamespace(current=SimpleNamespace(processed=1))
    fit, texts = SimpleNamespace(epoch_loop=loop, epoch_progress=epoch), list[str]()
    trainer = SimpleNamespace(world_size=1, fit_loop=fit)
    place = {"world": 1, "orders": [order_of(loader, 4)]}
    resumed_lightning.go_on_behind(trainer, place, texts.append)
    loop.on_run_start(Fetcher(DataLoader(Numbers(), batch_sampler=OwnBatches(draw))))
    assert said in texts[0]


def test_noting_an_order_changes_none() -> None:
    orders = []
    noted = DataLoader._index_sampler
    for place in (noted, property(lambda self: self.batch_sampler)):
        DataLoader._index_sampler = place  # type: ignore[assignment]
        loader = DataLoader(Numbers(), 4, shuffle=True)
        torch.manual_seed(3)
        orders.append([batch.tolist() for _ in range(2) for batch in loader])
    DataLoader._index_sampler = noted  # type: ignore[method-assign]
    assert orders[0] == orders[1]


def test_a_stream_is_read_up_to_its_place() -> None:
    fetcher = Fetcher(DataLoader(Stream(), 4))
    resumed_lightning.skip(fetcher, 4)
    assert (next(fetcher), fetcher.fetched) == ([16, 17, 18, 19], 1)


def test_the_place_is_one_in_the_samples_at_another_number_of_ranks() -> None:
    current = SimpleNamespace(ready=0, started=0, processed=0, completed=9)
    progress = SimpleNamespace(batch_progress=SimpleNamespace(current=current))
    trainer = SimpleNamespace(
        world_size=4, accumulate_grad_batches=2, fit_loop=SimpleNamespace(epoch_loop=progress)
    )
    resumed_lightning.same_samples(trainer, 2)
    assert current.ready == current.completed == 4
