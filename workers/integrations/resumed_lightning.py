"""The place of Lightning's Trainer in its data: a checkpoint within an epoch has the number of
batches that were trained, and Lightning reads the epoch from its first batch nevertheless.

So `fit()`, which goes on from the newest complete file of its ModelCheckpoint when it is started
again, skips these batches in the order of that epoch, which torch's generators
draw again. A checksum of the batches' indices shows whether it is the same one. A loader that keeps
its own state goes on by itself. Lightning is not imported here, because it has two names.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from holdfast.orchestrator.protocol.environment import RESUME_SINCE
from holdfast.workers.agent.storage import script_checkpoints

from . import patches
from .patches import MAX_NAMES, agreed, chosen, second_training, written_since

TRIED = ("2.6.6",)
WITHOUT = "Trainer.fit() begins where the script says, with the first batch of the epoch"
PLACE = "holdfast"
"""Key in Lightning's checkpoints: the number of ranks, and how each loader's order began."""
AHEAD = 4096
"""Batches that processes of a loader may have drawn before they are trained."""


def patch(module: ModuleType) -> None:
    """`module`: that of the connector for checkpoints, which writes the place in the data from the
    first launch of a job on."""
    keep_place(module._CheckpointConnector)
    if since := os.environ.get(RESUME_SINCE):
        patches.resume_own(
            module._CheckpointConnector, "resume_start", "checkpoint_path", _in_dirpath, int(since),
            _behind_trained_batches,
        )  # fmt: skip


def _in_dirpath(given: dict[str, Any], since_ns: int) -> str | None:
    """Checkpoint in the folder of its first ModelCheckpoint that has some; without a given one it
    is a new folder (`version_N`) in each start, in which there is none."""
    trainer = given["self"].trainer
    if str(getattr(trainer.state.fn, "value", trainer.state.fn)) != "fit":
        return None
    writers = [c for c in trainer.checkpoint_callbacks if getattr(c, "dirpath", None)]
    folders = dict.fromkeys(Path(c.dirpath) for c in writers if not c.save_weights_only)
    for folder in folders:
        written = written_since(folder, since_ns)
        names = sorted(written, key=written.__getitem__, reverse=True)
        names = [name for name in names if name.endswith(".ckpt")][:MAX_NAMES]
        name, names = agreed([n for n in names if not _is_torn(folder / n)])
        if names:
            return chosen("Trainer.fit()", folder, name, names, second_training(folder))
    for folder in folders:
        second_training(folder)
    return chosen("Trainer.fit()", next(iter(folders), None), "", [], "")


def _behind_trained_batches(connector: Any) -> None:
    place = connector._loaded_checkpoint.get(PLACE, {})
    go_on_behind(connector.trainer, place, patches.say)


def _is_torn(path: Path) -> bool:
    try:
        return path.is_file() and bool(script_checkpoints.torn(path))
    except OSError:
        return True


# -- the place in the data -----------------------------------------------------------------------
@dataclass
class _Resumed:
    """Beginning of a loader's next order."""

    num: int
    """Batches that were trained."""
    order: dict[str, Any] = field(default_factory=dict)
    """`_Notes.kept` of the order in which they were."""
    passes: bool = False
    """The loader begins behind them."""
    is_same: bool = False
    """The same batches were drawn."""


@dataclass
class _Notes:
    """One loader's current order."""

    states: list[torch.Tensor] = field(default_factory=list)
    """States of the generators when it began."""
    drawn: deque[tuple[int, int]] = field(default_factory=lambda: deque([(0, 0)], AHEAD))
    """(number of batches, checksum of their indices)."""
    resumed: _Resumed | None = None

    def add(self, batch: Any) -> None:
        num, checksum = self.drawn[-1]
        self.drawn.append((num + 1, crc32(repr(batch).encode(), checksum)))

    def kept(self, num: int, states: bool) -> dict[str, Any]:
        """State for a checkpoint. The batch that ends may be counted or not."""
        drawn = {at: checksum for at, checksum in self.drawn if num - 1 <= at <= num}
        return {"states": self.states if states else [], "drawn": drawn}


class _Order:
    """A loader's sampler of indices, of which the order is noted."""

    def __init__(self, whole: Any, notes: _Notes) -> None:
        self.whole, self.notes = whole, notes

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Any]:
        resumed = self.notes.resumed
        if resumed is None:
            return self._noted([])
        now = self._states()
        whole = self._noted(resumed.order.get("states", []))
        trained = list(islice(whole, resumed.num))
        drawn = self._states() if resumed.order.get("states") else now
        self._set(now)  # torch draws a seed of the loader's processes next
        resumed.is_same = dict(self.notes.drawn).get(resumed.num, -1) == (
            resumed.order.get("drawn", {}).get(resumed.num)
        )
        return self._begun(whole if resumed.passes else chain(trained, whole), drawn)

    def _begun(self, rest: Iterator[Any], states: list[torch.Tensor]) -> Iterator[Any]:
        """Processes of a loader let it begin twice, and read the second one only. The generators
        go on behind this order: the next epoch must not repeat that of the first one."""
        self.notes.resumed = None
        self._set(states)
        yield from rest

    def _generators(self) -> list[torch.Generator]:
        samplers = (self.whole, getattr(self.whole, "sampler", None))
        own = dict.fromkeys(getattr(sampler, "generator", None) for sampler in samplers)
        return [torch.default_generator, *(generator for generator in own if generator is not None)]

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

    def _noted(self, states: list[torch.Tensor]) -> Iterator[Any]:
        self._set(states)
        self.notes.states = self._states()
        self.notes.drawn = _Notes().drawn
        for batch in self.whole:
            self.notes.add(batch)
            yield batch


