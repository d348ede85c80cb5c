"""Samples of a script's own data set, each once an epoch, while the number of ranks changes.

All ranks together train on the positions of one endless order: each epoch has every sample once, in
an order of its own. A global batch is the next piece of it, and each rank takes its share. What is
stored is how much of the order all ranks have trained on, which is the same on all; so any number
of ranks divides the rest. That count follows from the session's step, not from what a loader has
fetched ahead: batches that were fetched and not trained on are fetched again.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NoReturn, Protocol

import numpy as np
from torch.utils.data import Dataset, Sampler, default_collate

from holdfast.orchestrator.errors import Problem, UserError

from .order import BatchShare, mix, permuted


class StepOfRank(Protocol):
    """What a sampler needs of a Session."""

    @property
    def data_parallel_rank(self) -> int: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def next_step(self) -> int: ...


@dataclass(frozen=True)
class _Fixed:
    """The part of a session that a process of a DataLoader needs."""

    data_parallel_rank: int
    data_parallel_size: int
    next_step: int


class _Opened:
    """An epoch of a stream that one process reads, and where it is in the order."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.samples: Iterator[Any] = iter(())
        self.at = self.epoch_end = 0


class ElasticSampler(Sampler[list[int]]):
    """The `batch_sampler` of a DataLoader over `size` samples: yields this rank's samples of each
    step, from the session's next step on. A batch is a step. Give it to restore, to be stored:

        sampler = ElasticSampler(len(data), s, global_batch=64, seed=1, epochs=3)
        start = s.restore(model, optimizer, extra={"sampler": sampler})
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
        for step, batch in enumerate(loader, start):
            ...
            s.step(step, loss=loss)

    Give one of `global_batch`, the samples of a step of all ranks, and `rank_batch`, those of each
    rank. With `epochs` it ends after the last sample of the last epoch, else never; batches go on
    over the end of an epoch. Shares differ by one sample where the ranks do not divide a batch. The
    last batch has what is left, or up to one more sample a rank, so that each rank has one; if less
    than one a rank is left, as after a resize, ranks without one get a sample of weight 0.

    Raises UserError for wrong settings, for fewer samples in a batch than ranks, and, when it is
    used with `rank_batch` in a job that had trained, if it was not given to restore.
    """

    def __init__(
        self,
        size: int,
        session: StepOfRank,
        *,
        global_batch: int | None = None,
        rank_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        ranks = session.data_parallel_size
        if (global_batch is None) == (rank_batch is None):
            got = f"global_batch={global_batch} and rank_batch={rank_batch}"
            raise _wrong("global_batch", got, "one of the two, 1 or more")
        self.size, self.seed, self.shuffle = _whole("size", size, 1), _whole("seed", seed), shuffle
        self.epochs = None if epochs is None else _whole("epochs", epochs, 1)
        if global_batch is not None:
            self.batch = _whole("global_batch", global_batch, 1)
        else:
            self.batch = _whole("rank_batch", rank_batch, 1) * ranks
        """Samples of a global batch."""
        if self.batch < ranks:
            raise _wrong("global_batch", str(global_batch), f"at least {ranks}, one a rank")
        self._trained_before = session.next_step if rank_batch is not None else 0
        """Steps of earlier generations, of which only load_state_dict knows the batches."""
        self._session = session
        self._step = self._position = 0
        """All ranks had trained on so much of the order before this step."""

    # -- the plan ---------------------------------------------------------------------------------
    def _num_batches(self) -> int | None:
        """Batches from the step at which this rank began; None: endless."""
        if self.epochs is None:
            return None
        full, rest = divmod(max(0, self.epochs * self.size - self._position), self.batch)
        if rest >= self._session.data_parallel_size:
            return full + 1
        return max(full, 1) if rest else full

    def _begin(self, step: int) -> int:
        """The position at which the global batch of a step begins."""
        number, total = step - self._step, self._num_batches()
        if number < 0:
            raise _wrong("step", str(step), f"{self._step} or later, where this rank began")
        if total is not None and number >= total:
            assert self.epochs is not None
            return max(self._position, self.epochs * self.size)
        return self._position + number * self.batch

    def share(self, step: int) -> BatchShare:
        """This rank's positions in the order, and their weights, of a step; empty after the last
        one. Raises UserError for a step before this rank began, and without the state of a job that
        had trained."""
        if self._trained_before:
            got = f"a job that has trained {self._trained_before} steps, and no state of it"
            fix = 'its state, as it may have had other ranks: restore(extra={"sampler": sampler})'
            raise _wrong("rank_batch", got, fix)
        rank, ranks = self._session.data_parallel_rank, self._session.data_parallel_size
        first, end = self._begin(step), self._begin(step + 1)
        mine = tuple(range(first + rank, end, ranks))
        if mine or first == end:
            return BatchShare(mine, (1.0,) * len(mine))
        return BatchShare((first + rank % (end - first),), (0.0,))

    def ids(self, step: int) -> list[int]:
        """This rank's samples of a step, each below `size`."""
        places = [(at // self.size, at % self.size) for at in self.share(step).indices]
        if not self.shuffle:
            return [place for _, place in places]
        found: list[int] = []
        for epoch, group in itertools.groupby(places, key=lambda one: one[0]):
            numbers = np.array([place for _, place in group], dtype=np.uint64)
            found += permuted(numbers, self.size, mix(self.seed, epoch)).tolist()
        return found

    def weights(self, step: int) -> list[float]:
        """1 for each of `ids`, and 0 for one that another rank trains on."""
        return list(self.share(step).weights)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, of the first sample of a step."""
        return self._begin(step) // self.size

    def _steps(self) -> Iterator[int]:
        """Those that are left, from the session's next one on."""
        steps = itertools.count(self._session.next_step)
        return itertools.takewhile(lambda step: self.share(step).indices, steps)

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.ids, self._steps())

    def __len__(self) -> int:
        """Batches from the next step on. Raises TypeError without `epochs`."""
        total = self._num_batches()
        if total is None:
            raise TypeError("an ElasticSampler without epochs has no length")
        return max(0, total - (self._session.next_step - self._step))

    # -- state ------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """After the last finished step: the same on all ranks."""
        step = self._session.next_step
        order = {"size": self.size, "seed": self.seed, "shuffle": self.shuffle}
        return {"step": step, "position": self._begin(step), **order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError for the state of another order."""
        for name in ("size", "seed", "shuffle"):
            got, stored = getattr(self, name), state[name]
            if got != stored:
                wanted = f"{stored}, as in the checkpoint, so that each sample occurs once an epoch"
                raise _wrong(name, str(got), wanted)
        self._step, self._position = state["step"], state["position"]
        self._trained_before = 0

    def __getstate__(self) -> dict[str, Any]:
        """State for a process of a DataLoader, which has no session."""
        s = self._session
        fixed = _Fixed(s.data_parallel_rank, s.data_parallel_size, s.next_step)
        return {**self.__dict__, "_session": fixed}


class _StreamSteps(Sampler[int]):
    """The steps of a sampler: each iteration of a loader begins at the session's next one."""

    def __init__(self, batches: ElasticSampler) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[int]:
        return self._batches._steps()

    def __len__(self) -> int:
        return len(self._batches)


class ElasticStream(Dataset[Any]):
    """This rank's batches of a stream, in the order of a sampler with `shuffle=False`.

    `open_epoch(epoch, first)` returns the samples of an epoch from number `first` on, in the same
    order each time; it is called again in each process of the loader, and may skip by reading.
    Each item is the batch of a step, made by `collate` from a list of samples:

        stream = ElasticStream(open_epoch, sampler)
        loader = DataLoader(stream, sampler=stream.steps, batch_size=None, num_workers=2)

    `steps` are read in the process of the session, so that processes of the loader that persist
    follow it too. Each process reads the whole stream and drops what is of others. Raises UserError
    for a stream of another length than the sampler's `size`, for a sampler that shuffles, and in a
    loader without `steps` or with a batch size.
    """

    def __init__(
        self,
        open_epoch: Callable[[int, int], Iterable[Any]],
        sampler: ElasticSampler,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if sampler.shuffle:
            raise _wrong("shuffle", "True for a stream", "shuffle=False: its order is its own")
        self._open_epoch, self._sampler, self._collate = open_epoch, sampler, collate
        self.steps = _StreamSteps(sampler)
        self._opened = _Opened()

    def __getitem__(self, step: int) -> Any:
        # Not left in place while it is read: after an error the epoch is opened again.
        now, self._opened = self._opened, _Opened()
        if now.process != os.getpid():  # a fork must not read on in its parent's file
            now = _Opened()
        batch = []
        for wanted in self._sampler.share(step).indices:
            if wanted >= now.epoch_end or wanted < now.at:
                epoch, place = divmod(wanted, self._sampler.size)
                now.samples = iter(self._open_epoch(epoch, place))
                now.at, now.epoch_end = wanted, (epoch + 1) * self._sampler.size
            batch.append(self._read(now.samples, now.at, wanted))
            now.at = wanted + 1
            if now.at == now.epoch_end:
                self._expect_end(now.samples)
        self._opened = now
        if not batch:
            raise IndexError(f"step {step} is after the last one")
        return self._collate(batch)

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, self.steps)

    def __len__(self) -> NoReturn:
        """A DataLoader without `sampler` asks for it, to count steps from 0."""
        raise _wrong("steps", "a DataLoader without them", "sampler=stream.steps", "ElasticStream")

    def __getitems__(self, steps: list[int]) -> NoReturn:
        """A DataLoader with a batch size asks for several items."""
        got = "a DataLoader with a batch_size"
        raise _wrong("steps", got, "batch_size=None, as each item is a batch", "ElasticStream")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": _Opened()}

    def _read(self, samples: Iterator[Any], at: int, wanted: int) -> Any:
        for position in range(at, wanted + 1):
            try:
                sample = next(samples)
            except StopIteration:
                got = f"a stream of {position % self._sampler.size} samples"
                raise self._wrong_length(got) from None
        return sample

    def _expect_end(self, samples: Iterator[Any]) -> None:
        if next(samples, self) is not self:
            raise self._wrong_length("a stream with more samples")

    def _wrong_length(self, got: str) -> UserError:
        return _wrong("size", got, f"{self._sampler.size}, the size of the sampler, in each epoch")


def _whole(field: str, value: object, least: int | None = None) -> int:
    expected = "an integer" if least is None else f"an integer, {least} or more"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(field, repr(value), expected)
    if least is not None and value < least:
        raise _wrong(field, str(value), expected)
    return int(value)


def _wrong(field: str, got: str, expected: str, of: str = "ElasticSampler") -> UserError:
    return UserError(str(Problem(f"{of}.{field}", got, expected)))
