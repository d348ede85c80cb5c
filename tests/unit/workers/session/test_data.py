"""Each sample once an epoch: a ledger of ids over random kills and resizes, for each kind of loader
that a script may have, and with loaders that fetch ahead."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, IterableDataset

from holdfast.orchestrator.errors import UserError
from holdfast.workers.session.data import ElasticLoader


@dataclass
class At:
    """A rank, and how many there are."""

    rank: int = 0
    size: int = 1
    read: set[str] = field(default_factory=set)

    @property
    def _seat(self) -> tuple[int, int]:
        return self.rank, self.size

    def _reads(self, what: str) -> None:
        self.read.add(what)

    def _taking(self) -> AbstractContextManager[None]:
        return nullcontext()


class Stream(IterableDataset[int]):
    """Samples of the epoch that was set, which reader opened it, and where."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.opened = size, 0, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.opened.append(self.epoch)
        process = torch_data.get_worker_info()
        step = process.num_workers if process else 1  # as most data sets divide themselves
        return iter(range(self.epoch * 1000, self.epoch * 1000 + self.size, step))


class Backwards(torch_data.Sampler[int]):
    """A sampler of the script."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(self.size)))


class Buckets(torch_data.Sampler[list[int]]):
    """A batch sampler of the script, whose batches differ, and their number too."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order, at = torch.randperm(self.size).tolist(), 0
        while at < self.size:
            width = int(torch.randint(1, 4, ()))
            yield order[at : at + width]
            at += width


def make(kind: str, size: int, batch: int, drop_last: bool = False, **more: Any) -> Any:
    samples: Any = range(size)
    how: dict[str, Any] = {"batch_size": batch, "drop_last": drop_last, **more}
    if kind == "stream":
        return DataLoader(Stream(size), **how)
    if kind == "buckets":
        return DataLoader(samples, batch_sampler=Buckets(size), **more)
    if kind == "single":
        return DataLoader(samples, batch_size=None, shuffle=True, **more)
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(samples, shuffle=True, **how)
    sampler: Any = {
        "sequential": lambda: torch_data.SequentialSampler(samples),
        "shuffled": lambda: torch_data.RandomSampler(samples),
        "subset": lambda: torch_data.SubsetRandomSampler(list(samples)),
        "distributed": lambda: torch_data.DistributedSampler(samples, 2, 1, seed=3),
        "own": lambda: Backwards(size),
    }[kind]()
    return DataLoader(samples, sampler=sampler, **how)


KINDS = (
    "sequential", "shuffled", "subset", "distributed", "own", "stream", "buckets", "single",
    "stateful",
)  # fmt: skip


@dataclass
class Life:
    """A job that trains on samples, is killed, and continues with another number of ranks."""

    make: Callable[[], Any]
    settings: dict[str, Any]
    committed: dict[str, Any] | None = None
    ledger: list[tuple[dict[str, Any], int, int, float]] = field(default_factory=list)
    """(state after the step, epoch, id, weight)."""

    def run(self, ranks: int, steps: int, *, kept: int) -> None:
        """Trains `steps` steps on `ranks` ranks, of which the first `kept` are committed."""
        loaders = [
            ElasticLoader(self.make(), At(rank, ranks), **self.settings) for rank in range(ranks)
        ]
        for one in loaders:
            if self.committed is not None:
                one.load_state_dict(self.committed)
        for number, batches in enumerate(itertools.islice(self._batches(loaders), steps)):
            if number < kept:
                states = [one.state_dict() for one in loaders]
                assert states.count(states[0]) == ranks, "the state is the same on all ranks"
                self.committed = states[0]
                self.ledger += batches

    def _batches(self, loaders: list[ElasticLoader]) -> Iterator[list[Any]]:
        epochs = self.settings["epochs"]
        while loaders[0].epoch < epochs:
            epoch = loaders[0].epoch
            parts = zip(*(iter(one) for one in loaders), strict=True)  # all have as many batches
            for batches in parts:
                rows = [
                    (epoch, int(sample) % 1000, weight)
                    for batch, one in zip(batches, loaders, strict=True)
                    for sample, weight in zip(
                        torch.as_tensor(batch).flatten(), one.weights * 3, strict=False
                    )
                ]
                yield rows
        assert all(list(one) == [] for one in loaders), "nothing is left"


