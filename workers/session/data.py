"""A script's own loader, divided among the ranks: each sample once an epoch at any world size.

All ranks walk one order of an epoch's samples, which depends on the seed and the epoch. A global
batch is its next piece, and each rank takes its share. What is stored is how much of the epoch all
ranks have been given, which is the same on all; so any number of ranks divides the rest. It is
counted where batches leave the loader: what its processes have fetched ahead is fetched again.
"""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data import _utils as processes

from holdfast.orchestrator.errors import UserError

from .order import mix, permuted

_LIBRARIES = {"torch", "torchdata", "accelerate"}
"""Packages whose samplers and loaders are known."""
_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
)  # fmt: skip
"""Settings of a DataLoader that the one made of it has too."""


class Ranks(Protocol):
    """A Session as far as data needs one."""

    @property
    def _seat(self) -> tuple[int, int]: ...
    def _reads(self, what: Literal["size"]) -> None: ...
    def _taking(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Pieces:
    """Cuts of an epoch into global batches, and of these into shares of the ranks."""

    batch: int
    """Samples of a global batch."""
    rank: int
    ranks: int
    drop_last: bool
    joins: bool
    """The last batch may have up to one more sample a rank, so that each rank has one."""

    def taken(self, left: int) -> int:
        """Samples of the next global batch, of `left`; 0: the epoch is over."""
        if self.drop_last:
            return self.batch if left >= self.batch else 0
        return left if left < self.batch + (self.ranks if self.joins else 1) else self.batch

    def share(self, taken: int) -> tuple[list[int], float]:
        """This rank's places in a global batch of so many samples, and their weight. With fewer
        samples than ranks, some repeat a sample of another rank."""
        mine = list(range(self.rank, taken, self.ranks))
        return (mine, 1.0) if mine else ([self.rank % taken], 0.0)


class _Batch(NamedTuple):
    """An item of a stream's loader."""

    value: Any
    taken: int
    weights: list[float]
    is_last: bool


class ElasticLoader:
    """`Session.data` documents it."""

    def __init__(
        self,
        loader: Any,
        session: Ranks,
        *,
        epochs: int | None = None,
        global_batch: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._given, self.epochs, self._session = loader, epochs, session
        self.epoch = self.offset = 0
        """The epoch of the next batch, and how many of its samples all ranks have been given."""
        self.weights: list[float] = []
        """Weights of the last batch's samples: 0 for one that another rank has too."""
        self.is_drawn_again = True
        """The script's sampler has given the order that it had before the restore."""
        self._iterator: Iterator[Any] | None = None
        self._at: tuple[int, int] | None = None
        """Epoch and offset of the iterator's next batch; None: it has given its last one."""
        inner = getattr(loader, "base_dataloader", loader)
        if not isinstance(inner, DataLoader) or not _is_known(type(inner).__iter__):
            got = f"a {type(loader).__name__} with an iteration of its own"
            raise _wrong(got, "a DataLoader of torch or torchdata, or one that accelerate prepared",
                         "give the state of another loader as per_rank of restore")  # fmt: skip
        if inner is not loader:
            session._reads("size")  # accelerate has the number of ranks too
        is_stream = isinstance(inner.dataset, IterableDataset)
        self._plan = plan = _StreamPlan(self) if is_stream else _MapPlan(self)
        split = plan.read(inner)
        if global_batch is None and getattr(loader, "split_batches", split):
            global_batch = plan.batch
        self._global_batch = global_batch
        self.seed = plan.seed if seed is None else seed
        self._how = {name: getattr(inner, name) for name in _KEPT if hasattr(inner, name)}
        self._build(session._seat)

    def _build(self, seat: tuple[int, int]) -> None:
        """Make the loader of a rank among so many."""
        plan, batch = self._plan, self._global_batch
        if batch is not None and (batch < seat[1] or not plan.joins):
            least = f"at least {seat[1]}, one sample a rank"
            raise _wrong(f"global_batch={batch}", least if plan.joins else "none, for "
                         "batches that are made by a batch_sampler of the script")  # fmt: skip
        self._seat = seat
        self.pieces = Pieces(batch or plan.batch * seat[1], *seat, plan.drop_last, plan.joins)
        self._loader = _prepared(self._given, plan.loader(dict(self._how)))

    def _follow(self) -> None:
        """Divide the data for the ranks that there are now."""
        if self._session._seat != self._seat:
            self._close()
            self._build(self._session._seat)

    # -- the loop ---------------------------------------------------------------------------------
    @property
    def is_over(self) -> bool:
        """The last of `epochs` has been given."""
        return self.epochs is not None and self.epoch >= self.epochs

    def __len__(self) -> int:
        """Batches of a whole epoch at this number of ranks. Raises TypeError for a stream."""
        if self._global_batch is None:
            self._session._reads("size")
        self._follow()
        size, batch = self._plan.num(self.epoch), self.pieces.batch
        num = max(0, size // batch - 1)  # none of these is the last one
        left = size - num * batch
        while taken := self.pieces.taken(left):
            left, num = left - taken, num + 1
        return num

    def __iter__(self) -> Iterator[Any]:
        return _Rest(self)

    def __next__(self) -> Any:
        return self.take(None)

    def take(self, last: int | None) -> Any:
        """The next batch, up to the end of the epoch `last`."""
        with self._session._taking():
            self._follow()
            while not self.is_over and (last is None or self.epoch <= last):
                batch = self._next()
                if batch is not None:
                    return batch.value
                if not self.offset and last is None:
                    raise _wrong("an epoch without a batch", "at least one")
                self.epoch, self.offset = self.epoch + 1, 0
            self._close()
        raise StopIteration(
            "session.data: its epochs are over; expected itertools.islice(loader, num) for the "
            "micro-batches of a step, of which the last one of an epoch may have fewer"
        )

    def _next(self) -> _Batch | None:
        """The next batch of this epoch; None: there is none."""
        epoch, offset = at = self.epoch, self.offset
        begins = self._at != at or self._iterator is None
        with _put_back() if begins or not self._how["num_workers"] else nullcontext():
            if begins:
                self._close()
                _seed(mix(self.seed, epoch, offset, self._seat[0]))  # of the loader's processes
                if self._loader is not self._plan.inner:  # accelerate sets it in the data set
                    self._loader.iteration = epoch
                self._iterator = iter(self._loader)
            iterator, self._iterator = self._iterator, None  # after an error there is a new one
            assert iterator is not None
            item = next(iterator, self)
            if item is self:
                return None
            batch = self._plan.unpack(item)
        self._iterator, self.weights = iterator, batch.weights
        # Before it is given: a step may end the epoch and be stored.
        self.epoch, self.offset = (epoch + 1, 0) if batch.is_last else (epoch, offset + batch.taken)
        self._at = None if batch.is_last else (self.epoch, self.offset)
        return batch

    def seed_batch(self, epoch: int, offset: int) -> None:
        """Seed what samples draw in this process, which loads them, by the batch's position."""
        if not self._how["num_workers"]:
            _seed(mix(self.seed, epoch, offset, self._seat[0]))

    def _close(self) -> None:
        """End the iteration, whose processes may have fetched ahead."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and self._at is None:
            next(iterator, None)  # the epoch has no batch left: the loader ends by itself
        elif iterator is not None and self._loader is not self._plan.inner:
            self._loader.end()

    def __getattr__(self, name: str) -> Any:
        """Attributes of the loader that was given, such as `dataset`."""
        if name == "_given":
            raise AttributeError(name)
        return getattr(self._given, name)

    # -- state ------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks."""
        order = {"size": self._plan.size, "seed": self.seed, "order": self._plan.kind}
        drawn = self._plan.drawn if self.offset else 0
        return {"epoch": self.epoch, "offset": self.offset, "drawn": drawn, **order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises UserError for the state of another order."""
        mine = self.state_dict()
        for name in ("order", "size", "seed"):
            if mine[name] != state[name]:
                raise _wrong(f"{name} {mine[name]}", f"{state[name]}, as in the checkpoint, so that"
                             " each sample occurs once an epoch")  # fmt: skip
        self.epoch, self.offset = state["epoch"], state["offset"]
        if stored := state.get("drawn", 0):
            self._plan.num(self.epoch)
            self.is_drawn_again = self._plan.drawn == stored


class _Rest:
    """The rest of an epoch, wherever a restore begins it again."""

    def __init__(self, data: ElasticLoader) -> None:
        self._data, self._epoch = data, data.epoch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._data.take(self._epoch)


# -- data with indices ----------------------------------------------------------------------------
class _MapPlan(Sampler[Any]):
    """This rank's indices of the rest of an epoch, in batches as the script's loader has them."""

    inner: Any
    kind = "drawn"
    seed = 0

    def __init__(self, data: ElasticLoader) -> None:
        self._data = data
        self._drawn: tuple[int, Any] = (-1, None)
        self.drawn = 0
        """Digest of the order that was drawn last; 0: none was."""

    def read(self, inner: Any) -> bool:
        """Takes the settings of this loader; returns whether its batches are divided already."""
        self._dataset, by = inner.dataset, inner.batch_sampler
        split = bool(getattr(by, "split_batches", False))
        if type(by).__name__ == "BatchSamplerShard":
            by = by.batch_sampler
        if type(by).__name__ == "SkipBatchSampler":
            raise _wrong("a loader that skips batches", "the whole one, as it continues by itself")
        self._in_batches = by is not None
        self.joins = isinstance(by, torch.utils.data.BatchSampler) and _is_known(type(by).__iter__)
        source = inner.sampler if by is None else by.sampler if self.joins else by
        self.batch: int = by.batch_size if self.joins else 1
        self.drop_last = bool(by.drop_last) if self.joins else False
        self._source, plain = source, _is_known(type(source).__iter__)
        divides = [hasattr(p, "num_replicas") for p in (source, getattr(source, "sampler", 0))]
        whole = getattr(source, "data_source", getattr(source, "dataset", None))
        self.size: int | None = len(whole) if plain and whole is not None else None
        if plain and divides[0]:
            self.kind = "shuffled" if source.shuffle else "sequential"
            self.seed = source.seed
        elif any(divides):
            raise _wrong(
                f"a {type(source).__name__}, which divides samples among ranks",
                "a sampler of the whole order, which session.data divides",
            )
        elif plain and type(source).__name__ == "SequentialSampler":
            self.kind = "sequential"
        elif (
            plain
            and type(source).__name__ in ("RandomSampler", "SeedableRandomSampler")
            and not source.replacement
            and source.num_samples == self.size
        ):
            self.kind = "shuffled"
        return split

    def loader(self, how: dict[str, Any]) -> Any:
        own = {"batch_sampler": self} if self._in_batches else {"batch_size": None, "sampler": self}
        self.inner = DataLoader(self._dataset, **own, **how)
        return self.inner

    def num(self, epoch: int) -> int:
        """Samples of this epoch, or batches where the script makes them."""
        if self.kind != "drawn" and self.size is not None:
            return self.size
        return len(self._order(epoch))

    def __iter__(self) -> Iterator[Any]:
        epoch, at, pieces = self._data.epoch, self._data.offset, self._data.pieces
        size = self.num(epoch)
        while taken := pieces.taken(size - at):
            batch = self._ids(epoch, [at + place for place in pieces.share(taken)[0]])
            self._data.seed_batch(epoch, at)
            yield batch if self.joins else batch[0]
            at += taken

    def unpack(self, batch: Any) -> _Batch:
        pieces, left = self._data.pieces, self.num(self._data.epoch) - self._data.offset
        taken = pieces.taken(left)
        places, weight = pieces.share(taken)
        return _Batch(batch, taken, [weight] * len(places), not pieces.taken(left - taken))

    def _ids(self, epoch: int, places: list[int]) -> list[Any]:
        if self.kind == "sequential":
            return places
        if self.kind == "shuffled":
            numbers = np.array(places, dtype=np.uint64)
            ids: list[Any] = permuted(
                numbers, self.num(epoch), mix(self._data.seed, epoch)
            ).tolist()
            return ids
        order = self._order(epoch)
        return [order[place] for place in places]

    def _order(self, epoch: int) -> list[Any]:
        """Samples that the script's sampler draws for this epoch, the same on all ranks."""
        if self._drawn[0] != epoch:
            if hasattr(self._source, "set_epoch"):
                self._source.set_epoch(epoch)
            with _put_back():
                _seed(seed := mix(self._data.seed, epoch))
                for part in (self._source, getattr(self._source, "sampler", None)):
                    if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                        generator.manual_seed(seed)
                self._drawn = epoch, list(self._source)
            self.drawn = zlib.crc32(repr(self._drawn[1]).encode())
        order: list[Any] = self._drawn[1]
        return order


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def _put_back() -> Iterator[None]:
    """The process's generators of random numbers, as they are, whatever is drawn."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


# -- streams --------------------------------------------------------------------------------------
class _StreamPlan(Sampler[Any]):
    """Pieces of the rest of an epoch whose length is not known: (epoch, first sample, begins)."""

    inner: Any
    kind, seed, size, drawn = "stream", 0, None, 0

    def __init__(self, data: ElasticLoader) -> None:
        self._data = data

    def read(self, inner: Any) -> bool:
        """Takes the settings of this loader; returns whether its batches are divided already."""
        dataset = inner.dataset
        if type(dataset).__name__ == "IterableDatasetShard":
            dataset = dataset.dataset
        if getattr(dataset, "_distributed", None) is not None:
            raise _wrong("a data set that split_dataset_by_node has divided", "the whole one")
        self._dataset, self.joins = dataset, inner.batch_size is not None
        self.batch: int = inner.batch_size or 1
        self.drop_last = bool(inner.drop_last)
        return False

    def loader(self, how: dict[str, Any]) -> Any:
        stream = _Stream(self._dataset, self._data.pieces, how.pop("collate_fn"))
        loader = DataLoader(stream, batch_size=None, sampler=self, collate_fn=_unchanged, **how)
        self.inner = _UntilEnd(loader)
        return self.inner

    def num(self, epoch: int) -> int:
        raise TypeError("the length of a stream is not known")

    def __iter__(self) -> Iterator[tuple[int, int, bool]]:
        epoch, first = self._data.epoch, self._data.offset
        for number in itertools.count():
            at = first + number * self._data.pieces.batch
            self._data.seed_batch(epoch, at)
            yield epoch, at, not number

    def unpack(self, batch: Any) -> _Batch:
        return _Batch(*batch)


def _unchanged(batch: Any) -> Any:
    return batch


class _UntilEnd:
    """The loader of a stream, up to the end of the epoch."""

    def __init__(self, loader: Any) -> None:
        self._loader, self.dataset = loader, loader.dataset
        self.batch_sampler = None

    def __iter__(self) -> Iterator[_Batch]:
        for batch in self._loader:
            if batch is not None:
                yield batch
            if batch is None or batch[3]:
                return


class _Stream(Dataset[Any]):
    """Reads the whole stream in each process of a loader, and keeps this rank's samples."""

    def __init__(self, dataset: Iterable[Any], pieces: Pieces, collate: Any) -> None:
        self._dataset, self._pieces, self._collate = dataset, pieces, collate
        self._samples: Iterator[Any] = iter(())
        self._ahead: deque[Any] = deque()
        """Samples that were read to know whether the epoch ends."""
        self._at = self._end = (-1, 0)
        """Epoch and number of the next sample, and of the end of the last epoch that ended."""

    def __getitem__(self, piece: tuple[int, int, bool]) -> _Batch | None:
        """The batch of a piece; None after the end of the epoch."""
        epoch, first, begins = piece
        pieces, kept, num = self._pieces, dict[int, Any](), 0
        if self._end[0] != epoch or first < self._end[1]:
            self._go_to(epoch, first)
            for sample in self._next(pieces.batch):
                if num % pieces.ranks == pieces.rank or num < pieces.ranks:
                    kept[num] = sample
                num += 1
            beyond = pieces.batch if pieces.drop_last else pieces.ranks if pieces.joins else 1
            if num == pieces.batch:
                ahead = list(self._next(beyond))
                self._ahead = deque(ahead)
            left = num + len(self._ahead)
            if left < pieces.batch + beyond:
                self._end = (epoch, first + left)
            taken = pieces.taken(left)
        if not num or not taken or (pieces.joins and not begins and left < pieces.ranks):
            return None  # the last piece had the rest
        kept |= {place: self._ahead.popleft() for place in range(num, taken)}
        self._at = (epoch, first + taken)
        places, weight = pieces.share(taken)
        samples = [kept[place] for place in places]
        value = self._collate(samples if pieces.joins else samples[0])
        return _Batch(value, taken, [weight] * len(places), not pieces.taken(left - taken))

    def _next(self, num: int) -> Iterator[Any]:
        for _ in range(num):
            sample = self._ahead.popleft() if self._ahead else next(self._samples, self)
            if sample is self:
                return
            yield sample

    def _go_to(self, epoch: int, first: int) -> None:
        at, self._at = self._at, (-1, 0)  # after an error the epoch is opened again
        if at[0] != epoch or at[1] > first:
            processes.worker._worker_info = None  # with it a data set divides itself
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            skip: Any = getattr(self._dataset, "skip", None) if first else None
            self._samples = iter(skip(first) if skip else self._dataset)
            self._ahead.clear()
            at = (epoch, first if skip else 0)
        for _ in self._next(first - at[1]):
            pass


# -- accelerate -----------------------------------------------------------------------------------
def _prepared(given: Any, inner: Any) -> Any:
    """`inner` in what accelerate put around the loader that was given: it moves batches to the
    device, and accumulation of gradients learns from it where an epoch ends."""
    if given is inner or not hasattr(given, "base_dataloader"):
        return inner
    kind = sys.modules[type(given).__module__].DataLoaderShard
    outer = object.__new__(kind)
    vars(outer).update(vars(given))
    if type(given) is not kind:  # DataLoaderDispatcher reads on rank 0
        outer.device = given.state.device
    outer.rng_types = outer.synchronized_generator = None  # the order needs none
    outer.base_dataloader, outer.skip_batches = inner, 0
    return outer


def _is_known(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in _LIBRARIES


def _wrong(got: str, expected: str, fix: str = "") -> UserError:
    return UserError.of("session.data", got, expected, fix)
