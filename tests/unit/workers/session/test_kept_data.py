"""Loaders of processes that are kept: each attempt takes batches, may be halted, and is made again
from the position of the last step, also at another rank of another number of ranks."""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data as torch_data
from torch.utils.data import DataLoader

from holdfast import session
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.facts import Restore
from holdfast.workers.session.attempts import AttemptHalted, Attempts
from holdfast.workers.session.core import Session
from holdfast.workers.session.data import ElasticLoader
from holdfast.workers.session.groups import NotKept

from .test_attempts import halt_soon, kept, restored
from .test_data import KINDS, At, Buckets, make

__all__ = ["kept"]

EPOCHS = 2


class Ranks:
    """Ranks whose processes are kept, or new: they train on samples, and some are halted."""

    def __init__(self, kind: str, size: int, batch: int, **how: Any) -> None:
        self.make = lambda at: ElasticLoader(make(kind, size, batch), at, epochs=EPOCHS, **how)
        self.seats: list[At] = []
        self.loaders: list[ElasticLoader] = []
        self.state = self.make(At()).state_dict()
        self.ledger: list[tuple[int, int, float]] = []

    def start(self, ranks: int, keep: int) -> None:
        """A generation on so many ranks: `keep` processes go on, and all load the last state."""
        del self.loaders[keep:], self.seats[keep:]
        for rank in range(ranks):
            if rank == len(self.seats):
                self.seats.append(At())
                self.loaders.append(self.make(self.seats[rank]))
            self.seats[rank].rank, self.seats[rank].size = (rank + 1) % ranks, ranks
            self.loaders[rank].load_state_dict(self.state)
        del self.loaders[ranks:], self.seats[ranks:]

    def attempt(self, micro: int, rest: bool) -> list[tuple[int, int, float]]:
        """The samples of one step; `rest`: its micro-batches end with the epoch."""
        rows, nums = [], set()
        for loader in self.loaders:
            taken, epochs = iter(loader) if rest else _Endless(loader), [loader.epoch]
            for batch in itertools.islice(taken, micro):
                ids = torch.as_tensor(batch).flatten().tolist()
                weights = (loader.weights * len(ids))[: len(ids)]
                rows += [(epochs[-1], i % 1000, w) for i, w in zip(ids, weights, strict=True)]
                epochs.append(loader.epoch)
            nums.add(len(epochs))
        assert len(nums) == 1, "all ranks have as many micro-batches"
        return rows

    def step(self, micro: int, rest: bool) -> None:
        self.ledger += self.attempt(micro, rest)
        states = [loader.state_dict() for loader in self.loaders]
        assert states.count(states[0]) == len(states), "the state is the same on all ranks"
        self.state = states[0]


class _Endless:
    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._loader)


ROUND = st.tuples(
    st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.integers(0, 4), st.integers(0, 3)
)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS), size=st.integers(1, 40), batch=st.integers(1, 5),
    rounds=st.lists(ROUND, min_size=1, max_size=6), by_all=st.booleans(), rest=st.booleans(),
)  # fmt: skip
def test_each_sample_is_trained_once_an_epoch_by_processes_that_are_kept(
    kind: str, size: int, batch: int, rounds: Any, by_all: bool, rest: bool
) -> None:
    how = {"global_batch": batch + 4} if by_all and kind not in ("buckets", "single") else {}
    job = Ranks(kind, size, batch, **how)
    for ranks, keep, micro, steps, halted in rounds:
        job.start(ranks, keep)
        for _ in range(steps):
            job.step(micro, rest)
        if halted:
            job.attempt(halted, rest)
        if keep % 2 and job.loaders:  # some ranks are halted in the middle of an attempt
            next(job.loaders[0], None)
    job.start(3, 2)
    while not job.loaders[0].is_over:
        job.step(2, rest)
    counts = Counter((epoch, sample) for epoch, sample, weight in job.ledger if weight)
    assert counts == {(epoch, sample): 1 for epoch in range(EPOCHS) for sample in range(size)}
    assert all(list(loader) == [] for loader in job.loaders), "nothing is left"
    with pytest.raises(StopIteration, match=r"epochs are over; expected itertools.islice"):
        next(job.loaders[0])


