"""Restore: fills a model and an optimizer from shards of any mesh, and checks every byte it uses.

Every rank reads by itself, without communication. With an unchanged shard count a rank needs only
its own shard, and one pass copies and hashes; otherwise it reads the entries that overlap its
parts. The shards of a pipeline have the tensors of their stage only: a rank reads shards until it
has found all of its own names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.orchestrator.errors import UserError, few

from .layout import (
    DTYPE_BYTES,
    INTEGER_DTYPES,
    MODEL,
    OPTIMIZER,
    Box,
    Bytes,
    DamagedCheckpoint,
    Entry,
    Header,
    copy_and_hash,
    hash_bytes,
)
from .optimizer_state import WrongOptimizer
from .shard_order import ShardOrder
from .shard_sources import ShardSource, UnreadableCheckpoint, expect_identity
from .stage import flat_bytes
from .state import TrainingState, combined_extra
from .tensors import StateTensor, storage_type
from .upload import Uploader

_MAX_NAMED = 5
"""Names listed for each kind of mismatch."""


class WrongModel(UserError):
    """The checkpoint was written by another model."""


@dataclass
class _Target:
    """One tensor to fill. Parts that several shards have (replicated ones) are read once."""

    held: StateTensor
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    filled: int = 0

    @property
    def complete(self) -> bool:
        return self.filled >= self.held.box.num_elements


def restore(
    state: TrainingState,
    open_shard: Callable[[int], ShardSource],
    *,
    shard: int,
    num_shards: int,
    num_stored: int,
    step: int,
    stages: int = 1,
    stored_stages: int = 1,
    tick: Callable[[], None] = lambda: None,
    upload: Uploader | None = None,
) -> dict[str, Any]:
    """Fills everything in place; returns the extra state of the shards read.

    `shard` of `num_shards` is this rank; `num_stored` shards were written, after `step`. The model
    is in `stages` stages of a pipeline, and was in `stored_stages`. `tick` is called as it makes
    progress. `upload` fills the tensors of its device.
    Raises DamagedCheckpoint, WrongModel, or what `open_shard` raises.
    """
    model = {held.name: _Target(held) for held in state.model_tensors()}
    targets = dict(model)
    names = _Names(state, model.keys(), stored_stages)
    extra: dict[str, Any] = {}
    order = ShardOrder(shard, num_shards, num_stored, stages, stored_stages)
    with torch.no_grad():
        for index in order:
            try:
                source = open_shard(index)
            except UnreadableCheckpoint:
                # Another model is the more likely reason that one more shard is needed.
                names.expect_as_far_as_known()
                raise
            header = expect_identity(source, step, index, num_stored)
            tick()
            _check_shapes(model, header, source.name)
            names.add(header.entries, index * stored_stages // num_stored)
            try:
                state.expect_optimizers(header.extra)
            except WrongOptimizer:
                names.expect_as_far_as_known()  # another model: say that first
                raise
            _add_optimizer_targets(state, targets, header)
            extra = combined_extra(extra, header.extra, header.entries)
            if state.rank_state is not None:
                state.rank_state.take(header, source, tick)
            for entry, data in source.entries(_needed(targets, header), tick):
                _fill(targets[entry.name], entry, data, source.name, upload)
            if names.found >= model.keys() and all(t.complete for t in targets.values()):
                break
            order.missing(index, _incomplete(targets, header))
        if upload is not None:
            upload.finish()
    if state.rank_state is not None and (own := state.rank_state.shard_to_open(extra)) is not None:
        source = open_shard(own)
        state.rank_state.take(expect_identity(source, step, own, num_stored), source, tick)
    names.expect()
    _expect_optimizer_state(state, targets, names.found, extra)
    for name, wanted in targets.items():
        if not wanted.complete:
            box = wanted.held.box
            what = f"{wanted.filled} of {box.num_elements} values found in all shards"
            raise DamagedCheckpoint("the checkpoint", what, name)
    return extra


def _add_optimizer_targets(
    state: TrainingState, targets: dict[str, _Target], header: Header
) -> None:
    for name, entry in header.entries.items():
        if name in targets or not name.startswith(OPTIMIZER):
            continue
        held = state.make_optimizer_tensor(name, entry.box.global_shape, entry.dtype)
        if held is not None:
            targets[name] = _Target(held)


def _needed(targets: dict[str, _Target], header: Header) -> list[Entry]:
    """The entries with values that are not filled yet."""
    entries = []
    for entry in header.entries.values():
        target, part = targets.get(entry.name), (entry.box.offset, entry.box.shape)
        if target is None or target.complete or part in target.seen:
            continue
        if entry.box.overlap(target.held.box) is not None:
            target.seen.add(part)
            entries.append(entry)
    return entries


def _incomplete(targets: dict[str, _Target], header: Header) -> Iterator[tuple[Box, Box]]:
    for name, target in targets.items():
        entry = header.entries.get(name)
        if entry is not None and not target.complete:
            yield entry.box, target.held.box


def _fill(target: _Target, entry: Entry, data: Bytes, file: str, upload: Uploader | None) -> None:
    """Copies the entry's part of the target, and checks all bytes of the entry."""
    held, box = target.held, entry.box
    ranges = box.overlap(held.box)
    assert ranges is not None
    local = held.local
    whole = box == held.box and local.is_contiguous()
    if upload is not None and not upload.holds(local):
        upload = None
    if whole and upload is not None:
        checksum = upload.copy_and_hash(local, data)
        target.filled = box.num_elements
    elif whole and local.device.type == "cpu":
        checksum = copy_and_hash(flat_bytes(local), data)
        target.filled = box.num_elements
    else:
        checksum = hash_bytes(data)
        target.filled += _copy_part(held, box, ranges, data, DTYPE_BYTES[entry.dtype], upload)
    if f"{checksum:016x}" != entry.checksum:
        what = f"checksum {checksum:016x}; expected {entry.checksum}"
        raise DamagedCheckpoint(file, what, entry.name)