def keep_place(connector: Any) -> None:
    """Has this class, Lightning's connector for checkpoints, write the place into each one."""
    inner = connector.dump_checkpoint
    if getattr(inner, "keeps_place", False):
        return

    @wraps(inner)
    def dump_checkpoint(self: Any, *args: Any, **more: Any) -> Any:
        checkpoint = inner(self, *args, **more)
        fit, world = self.trainer.fit_loop, self.trainer.world_size
        loader = getattr(fit, "_combined_loader", None)
        num = fit.epoch_loop.batch_progress.current.ready
        loaders = loader.flattened if loader is not None else []
        # The generators of several ranks differ.
        orders = [_notes(part).kept(num, states=world == 1) for part in loaders]
        checkpoint[PLACE] = {"world": world, "orders": orders}
        return checkpoint

    dump_checkpoint.keeps_place = True  # type: ignore[attr-defined]
    connector.dump_checkpoint = dump_checkpoint
    _note_orders()


def _notes(loader: Any) -> _Notes:
    if not isinstance(loader, DataLoader):
        return _Notes()
    notes: _Notes = vars(loader).setdefault("_holdfast_notes", _Notes())
    return notes


def _note_orders() -> None:
    """Has each DataLoader of torch note its order."""
    inner: Any = DataLoader._index_sampler
    if getattr(inner.fget, "notes_orders", False):
        return

    def _index_sampler(self: Any) -> Any:
        return _Order(inner.fget(self), _notes(self))

    _index_sampler.notes_orders = True  # type: ignore[attr-defined]
    DataLoader._index_sampler = property(_index_sampler)  # type: ignore[assignment]


def go_on_behind(trainer: Any, place: dict[str, Any], say: Callable[[str], None]) -> None:
    """Has the first epoch of this training, which goes on from a checkpoint with this place, begin
    behind the batches that were trained."""
    loop = trainer.fit_loop.epoch_loop
    inner = loop.on_run_start

    def on_run_start(fetcher: Any) -> None:
        del loop.on_run_start
        loaders = fetcher.combined_loader.flattened
        if not any(hasattr(loader, "load_state_dict") for loader in loaders):
            world = place.get("world", trainer.world_size)
            same_samples(trainer, world)
            num = loop.batch_progress.current.ready
            same_world = world == trainer.world_size
            orders = place.get("orders", []) if same_world else []
            is_same = skip(fetcher, num, orders=orders)
            if num:
                epoch = trainer.fit_loop.epoch_progress.current.processed
                text = f"Trainer.fit() skips the {num} batches of epoch {epoch} that were trained"
                if not same_world and 1 in (world, trainer.world_size):
                    if any(_is_shuffled(loader) for loader in loaders):
                        text += " in another order than theirs: a single rank draws its own"
                elif same_world and not is_same:
                    text = (
                        f"Trainer.fit() skips the first {num} batches of epoch {epoch}, which may "
                        "not be those that were trained: their order could not be repeated, so "
                        "samples of this epoch may repeat or be left out"
                    )
                say(text)
        inner(fetcher)

    loop.on_run_start = on_run_start


def _is_shuffled(loader: Any) -> bool:
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle
    return sampler is not None and not isinstance(sampler, SequentialSampler)


def same_samples(trainer: Any, world: int) -> None:
    """Sets the position in an epoch, which `world` ranks have reached. It is a number of batches of
    each rank: another number of ranks has read the same samples after another number of batches. It
    is rounded down, so less than a global batch (times the accumulation) is read again."""
    if world == trainer.world_size:
        return
    at_once = trainer.accumulate_grad_batches
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    read = current.completed * world // trainer.world_size // at_once * at_once
    current.ready = current.started = current.processed = current.completed = read


def skip(
    fetcher: Any,
    num: int,
    tick: Callable[[], None] = lambda: None,
    orders: Sequence[dict[str, Any]] = (),
) -> bool:
    """Lets Lightning's fetcher begin an epoch behind its first `num` batches; the loop counts
    these. A single DataLoader over a dataset with indices does not read them, others do. Returns
    whether these batches are known to follow `orders`."""
    _note_orders()
    fetcher.combined_loader.reset()  # its workers may have read ahead, in another order
    loaders = fetcher.combined_loader.flattened
    only = loaders[0] if len(loaders) == 1 else None
    passes = isinstance(only, DataLoader) and _reads_by_index(only)
    begins = []
    for at, loader in enumerate(loaders):
        order = orders[at] if at < len(orders) else {}
        begins.append(_Resumed(num, order if isinstance(order, dict) else {}, passes))
        _notes(loader).resumed = begins[-1]
    iter(fetcher)
    if passes:
        fetcher.done = fetcher.length is not None and num >= fetcher.length
    else:
        batches = getattr(fetcher, "iterator_wrapper", fetcher)  # of training_step(dataloader_iter)
        for _ in range(num):
            next(batches)
            tick()
        fetcher.fetched -= num  # the loop adds them
    return all(
        b.is_same and _has_indices(loader) for b, loader in zip(begins, loaders, strict=True)
    )


def _has_indices(loader: DataLoader[Any]) -> bool:
    return loader._dataset_kind == torch.utils.data._DatasetKind.Map


def _reads_by_index(loader: DataLoader[Any]) -> bool:
    kind = type(loader)
    plain = kind.__iter__ is DataLoader.__iter__
    plain = plain and kind._index_sampler is DataLoader._index_sampler
    return plain and _has_indices(loader) and loader.batch_sampler is not None