def halt_often(kind: str, persistent: bool, times: int) -> None:
    how = {"num_workers": 2, "persistent_workers": persistent, "prefetch_factor": 3}
    seat, me, used = At(0, 2), psutil.Process(), []
    loader = ElasticLoader(make(kind, 24, 2, **how), seat)
    want = [next(loader).tolist() for _ in range(5)]
    other = ElasticLoader(make(kind, 24, 2), At(0, 3))
    others = [next(other).tolist() for _ in range(3)]
    start = {**other.state_dict(), "epoch": 0, "offset": 0}
    for number in range(times):
        seat.size = 3 if number % 4 == 3 else 2
        loader.load_state_dict(start)
        expected = others if seat.size == 3 else want[: 1 + number % 4]
        assert [next(loader).tolist() for _ in expected] == expected
        used.append((len(me.children()), me.num_fds()))
    assert {children for children, _ in used} == {2}
    # A queue's descriptors are closed by its thread, a little later.
    assert min(fds for _, fds in used[-6:]) <= max(fds for _, fds in used[:6])
    del loader
    gc.collect()
    assert not me.children()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["shuffled", "stream", "stateful"])
def test_processes_of_a_loader_are_not_left_over_after_many_halted_attempts(
    kind: str, persistent: bool
) -> None:
    """A process of its own has no other children, and no threads when it forks."""
    call = f"t.halt_often({kind!r}, {persistent}, {20 if kind == 'shuffled' else 12})"
    command = [sys.executable, "-c", f"import {__name__} as t; {call}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_loop_over_the_rest_of_an_epoch_goes_on_behind_a_restore() -> None:
    loader = ElasticLoader(make("shuffled", 12, 2), At())
    first = loader.state_dict()
    whole = [batch.tolist() for batch in loader]
    rest = iter(loader)
    again = [next(rest).tolist(), next(rest).tolist()]
    loader.load_state_dict(first)
    got = [batch.tolist() for batch in rest]
    assert got == whole + again + got[8:] and len(got) == 12, "to the end of the epoch it had"
    assert loader.epoch == 2 and next(rest, None) is None


def noisy(rows: list[int]) -> torch.Tensor:
    noise = torch.rand(len(rows)) + torch.tensor([random.random() + np.random.rand()])
    return torch.tensor(rows) + 0.3 * noise


def test_what_samples_draw_depends_on_the_position_alone() -> None:
    def loader(rank: int = 0, **more: Any) -> ElasticLoader:
        inner = DataLoader(range(21), batch_size=2, shuffle=True, collate_fn=noisy, **more)  # type: ignore[arg-type]
        return ElasticLoader(inner, At(rank, 2))

    def states() -> list[bytes]:
        numpy = np.random.get_state(legacy=False)
        return [repr(one).encode() for one in (random.getstate(), torch.get_rng_state(), numpy)]

    whole, before = loader(), states()
    want = [next(whole) for _ in range(10)]
    for num in range(10):
        torch.manual_seed(num)
        first = loader()
        for _ in range(num):
            next(first)
        again = loader()
        again.load_state_dict(first.state_dict())
        assert torch.equal(next(again), want[num])
    assert not torch.equal(next(loader(1)).frac(), want[0].frac())
    torch.manual_seed(3)
    before = states()
    for one in (whole, loader(num_workers=1)):
        next(one)
        assert states() == before


class Deck(torch_data.Sampler[int]):
    """A sampler whose order depends on what it has drawn before."""

    def __init__(self, size: int) -> None:
        self.size, self.draws = size, random.Random(4)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draws.sample(range(self.size), self.size))


def test_an_order_that_is_not_drawn_again_is_seen() -> None:
    def loader(sampler: Any) -> ElasticLoader:
        return ElasticLoader(DataLoader(range(9), batch_size=2, sampler=sampler), At())  # type: ignore[arg-type]

    for sampler, again in (
        (lambda: Deck(9), False),
        (lambda: torch_data.SubsetRandomSampler(range(9)), True),
    ):
        first = loader(sampler())
        for _ in range(7):
            next(first)
        other = loader(sampler())
        other.load_state_dict(first.state_dict())
        assert other.is_drawn_again == again
        first.load_state_dict(first.state_dict())
        assert first.is_drawn_again, "it has not drawn since"
    buckets = ElasticLoader(DataLoader(range(9), batch_sampler=Buckets(9)), At())  # type: ignore[arg-type]
    next(buckets)
    buckets.load_state_dict(buckets.state_dict() | {"drawn": 1})
    assert not buckets.is_drawn_again


class Failing:
    """A data set that cannot be read once."""

    failed = False

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 2 and not self.failed:
            self.failed = True
            raise OSError("mine")
        return index