RUNS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(0, 9)), max_size=5)


@settings(max_examples=60, deadline=None)
@example(kind="stream", size=7, batch=2, runs=[(3, 1, 1)], by_all=False, last=2)
@given(
    kind=st.sampled_from(KINDS), size=st.integers(1, 40), batch=st.integers(1, 5), runs=RUNS,
    by_all=st.booleans(), last=st.integers(1, 5),
)  # fmt: skip
def test_each_sample_is_trained_once_an_epoch_through_kills_and_resizes(
    kind: str, size: int, batch: int, runs: Any, by_all: bool, last: int
) -> None:
    how = {"global_batch": batch + 4} if by_all and kind not in ("buckets", "single") else {}
    life = Life(lambda: make(kind, size, batch), {"epochs": 2, "seed": 1, **how})
    for ranks, steps, kept in runs:
        life.run(ranks, steps, kept=kept)
    life.run(last, 10_000, kept=10_000)
    counts = Counter((epoch, sample) for epoch, sample, weight in life.ledger if weight)
    assert counts == {(epoch, sample): 1 for epoch in range(2) for sample in range(size)}
    if kind not in ("buckets", "single"):
        repeated = [row for row in life.ledger if not row[-1]]
        assert len(repeated) <= 4 * 2, "of the last batch of an epoch only"


@pytest.mark.parametrize("kind", ["sequential", "stream"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_drop_last_drops_what_is_less_than_a_global_batch(kind: str, ranks: int) -> None:
    life = Life(lambda: make(kind, 20, 3, drop_last=True), {"epochs": 2})
    life.run(ranks, 100, kept=100)
    whole = 20 // (3 * ranks) * 3 * ranks
    assert sorted(row[:2] for row in life.ledger) == [
        (e, i) for e in range(2) for i in range(whole)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_is_that_of_an_epoch_wherever_it_is(kind: str) -> None:
    for size, ranks in itertools.product((1, 2, 5, 6, 12, 13), (1, 2, 3)):
        one = ElasticLoader(make(kind, size, 2), At(ranks - 1, ranks))
        if kind == "stream":
            with pytest.raises(TypeError, match="length of a stream"):
                len(one)
        elif kind != "buckets":  # each epoch has another number
            assert len(one) == len(list(one)) == len(one)


def order(loader: Any, epochs: int = 1, **more: Any) -> list[list[int]]:
    one = ElasticLoader(loader, At(), epochs=epochs, **more)
    return [[i for batch in one for i in batch.tolist()] for _ in range(epochs)]


def test_epochs_have_orders_of_their_own_which_the_seed_decides() -> None:
    first, second = order(make("shuffled", 20, 4), 2)
    assert first != second and sorted(first) == sorted(second) == list(range(20))
    again = ElasticLoader(make("shuffled", 20, 4), At())
    again.load_state_dict({"epoch": 1, "offset": 8, "size": 20, "seed": 0, "order": "shuffled"})
    assert [i for batch in again for i in batch.tolist()] == second[8:]
    assert order(make("shuffled", 20, 4), seed=1) != order(make("shuffled", 20, 4), seed=2)
    assert order(make("distributed", 20, 4)) == order(make("shuffled", 20, 4), seed=3)
    drawn = order(make("subset", 20, 4), 2)
    torch.manual_seed(9)
    assert order(make("subset", 20, 4), 2) == drawn and drawn[0] != drawn[1]
    states = []
    for loader in (make("subset", 20, 4), make("sequential", 20, 4)):
        torch.manual_seed(9)
        order(loader)
        states.append(torch.get_rng_state())
    assert torch.equal(*states), "the order takes no random numbers of the script"


@pytest.mark.parametrize("kind", ["shuffled", "stream", "stateful"])
def test_persistent_processes_that_fetch_ahead_follow_the_position(kind: str) -> None:
    how = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}
    loader = ElasticLoader(make(kind, 24, 4, **how), At())
    seen = [next(iter(loader)).tolist() for _ in range(3)]
    seen += [batch.tolist() for batch in loader]
    assert sorted(itertools.chain(*seen)) == list(range(24)), "the rest of the epoch"
    second = [i % 1000 for batch in loader for i in batch.tolist()]
    assert sorted(second) == list(range(24)) and loader.epoch == 2


def test_a_stream_is_read_on_and_opened_again_after_an_error_only() -> None:
    data = Stream(10)
    loader = ElasticLoader(DataLoader(data, batch_size=2), At(1, 2))
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7], [9]]
    assert data.opened == [0]

    class Skipping(Stream):
        def skip(self, num: int) -> Any:
            self.opened.append(num)
            return range(num, self.size)

    skipped = Skipping(10)
    loader = ElasticLoader(DataLoader(skipped, batch_size=2), At())
    loader.load_state_dict({**loader.state_dict(), "offset": 6})
    assert [batch.tolist() for batch in loader] == [[6, 7], [8, 9]] and skipped.opened == [6]


