"""The place of Lightning's Trainer in its data: a checkpoint within an epoch has the number of
batches that were trained, and Lightning reads the epoch from its first batch nevertheless.

So a restarted training skips these batches in the order of that epoch. A loader that keeps its own
state goes on by itself. Lightning is not imported here, because it has two names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

PLACE = "holdfast"
"""Key in Lightning's checkpoints: the number of ranks, and where each loader's order began."""


class _Rest:
    """A batch sampler without its first `num` batches."""

    def __init__(self, whole: Any, num: int) -> None:
        self.whole, self.num = whole, num

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.whole), self.num, None)

    def __len__(self) -> int:
        return len(self.whole)


def keep_place(connector: Any) -> None:
    """Has this class, Lightning's connector for checkpoints, write the place into each one."""
    inner = connector.dump_checkpoint
    if getattr(inner, "keeps_place", False):
        return

    @wraps(inner)
    def dump_checkpoint(self: Any, *args: Any, **more: Any) -> Any:
        found = inner(self, *args, **more)
        loader = getattr(self.trainer.fit_loop, "_combined_loader", None)
        orders: list[torch.Tensor | None] = []
        if self.trainer.world_size == 1 and loader is not None:  # of several, ranks differ
            samplers = [getattr(one, "sampler", None) for one in loader.flattened]
            orders = [getattr(one, "order", None) for one in samplers]
        found[PLACE] = {"world": self.trainer.world_size, "orders": orders}
        return found

    dump_checkpoint.keeps_place = True  # type: ignore[attr-defined]
    connector.dump_checkpoint = dump_checkpoint
    _note_orders()


def _note_orders() -> None:
    """Has torch's RandomSampler note the state of the generator before each order, and begin with
    `next_order` if it has one. Without a generator it draws the seed of one, as torch does."""
    inner: Any = RandomSampler.__iter__
    if getattr(inner, "notes_orders", False):
        return

    @wraps(inner)
    def iterate(self: Any) -> Iterator[int]:
        seeded = copy.copy(self)
        if self.generator is None:
            seeded.generator = torch.Generator()
            seeded.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        if (order := vars(self).pop("next_order", None)) is not None:
            seeded.generator.set_state(order)
        self.order = seeded.generator.get_state()
        yield from inner(seeded)

    iterate.notes_orders = True  # type: ignore[attr-defined]
    RandomSampler.__iter__ = iterate  # type: ignore[method-assign]


def go_on_behind(trainer: Any, place: dict[str, Any], say: Callable[[str], None]) -> None:
    """Has the first epoch of this training, which goes on from a checkpoint with this place, begin
    behind the batches that were trained."""
    loop = trainer.fit_loop.epoch_loop
    inner = loop.on_run_start

    def on_run_start(fetcher: Any) -> None:
        del loop.on_run_start
        loaders = fetcher.combined_loader.flattened
        if not any(hasattr(one, "load_state_dict") for one in loaders):
            world, orders = place.get("world", trainer.world_size), place.get("orders", ())
            same_samples(trainer, world)
            num = loop.batch_progress.current.ready
            if num:
                epoch = trainer.fit_loop.epoch_progress.current.processed
                text = f"Trainer.fit() skips the {num} batches of epoch {epoch} that were trained"
                samplers: list[Any] = [getattr(one, "sampler", None) for one in loaders]
                drawn = [*orders, *(one for one in samplers if isinstance(one, RandomSampler))]
                if world != trainer.world_size and any(one is not None for one in drawn):
                    text += " in another order than theirs: a single rank draws its own"
                for sampler, order in zip(samplers, orders, strict=False):
                    if order is not None:
                        sampler.next_order = order
                say(text)
            skip(fetcher, num)
        inner(fetcher)

    loop.on_run_start = on_run_start


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


def skip(fetcher: Any, num: int, tick: Callable[[], None] = lambda: None) -> None:
    """Lets Lightning's fetcher begin an epoch behind its first `num` batches; the loop counts
    these. A single DataLoader over a dataset with indices does not read them, others do."""
    fetcher.combined_loader.reset()  # its workers may have read ahead, in another order
    loaders = fetcher.combined_loader.flattened
    only = loaders[0] if len(loaders) == 1 else None
    if isinstance(only, DataLoader) and _reads_by_index(only):
        rest = _Rest(only.batch_sampler, num)
        vars(only)["batch_sampler"] = rest  # DataLoader forbids to set it
        try:
            iter(fetcher)
        finally:
            vars(only)["batch_sampler"] = rest.whole
        rest.num = 0  # persistent workers keep it
        fetcher.done = fetcher.length is not None and num >= fetcher.length
        return
    iter(fetcher)
    batches = getattr(fetcher, "iterator_wrapper", fetcher)  # of training_step(dataloader_iter)
    for _ in range(num):
        next(batches)
        tick()
    fetcher.fetched -= num  # the loop adds them


def _reads_by_index(loader: DataLoader[Any]) -> bool:
    plain = type(loader).__iter__ is DataLoader.__iter__
    by_index = loader._dataset_kind == torch.utils.data._DatasetKind.Map
    return plain and by_index and loader.batch_sampler is not None
