"""Each sample once an epoch: a ledger of ids over random kills and resizes, with the session's
committed step, loaders that fetch ahead, and uneven ends."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from holdfast.data import ElasticSampler, ElasticStream
from holdfast.orchestrator.errors import UserError


@dataclass
class At:
    """Rank, number of ranks, and the step that a session is at."""

    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    next_step: int = 0


@dataclass
class Life:
    """A job that trains on samples, is killed, and goes on with another number of ranks."""

    settings: dict[str, Any]
    size: int
    committed: dict[str, Any] | None = None
    ledger: dict[int, list[tuple[int, int, int, float]]] = field(default_factory=dict)
    """Step -> (epoch, id, rank, weight), of the newest time that it was trained."""
    over: bool = False

    def run(self, ranks: int, steps: int, *, kept: int, ahead: int) -> None:
        """Trains `steps` steps on `ranks` ranks, each of which fetches `ahead` batches ahead; only
        the first `kept` of them are committed."""
        at = [At(rank, ranks) for rank in range(ranks)]
        samplers = [ElasticSampler(self.size, one, **self.settings) for one in at]
        for sampler, one in zip(samplers, at, strict=True):
            if self.committed is not None:
                sampler.load_state_dict(self.committed)
                one.next_step = self.committed["step"]
        first = at[0].next_step
        iterators = [iter(sampler) for sampler in samplers]
        fetched = [list(itertools.islice(one, steps + ahead)) for one in iterators]
        assert len({len(batches) for batches in fetched}) == 1, "all ranks have the same batches"
        self.over = len(fetched[0]) < steps
        for number in range(min(steps, len(fetched[0]))):
            step = first + number
            self.ledger[step] = [
                (sampler.share(step).indices[n] // self.size, sample, rank, weight)
                for rank, sampler in enumerate(samplers)
                for n, (sample, weight) in enumerate(
                    zip(fetched[rank][number], sampler.weights(step), strict=True)
                )
            ]
            for one in at:
                one.next_step = step + 1
            states = [sampler.state_dict() for sampler in samplers]
            assert states.count(states[0]) == ranks, "the state is the same on all ranks"
            if number < kept:
                self.committed = states[0]
        committed = self.committed["step"] if self.committed else 0
        self.over = self.over and committed == first + len(fetched[0])
        for step in [step for step in self.ledger if step >= committed]:
            del self.ledger[step]  # it is trained again

    def counts(self) -> Counter[tuple[int, int]]:
        rows = [row for rows in self.ledger.values() for row in rows]
        return Counter((epoch, sample) for epoch, sample, _, weight in rows if weight)


RUNS = st.lists(
    st.tuples(st.integers(1, 7), st.integers(1, 9), st.integers(0, 9), st.integers(0, 4)),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 60), epochs=st.integers(1, 3), seed=st.integers(0, 5),
    shuffle=st.booleans(), by_rank=st.booleans(), batch=st.integers(1, 12), runs=RUNS,
    last=st.integers(1, 7),
)  # fmt: skip
def test_each_sample_is_trained_once_an_epoch_through_kills_and_resizes(
    size: int, epochs: int, seed: int, shuffle: bool, by_rank: bool, batch: int, runs: Any,
    last: int,
) -> None:  # fmt: skip
    how = {"rank_batch": batch} if by_rank else {"global_batch": batch + 6}
    life = Life({**how, "seed": seed, "shuffle": shuffle, "epochs": epochs}, size)
    for ranks, steps, kept, ahead in runs:
        life.run(ranks, steps, kept=kept, ahead=ahead)
    life.run(last, 10_000, kept=10_000, ahead=0)
    assert life.counts() == {(e, i): 1 for e in range(epochs) for i in range(size)}
    rows = [row for rows in life.ledger.values() for row in rows]
    padding = [rank for _, _, rank, weight in rows if not weight]
    assert len(padding) <= 6, "of the last batch only, at most one a rank"


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 50), runs=RUNS, seed=st.integers(0, 3))
def test_without_epochs_no_batch_is_short_and_each_epoch_has_each_sample_once(
    size: int, runs: Any, seed: int
) -> None:
    life = Life({"global_batch": 8, "seed": seed}, size)
    for ranks, steps, kept, ahead in runs:
        life.run(ranks, steps, kept=kept, ahead=ahead)
    assert all(len(rows) == 8 for rows in life.ledger.values())
    counts, trained = life.counts(), 8 * len(life.ledger)
    assert set(counts.values()) <= {1}
    whole = {(e, i): 1 for e in range(trained // size) for i in range(size)}
    assert whole.items() <= counts.items()


def test_the_order_depends_on_the_seed_and_the_epoch_only() -> None:
    def order(ranks: int, seed: int) -> list[int]:
        samplers = [
            ElasticSampler(12, At(rank, ranks), global_batch=6, seed=seed) for rank in range(ranks)
        ]
        return [
            one.ids(step)[place] for step in range(4) for place in range(6 // ranks)
            for one in samplers
        ]  # fmt: skip

    assert order(1, 3) == order(2, 3) == order(3, 3) != order(1, 4)
    assert sorted(order(1, 3)[:12]) == list(range(12)) and order(1, 3)[:12] != order(1, 3)[12:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_fetches_ahead_does_not_count_as_trained(workers: int) -> None:
    at = At()
    sampler = ElasticSampler(100, at, global_batch=4, epochs=1)
    loader = iter(DataLoader(range(100), batch_sampler=sampler, num_workers=workers))  # type: ignore[arg-type]
    seen = [next(loader).tolist() for _ in range(3)]
    at.next_step = 2
    assert sampler.state_dict()["position"] == 8
    again = At(next_step=2)
    other = ElasticSampler(100, again, global_batch=4, epochs=1)
    other.load_state_dict(sampler.state_dict())
    assert next(iter(other)) == seen[2]
    assert len(other) == 23


class Lines:
    """A stream that knows which epochs were opened where."""

    def __init__(self, size: int) -> None:
        self.size, self.opened = size, []  # type: ignore[var-annotated]

    def __call__(self, epoch: int, first: int) -> Iterator[int]:
        self.opened.append((epoch, first))
        return iter(range(1000 * epoch + first, 1000 * epoch + self.size))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_divided_among_ranks_and_continued_at_another_size(workers: int) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for ranks, steps in ((2, 3), (3, 100)):
        ends = []
        for rank in range(ranks):
            at = At(rank, ranks)
            sampler = ElasticSampler(10, at, global_batch=4, shuffle=False, epochs=2)
            if state is not None:
                sampler.load_state_dict(state)
                at.next_step = state["step"]
            stream = ElasticStream(Lines(10), sampler)
            loader = DataLoader(stream, sampler=stream.steps, batch_size=None, num_workers=workers)
            batches = list(itertools.islice(loader, steps))
            for number, batch in enumerate(batches):
                weights = sampler.weights(at.next_step + number)
                seen += [n for n, w in zip(batch.tolist(), weights, strict=True) if w]
            at.next_step += len(batches)
            ends.append(sampler.state_dict())
        state = ends[0]
        assert ends.count(state) == ranks
    assert sorted(seen) == [*range(10), *range(1000, 1010)]


def test_a_stream_begins_where_it_goes_on() -> None:
    lines, at = Lines(10), At()
    sampler = ElasticSampler(10, at, global_batch=4, shuffle=False)
    sampler.load_state_dict({**sampler.state_dict(), "step": 3, "position": 12})
    at.next_step = 3
    batches = iter(ElasticStream(lines, sampler, collate=list))
    assert [next(batches), next(batches)] == [[1002, 1003, 1004, 1005], [1006, 1007, 1008, 1009]]
    assert lines.opened == [(1, 2)]


@pytest.mark.parametrize(("size", "got"), [(9, "a stream of 9 samples"), (11, "with more samples")])
def test_a_stream_of_another_length_is_refused(size: int, got: str) -> None:
    sampler = ElasticSampler(10, At(), global_batch=5, shuffle=False, epochs=1)
    with pytest.raises(UserError, match=f"ElasticSampler.size: got .*{got}; expected 10"):
        list(iter(ElasticStream(Lines(size), sampler)))


def test_processes_of_a_loader_that_persist_follow_the_step_of_the_session() -> None:
    at = At()
    sampler = ElasticSampler(12, at, global_batch=4, shuffle=False, epochs=3)
    stream = ElasticStream(Lines(12), sampler)
    how: Any = {"sampler": stream.steps, "batch_size": None, "persistent_workers": True}
    loader = DataLoader(stream, num_workers=2, **how)
    seen = []
    for _ in range(3):
        for batch in itertools.islice(iter(loader), 3):
            seen += batch.tolist()
            at.next_step += 1
    assert seen == [*range(12), *range(1000, 1012), *range(2000, 2012)]
    assert list(loader) == [] and len(loader) == 0


def test_a_stream_that_failed_is_opened_again() -> None:
    class Breaking(Lines):
        """Its first reader breaks after three samples."""

        def __call__(self, epoch: int, first: int) -> Iterator[int]:
            for sample in super().__call__(epoch, first):
                if len(self.opened) == 1 and sample == 3:
                    raise OSError("the disk is away")
                yield sample

    lines = Breaking(8)
    sampler = ElasticSampler(8, At(), global_batch=2, shuffle=False, epochs=1)
    stream = ElasticStream(lines, sampler, collate=list)
    assert stream[0] == [0, 1]
    with pytest.raises(OSError, match="away"):
        stream[1]
    assert (stream[1], stream[2]) == ([2, 3], [4, 5])
    assert lines.opened == [(0, 0), (0, 2)]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"batch_size": None}, "got a DataLoader without them; expected sampler=stream.steps"),
        ({"batch_size": 2}, "got a DataLoader with a batch_size; expected batch_size=None"),
    ],
)
def test_a_loader_that_would_not_follow_the_session_is_refused(
    more: dict[str, Any], what: str
) -> None:
    sampler = ElasticSampler(10, At(), global_batch=5, shuffle=False, epochs=1)
    stream = ElasticStream(Lines(10), sampler)
    if more["batch_size"]:
        more = {**more, "sampler": stream.steps}
    with pytest.raises(UserError, match=f"ElasticStream.steps: {what}"):
        next(iter(DataLoader(stream, **more)))


def test_a_job_that_had_trained_needs_the_state_of_its_sampler() -> None:
    state = ElasticSampler(40, At(0, 4), rank_batch=2, epochs=1).state_dict()
    resumed = ElasticSampler(40, At(0, 2, 3), rank_batch=2, epochs=1)
    what = r"rank_batch: got a job that has trained 3 steps, and no state of it; expected its state"
    with pytest.raises(UserError, match=f'{what}.*restore.extra={{"sampler": sampler}}'):
        next(iter(resumed))
    resumed.load_state_dict({**state, "step": 3, "position": 24})
    assert resumed.share(3).indices == (24, 26)
    at = At(0, 4)
    begun = ElasticSampler(40, at, rank_batch=2, epochs=1)
    at.next_step = 3  # of this process itself
    assert begun.share(3).indices == (24, 28)
    fixed = ElasticSampler(40, At(0, 2, 3), global_batch=8, epochs=1)
    assert fixed.share(3).indices == (24, 26, 28, 30), "the same of any number of ranks"


def test_a_sampler_travels_to_a_process_without_its_session() -> None:
    class Session(At):
        """Cannot be sent."""

        def __reduce__(self) -> Any:
            raise TypeError

    sampler = ElasticSampler(10, Session(1, 2, 3), global_batch=4)
    assert pickle.loads(pickle.dumps(sampler)).ids(5) == sampler.ids(5)
    ordered = ElasticSampler(10, Session(1, 2, 3), global_batch=4, shuffle=False)
    stream = ElasticStream(Lines(10), ordered, collate=list)
    assert stream[3] == pickle.loads(pickle.dumps(stream))[3] == [1003, 1005]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({}, "global_batch: got global_batch=None and rank_batch=None"),
        ({"global_batch": 4, "rank_batch": 4}, "global_batch: got global_batch=4 and"),
        ({"global_batch": 2}, "global_batch: got 2; expected at least 3, one a rank"),
        ({"rank_batch": 2, "epochs": 0}, "epochs: got 0; expected an integer, 1 or more"),
        ({"rank_batch": 2, "size": 0}, "size: got 0; expected an integer, 1 or more"),
        ({"rank_batch": 2, "size": 9.0}, "size: got 9.0; expected an integer, 1 or more"),
        ({"rank_batch": 2, "global_batch": -4}, "global_batch: got global_batch=-4 and rank_batch"),
        ({"rank_batch": 2, "global_batch": 0}, "global_batch: got global_batch=0 and rank_batch=2"),
        ({"global_batch": -4}, "global_batch: got -4; expected an integer, 1 or more"),
        ({"global_batch": 6.0}, "global_batch: got 6.0; expected an integer, 1 or more"),
        ({"rank_batch": 0}, "rank_batch: got 0; expected an integer, 1 or more"),
        ({"rank_batch": True}, "rank_batch: got True; expected an integer, 1 or more"),
        ({"rank_batch": 2, "seed": 1.5}, "seed: got 1.5; expected an integer"),
    ],
)
def test_wrong_settings_are_refused_by_name(more: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=f"ElasticSampler.{what}"):
        ElasticSampler(session=At(0, 3), **{"size": 10, **more})


def test_the_state_of_another_order_is_refused() -> None:
    state = ElasticSampler(10, At(), global_batch=2, seed=1).state_dict()
    with pytest.raises(UserError, match=r"ElasticSampler.seed: got 2; expected 1, as in the"):
        ElasticSampler(10, At(), global_batch=2, seed=2).load_state_dict(state)
    stream = ElasticSampler(10, At(), global_batch=2)
    with pytest.raises(UserError, match="shuffle: got True for a stream; expected shuffle=False"):
        ElasticStream(Lines(10), stream)