def _copy_part(
    held: StateTensor,
    box: Box,
    ranges: tuple[tuple[int, int], ...],
    data: Bytes,
    element_bytes: int,
    upload: Uploader | None,
) -> int:
    """Copies the common part of two boxes; returns its number of elements."""
    stored = data.view(INTEGER_DTYPES[element_bytes]).reshape(box.shape)
    shape = tuple(end - begin for begin, end in ranges)
    if upload is not None:
        upload.copy_part(held.local[held.box.slices(ranges)], stored[box.slices(ranges)])
        return math.prod(shape)
    part = np.empty(shape, stored.dtype)
    part[...] = stored[box.slices(ranges)]
    raw = torch.from_numpy(part.reshape(-1).view(np.uint8))
    typed: Tensor = raw.view(held.local.dtype).reshape(shape)
    held.local[held.box.slices(ranges)].copy_(typed)
    return typed.numel()


# -- mismatches -------------------------------------------------------------------------------
def _check_shapes(model: dict[str, _Target], header: Header, file: str) -> None:
    wrong = []
    for name, entry in header.entries.items():
        target = model.get(name)
        if target is None:
            continue
        want = (target.held.box.global_shape, storage_type(name, target.held.local.dtype))
        got = (entry.box.global_shape, entry.dtype)
        if got != want:
            wrong.append(f"{_short(name)}: got {_show(got)}; expected {_show(want)}")
    if wrong:
        raise WrongModel(_message(file, {"of another shape or dtype": wrong}))


class _Names:
    """The names of the tensors in the shards read so far, against the model's."""

    def __init__(self, state: TrainingState, model: Collection[str], stored_stages: int) -> None:
        self._state, self._model, self._stored_stages = state, model, stored_stages
        self.found: set[str] = set()
        self._stages: set[int] = set()

    def add(self, names: Collection[str], stage: int) -> None:
        self.found.update(names)
        self._stages.add(stage)

    def expect_as_far_as_known(self) -> None:
        """The same as `expect`, once a shard of each stage has been read: together they have all
        names."""
        if len(self._stages) == self._stored_stages:
            self.expect()

    def expect(self) -> None:
        """Raises WrongModel unless the checkpoint has the names of the model, and no others but
        those of other stages."""
        missing = [_short(name) for name in self._model if name not in self.found]
        unexpected = [
            _short(name)
            for name in self.found
            if name.startswith(MODEL)
            and name not in self._model
            and not self._state.of_other_stage(name)
        ]
        if missing or unexpected:
            problems = {"missing from it": missing, "not in the model": sorted(unexpected)}
            raise WrongModel(_message("the checkpoint", problems))


def _expect_optimizer_state(
    state: TrainingState, targets: dict[str, _Target], names: set[str], extra: dict[str, Any]
) -> None:
    missing = state.missing_optimizer_state(extra, names)
    unexpected = sorted(
        name
        for name in names
        if name.startswith(OPTIMIZER) and name not in targets and not state.of_other_stage(name)
    )
    if missing or unexpected:
        problems = {
            "state of an optimizer, missing from it": missing,
            "state of an optimizer, of parameters that it does not have": unexpected,
        }
        raise WrongModel(_message("the checkpoint", problems))


def _message(what: str, problems: dict[str, list[str]]) -> str:
    lines = [f"{what}: a checkpoint of another model or optimizer"]
    for kind, names in problems.items():
        if names:
            lines.append(f"  {kind} ({len(names)}): {few(names, _MAX_NAMED)}")
    lines.append("  use the model settings of the run that wrote it, or another checkpoint path")
    return "\n".join(lines)


def _short(name: str) -> str:
    return name.removeprefix(MODEL)


def _show(kind: tuple[tuple[int, ...], str]) -> str:
    return f"{kind[1]}{list(kind[0])}"
