"""How a training that goes on in the middle of an epoch skips what was trained. The fetcher has the
methods of Lightning's; tests/frameworks runs that one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.workers.integrations import lightning_data


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
    lightning_data._note_orders()


@pytest.mark.parametrize("generator", [None, torch.Generator()], ids=["global", "own"])
@pytest.mark.parametrize("processes", [0, 1])
def test_the_rest_of_an_epoch_has_its_order_and_the_next_epoch_is_whole(
    generator: Any, processes: int
) -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True, generator=generator)
    whole = [batch.tolist() for batch in loader]
    order = loader.sampler.order  # type: ignore[attr-defined]
    list(loader)
    data = Numbers()
    again = DataLoader(
        data, 4, shuffle=True, num_workers=processes, persistent_workers=processes > 0
    )
    fetcher = Fetcher(again)
    again.sampler.next_order = order  # type: ignore[attr-defined]
    lightning_data.skip(fetcher, 4)
    rest = [next(fetcher), next(fetcher)]
    assert rest == whole[4:] and fetcher.fetched == 2
    assert processes or data.read == [*chain(*whole[4:])], "what was trained is not read"
    assert sorted(chain(*fetcher)) == [*range(24)]


def test_torch_draws_the_same_orders() -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True)
    noted = lightning_data.RandomSampler.__iter__
    orders = []
    for iterate in (noted, noted.__wrapped__):  # type: ignore[attr-defined]
        lightning_data.RandomSampler.__iter__ = iterate  # type: ignore[method-assign]
        torch.manual_seed(3)
        orders.append([batch.tolist() for _ in range(2) for batch in loader])
    lightning_data.RandomSampler.__iter__ = noted  # type: ignore[method-assign]
    assert orders[0] == orders[1]


def test_a_stream_is_read_up_to_its_place() -> None:
    fetcher = Fetcher(DataLoader(Stream(), 4))
    lightning_data.skip(fetcher, 4)
    assert (next(fetcher), fetcher.fetched) == ([16, 17, 18, 19], 1)


def test_the_place_is_one_in_the_samples_at_another_number_of_ranks() -> None:
    current = SimpleNamespace(ready=0, started=0, processed=0, completed=9)
    progress = SimpleNamespace(batch_progress=SimpleNamespace(current=current))
    trainer = SimpleNamespace(
        world_size=4, accumulate_grad_batches=2, fit_loop=SimpleNamespace(epoch_loop=progress)
    )
    lightning_data.same_samples(trainer, 2)
    assert current.ready == current.completed == 4