class Own(DataLoader[Any]):
    """A loader of the script."""

    def __iter__(self) -> Any:
        return super().__iter__()


class Divided(Backwards):
    """A sampler for one of several ranks."""

    num_replicas = 2


@pytest.mark.parametrize(
    ("loader", "more", "what"),
    [
        ([1, 2], {}, "a list with an iteration of its own; expected a DataLoader"),
        (Own(range(4)), {}, "a Own with an iteration of its own"),  # type: ignore[arg-type]
        (
            DataLoader(range(4), sampler=Divided(4)),  # type: ignore[arg-type]
            {},
            "a Divided, which divides samples among ranks; expected a sampler of the whole",
        ),
        (make("sequential", 4, 1), {"global_batch": 2}, "global_batch=2; expected at least 3"),
        (make("buckets", 4, 1), {"global_batch": 4}, "global_batch=4; expected none"),
    ],
)
def test_a_loader_that_cannot_be_divided_is_rejected(
    loader: Any, more: dict[str, Any], what: str
) -> None:
    with pytest.raises(UserError, match=f"session.data: got {what}"):
        ElasticLoader(loader, At(0, 3), **more)


@pytest.mark.parametrize(
    ("other", "more", "what"),
    [
        (make("shuffled", 9, 2), {}, "size 9; expected 8, as in the checkpoint"),
        (make("shuffled", 8, 2), {"seed": 4}, "seed 4; expected 0, as in the checkpoint"),
        (make("sequential", 8, 2), {}, "order sequential; expected shuffled"),
    ],
)
def test_the_position_in_another_order_is_rejected(
    other: Any, more: dict[str, Any], what: str
) -> None:
    state = ElasticLoader(make("shuffled", 8, 2), At()).state_dict()
    with pytest.raises(UserError, match=f"session.data: got {what}"):
        ElasticLoader(other, At(), **more).load_state_dict(state)


@pytest.mark.parametrize("kind", ["shuffled", "stream", "stateful"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_loader_that_accelerate_prepared_keeps_the_end_of_its_epoch(
    kind: str, split: bool, dispatch: bool
) -> None:
    accelerate = pytest.importorskip("accelerate")
    gradients = accelerate.state.GradientState()
    counts, offsets = Counter[int](), []
    for rank in range(2):
        prepared = accelerate.data_loader.prepare_data_loader(
            make(kind, 10, 4 if split else 2), torch.device("cpu"), 2, rank, split_batches=split,
            dispatch_batches=dispatch, put_on_device=True,
            use_stateful_dataloader=kind == "stateful",
        )  # fmt: skip
        loader, ends = ElasticLoader(prepared, At(rank, 2)), []
        for batch in loader:
            counts.update(batch.tolist())
            ends.append(gradients.end_of_dataloader)
            offsets.append(loader.offset)
        assert ends == [False, False, True] and loader.epoch == 1
        if kind == "shuffled":
            with pytest.raises(UserError, match="got a loader that skips batches; expected the"):
                ElasticLoader(accelerate.skip_first_batches(prepared, 1), At(rank, 2))
    assert counts == dict.fromkeys(range(10), 1)
    assert offsets == [4, 8, 0] * 2, "the batch that accelerate fetches ahead does not count"