def test_a_batch_whose_samples_could_not_be_read_is_given_again() -> None:
    loader = ElasticLoader(DataLoader(Failing(), batch_size=2), At())  # type: ignore[arg-type]
    assert next(loader).tolist() == [0, 1]
    with pytest.raises(OSError, match="mine"):
        next(loader)
    assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5]]


def slow_first(rows: list[int]) -> torch.Tensor:
    time.sleep(0.3 if rows[0] == 0 else 0)
    return torch.tensor(rows)


def test_batches_come_in_order_and_an_epoch_without_one_is_an_error() -> None:
    inner = DataLoader(range(8), 2, num_workers=2, collate_fn=slow_first, in_order=False)  # type: ignore[arg-type]
    assert [batch.tolist()[0] for batch in ElasticLoader(inner, At())] == [0, 2, 4, 6]
    none = ElasticLoader(make("sequential", 3, 4, drop_last=True), At())
    assert list(none) == []
    with pytest.raises(UserError, match="got an epoch without a batch"):
        next(none)


@pytest.mark.parametrize("global_batch", [None, 4])
def test_a_length_depends_on_the_number_of_ranks_unless_the_global_batch_is_fixed(
    global_batch: int | None,
) -> None:
    seat = At(0, 2)
    loader = ElasticLoader(make("shuffled", 16, 2), seat, global_batch=global_batch)
    assert len(loader) == 4 and seat.read == ({"size"} if global_batch is None else set())
    seat.size = 4
    assert len(loader) == (2 if global_batch is None else 4)


# -- in the loop of attempts --------------------------------------------------------------------
@pytest.fixture
def alone() -> Iterator[Session]:
    yield session.init()
    session.leave()


def test_the_loop_ends_with_the_data_and_attempts_that_take_batches_fit_any_size(
    alone: Session, kept: Attempts
) -> None:
    with pytest.raises(UserError, match=r"got no end; expected total_steps, or s.data\(loader"):
        next(restored(alone).steps())
    loader = alone.data(make("shuffled", 10, 4), epochs=3)
    got = []
    for step in alone.steps():
        with alone.attempt():
            for batch in itertools.islice(loader, 2):
                got += batch.tolist()
            alone.step(step, total_steps=3 * len(loader))
    assert Counter(got) == dict.fromkeys(range(10), 3) and step == 5
    alone._attempts, groups = kept, SimpleNamespace(foreign=False, scales=False)
    kept.groups = groups  # type: ignore[assignment]
    assert alone._state is not None and not alone._why_not(alone._state)
    assert not alone._why_fixed_size()
    assert len(loader) == 3 and "outside" in alone._why_fixed_size()


def test_a_batch_is_taken_in_an_attempt(alone: Session) -> None:
    loader = restored(alone).data(make("shuffled", 10, 4), epochs=1)
    before = next(loader).tolist()  # the script may look at one
    loader.load_state_dict({**loader.state_dict(), "offset": 0})
    for step in alone.steps(2):
        for take in (lambda: next(loader), lambda: [0 for _ in loader]):
            with pytest.raises(UserError, match=r"outside an attempt; expected `batch = next\(loa"):
                take()
        with alone.attempt():
            if not step:
                assert next(loader).tolist() == before
            alone.step(step)


def test_an_attempt_is_halted_after_the_batch_that_it_takes(alone: Session, kept: Attempts) -> None:
    """Else its loader would be left as it is within, with half of a batch."""

    class Slow:
        done = False

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            time.sleep(0.2)
            self.done = True
            return index

    data = Slow()
    loader = restored(alone).data(DataLoader(data, batch_size=2), epochs=1)  # type: ignore[arg-type]
    alone._attempts, alone._loops = kept, True
    thread: threading.Thread
    with kept:
        thread = halt_soon(kept, 0.05)
        try:
            next(loader)
        except AttemptHalted:
            assert data.done and loader.offset == 2
            raise
    kept.halted()
    thread.join()
    assert kept.failed


def test_a_kept_process_does_not_go_on_with_another_order(
    alone: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = DataLoader(range(9), batch_size=2, sampler=Deck(9))  # type: ignore[arg-type]
    loader = restored(alone).data(inner)
    next(loader)
    stored = loader.state_dict()
    list(loader), next(loader)
    monkeypatch.setattr(alone, "_load", lambda *_: loader.load_state_dict(stored))
    alone._restore, state = Restore(step=3, generation=1, num_shards=1), alone._state
    assert state is not None
    alone._begin_at(state, 0)
    alone._kept = True
    with pytest.raises(NotKept, match="a sampler draws another order than before"):
        alone._begin_at(state, 0)
