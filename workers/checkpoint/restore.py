"""Restore: fill a model and an optimizer from shards, whatever mesh wrote them.

Owns: which shards to read, checking every byte that is used, and saying what does not fit. Must
not: communicate; every rank reads for itself.

With the shard count unchanged a rank needs exactly its own shard, and its tensors are filled by one
pass of copy and checksum. With another count it reads the entries that overlap its own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.orchestrator.errors import UserError

from .hashing import Bytes, copy_and_hash, hash_bytes
from .layout import DTYPE_BYTES, MODEL, OPTIMIZER, Box, DamagedCheckpoint, Entry, Header
from .shard_sources import ShardSource, UnreadableCheckpoint
from .stage import flat_bytes
from .state import DTYPES, Held, TrainingState

_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MAX_NAMED = 5
"""Names listed per kind of mismatch; more would hide the message."""


class OtherModel(UserError):
    """The checkpoint belongs to another model."""


@dataclass
class _Target:
    """One tensor to fill. Parts that several shards hold (replicated ones) are read once."""

    held: Held
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
) -> dict[str, Any]:
    """Fills everything in place; returns the extra state of the first shard read.

    `shard` of `num_shards` is this rank; `num_stored` shards were written, after `step`.
    Raises DamagedCheckpoint, OtherModel, or what `open_shard` raises.
    """
    model = {held.name: _Target(held) for held in state.model_tensors()}
    targets = dict(model)
    names: set[str] = set()
    extra: dict[str, Any] | None = None
    with torch.no_grad():
        for index in _order(shard, num_shards, num_stored):
            try:
                source = open_shard(index)
            except UnreadableCheckpoint:
                if names:  # another model is the likelier reason for wanting one more shard
                    _expect_names(model, names)
                raise
            header = source.header()
            _expect_identity(header, source.name, index, num_stored, step)
            header = replace(header, entries=state.entries_by_name(header.entries))
            _check_shapes(model, header, source.name)
            _add_optimizer_targets(state, targets, header)
            names.update(header.entries)
            extra = header.extra if extra is None else extra
            for entry in header.entries.values():
                target = targets.get(entry.name)
                if target is not None and not target.complete:
                    _fill(target, entry, source)
            if names >= model.keys() and all(t.complete for t in targets.values()):
                break
    _expect_names(model, names)
    for name, wanted in targets.items():
        if not wanted.complete:
            box = wanted.held.box
            what = f"{wanted.filled} of {box.num_elements} values found in all shards"
            raise DamagedCheckpoint("the checkpoint", what, name)
    return extra if extra is not None else {}


def _order(shard: int, num_shards: int, num_stored: int) -> Iterator[int]:
    """Those that overlap an even split first, which with an unchanged count is the own shard; then
    the others: splits are uneven where a dimension is not divisible, and axes may differ."""
    first = shard * num_stored // num_shards
    last = -(-(shard + 1) * num_stored // num_shards)
    yield from range(first, last)
    yield from (index for index in range(num_stored) if not first <= index < last)


def _add_optimizer_targets(
    state: TrainingState, targets: dict[str, _Target], header: Header
) -> None:
    for name, entry in header.entries.items():
        if name in targets or not name.startswith(OPTIMIZER):
            continue
        owner = state.optimizer_parameter(name)
        if owner is not None:
            held = state.make_optimizer_tensor(*owner, entry.box.global_shape, entry.dtype)
            targets[name] = _Target(held)


def _fill(target: _Target, entry: Entry, source: ShardSource) -> None:
    """Copies what this entry holds of the target, and checks all of the entry's bytes."""
    held, box = target.held, entry.box
    part = (box.offset, box.shape)
    ranges = box.overlap(held.box)
    if ranges is None or part in target.seen:
        return
    target.seen.add(part)
    data = source.data(entry.begin, entry.end)
    local = held.local
    if box == held.box and local.device.type == "cpu" and local.is_contiguous():
        checksum = copy_and_hash(flat_bytes(local), data)
        target.filled = box.num_elements
    else:
        checksum = hash_bytes(data)
        target.filled += _copy_part(held, box, ranges, data, DTYPE_BYTES[entry.dtype])
    if f"{checksum:016x}" != entry.checksum:
        what = f"checksum {checksum:016x}; expected {entry.checksum}"
        raise DamagedCheckpoint(source.name, what, entry.name)


def _copy_part(
    held: Held, box: Box, ranges: tuple[tuple[int, int], ...], data: Bytes, element_bytes: int
) -> int:
    """Copies the common part of two boxes; returns its number of elements."""
    stored = data.view(_INTEGERS[element_bytes]).reshape(box.shape)
    shape = tuple(end - begin for begin, end in ranges)
    part = np.empty(shape, stored.dtype)
    part[...] = stored[box.slices(ranges)]
    raw = torch.from_numpy(part.reshape(-1).view(np.uint8))
    typed: Tensor = raw.view(held.local.dtype).reshape(shape)
    held.local[held.box.slices(ranges)].copy_(typed)
    return typed.numel()


# -- what does not fit ------------------------------------------------------------------------
def _expect_identity(header: Header, file: str, shard: int, num_shards: int, step: int) -> None:
    got = (header.step, header.shard, header.num_shards)
    if got != (step, shard, num_shards):
        raise UnreadableCheckpoint(
            f"{file}: got step {got[0]}, shard {got[1]} of {got[2]}; expected step {step}, shard "
            f"{shard} of {num_shards}"
        )


def _check_shapes(model: dict[str, _Target], header: Header, file: str) -> None:
    wrong = []
    for name, entry in header.entries.items():
        target = model.get(name)
        if target is None:
            continue
        want = (target.held.box.global_shape, DTYPES[target.held.local.dtype])
        got = (entry.box.global_shape, entry.dtype)
        if got != want:
            wrong.append(f"{_short(name)}: got {_show(got)}; expected {_show(want)}")
    if wrong:
        raise OtherModel(_message(file, {"of another shape": wrong}))


def _expect_names(model: dict[str, _Target], names: set[str]) -> None:
    missing = [_short(name) for name in model if name not in names]
    unexpected = [_short(name) for name in names if name.startswith(MODEL) and name not in model]
    if missing or unexpected:
        problems = {"missing from it": missing, "not in the model": sorted(unexpected)}
        raise OtherModel(_message("the checkpoint", problems))


def _message(what: str, problems: dict[str, list[str]]) -> str:
    lines = [f"{what}: a checkpoint of another model"]
    for kind, found in problems.items():
        if found:
            more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
            lines.append(f"  {kind} ({len(found)}): {', '.join(found[:_MAX_NAMED])}{more}")
    lines.append("  use the model's settings that it was written with, or another checkpoint path")
    return "\n".join(lines)


def _short(name: str) -> str:
    return name.removeprefix(MODEL)


def _show(kind: tuple[tuple[int, ...], str]) -> str:
    return f"{kind[1]}{list(kind[0])}"
