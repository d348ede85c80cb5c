"""State that differs from rank to rank: data loaders, random generators.

All copies of a shard are equal, and the controller keeps any one of them. So each rank that stages
a shard stages the state of all ranks that hold it ("twins"): they exchange it before. Each rank's
is one entry of the file, `rank.<rank>`: 8 bytes little-endian length, what rank_values.py encodes,
and room to grow. In another world size each object does what it is declared to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.mesh import AXES, Mesh

from . import rank_values
from .layout import RANK, Box, DamagedCheckpoint, Header, hash_bytes
from .shard_sources import ShardSource
from .tensors import StateTensor

OnResize = Literal["refuse", "restart", "same-rank"]

MAX_FILE_BYTES = 256 * 2**20
"""Limit of all ranks whose state is in one file: each of them sends and stages it with every
staging."""

_LENGTH_BYTES = 8
_ROOM_UNIT = 1024
EXTRA_KEY = "per_rank"
_AS_MADE = "it begins as the script made it"


@dataclass(frozen=True)
class PerRank:
    """An object whose state differs from rank to rank, for `restore(..., per_rank=...)`.

    `on_resize` says what happens to it when the number of ranks has changed. `refuse`: restore
    raises UserError. `restart`: it stays as the script made it. `same-rank`: each rank takes the
    state of the rank with its number, and ranks without one stay as the script made them; state of
    ranks that are no more is dropped. What is not kept is printed. `room_bytes` is the largest
    size that its state may grow to; by default twice the size when it is first staged.
    """

    held: Any
    on_resize: OnResize = "refuse"
    room_bytes: int = 0


class Twins(Protocol):
    """The ranks that hold one shard."""

    ranks: tuple[int, ...]

    def largest(self, number: int) -> int:
        """The largest of their numbers. Collective."""

    def exchange(self, mine: Tensor, into: Tensor) -> None:
        """Fills the rows of `into` with what each gives, in order of ranks. Collective."""


class RankState:
    """The objects of this rank, and the bytes of all its twins."""

    def __init__(self, given: Mapping[str, Any], rank: int, mesh: Mesh) -> None:
        """Raises UserError for an object of an unknown kind, and for wrong settings."""
        self._objects = {
            str(name): entry if isinstance(entry, PerRank) else PerRank(entry)
            for name, entry in given.items()
        }
        self._access = {
            name: rank_values.access(name, entry.held) for name, entry in self._objects.items()
        }
        for name, user_object in self._objects.items():
            if user_object.on_resize not in ("refuse", "restart", "same-rank"):
                field = f"per_rank[{name!r}].on_resize"
                wanted = "refuse, restart or same-rank"
                raise UserError.of(field, repr(user_object.on_resize), wanted)
        self._rank, self._mesh = rank, mesh
        self._twins: Twins | None = None
        self._ranks = tuple(sorted((rank, *mesh.twins(rank))))
        self._slots: Tensor | None = None
        """One row for each twin."""
        self._collected = -1
        self._found: dict[int, bytes] = {}

    def join(self, twins: Twins | None) -> None:
        """Exchange with these ranks; None: no other rank has this shard."""
        self._twins = twins

    # -- staging ----------------------------------------------------------------------------------
    @property
    def has_room(self) -> bool:
        """True if the size of `tensors` is known."""
        return self._slots is not None

    def describe(self) -> dict[str, Any]:
        """Description for the header of each file."""
        sizes = dict(zip(AXES, self._mesh.sizes, strict=True))
        return {"mesh": sizes, "names": list(self._objects)}

    def tensors(self) -> list[StateTensor]:
        """The rows of all twins: uint8 in main memory. Valid after `collect`."""
        if self._slots is None:
            return []
        (size,) = self._slots.shape[1:]
        box = Box((size,), (0,), (size,), 1)
        rows = zip(self._ranks, self._slots.unbind(0), strict=True)
        return [StateTensor(f"{RANK}{rank}", row, box) for rank, row in rows]

    def collect(self, step: int) -> None:
        """Reads the objects as they are after `step`, and exchanges that with the twins. Once for
        each step, on all twins. Raises UserError if the state is larger than its room."""
        if step == self._collected:
            return
        state = {name: access.read() for name, access in self._access.items()}
        data = rank_values.encode(state)
        if self._slots is None:
            self._make_room(len(data))
        slots = self._slots
        assert slots is not None
        room = slots.shape[1] - _LENGTH_BYTES
        mine = torch.zeros(slots.shape[1], dtype=torch.uint8)
        held = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
        mine[: len(held)] = torch.frombuffer(bytearray(held), dtype=torch.uint8)
        if self._twins is None:
            slots[0].copy_(mine)
        else:
            self._twins.exchange(mine, slots)
        self._collected = step
        for rank, slot in zip(self._ranks, slots, strict=True):
            length = _length(slot[:_LENGTH_BYTES].numpy().tobytes())
            if length > room:  # all twins see it, so none waits for another
                raise self._outgrown(rank, length, room, state)

    def _outgrown(self, rank: int, length: int, room: int, state: dict[str, Any]) -> UserError:
        sizes = {name: len(rank_values.encode({name: value})) for name, value in state.items()}
        name = max(sizes, key=lambda one: sizes[one])
        return UserError(
            f"per_rank: the state of rank {rank} grew to {length} bytes; expected at most {room}, "
            "as buffers keep their size; give the objects their full size before the first step, "
            f"or say how large they get: per_rank={{{name!r}: session.PerRank({name}, "
            f"room_bytes={length})}}"
        )

    def _make_room(self, length: int) -> None:
        """Make room for states; this rank's has `length` bytes. Collective."""
        declared = sum(entry.room_bytes for entry in self._objects.values())
        wanted = max(2 * length + _ROOM_UNIT, declared)
        if self._twins is not None:
            wanted = self._twins.largest(wanted)
        size = -(-wanted // _ROOM_UNIT) * _ROOM_UNIT
        total = size * len(self._ranks)
        if total > MAX_FILE_BYTES:
            names = ", ".join(self._objects)
            raise UserError(
                f"per_rank: got {total} bytes of {names} for the {len(self._ranks)} ranks that "
                f"hold one shard ({size} each, with room to grow); expected at most "
                f"{MAX_FILE_BYTES}, "
                "because each of them stages the state of all; keep less state, or raise "
                "spec.parallelism.shard, so that fewer ranks hold the same shard"
            )
        self._slots = torch.zeros(len(self._ranks), size, dtype=torch.uint8)

    # -- restoring --------------------------------------------------------------------------------
    def take(self, header: Header, source: ShardSource, tick: Callable[[], None]) -> None:
        """Reads the state of the rank with this number, if this file has it. Raises
        DamagedCheckpoint."""
        entry = header.entries.get(f"{RANK}{self._rank}")
        if entry is None or self._rank in self._found:
            return
        for _, data in source.entries([entry], tick):
            checksum = f"{hash_bytes(data):016x}"
            if checksum != entry.checksum:
                what = f"checksum {checksum}; expected {entry.checksum}"
                raise DamagedCheckpoint(source.name, what, entry.name)
            held = data.tobytes()
            length = _length(held[:_LENGTH_BYTES])
            self._found[self._rank] = held[_LENGTH_BYTES : _LENGTH_BYTES + length]

    def shard_to_open(self, extra: Mapping[str, Any]) -> int | None:
        """The shard that has this rank's state, unless it was taken or no object wants it."""
        stored = _stored_mesh(extra)
        if stored is None or self._rank in self._found or self._rank >= stored.world_size:
            return None
        resized = stored.world_size != self._mesh.world_size
        if resized and all(entry.on_resize != "same-rank" for entry in self._objects.values()):
            return None
        return stored.shard_index(self._rank)

    def load(self, extra: Mapping[str, Any]) -> None:
        """Fills the objects from what was taken, and prints what is not kept. Collective among the
        twins. Raises UserError for an object that refuses another world size."""
        stored = _stored_mesh(extra)
        if stored is None:
            names = ", ".join(map(repr, self._objects))
            self._say(f"the checkpoint has no state of {names}; {_AS_MADE}")
            return
        data = self._found.pop(self._rank, b"")
        states = rank_values.decode(data) if data else {}
        if stored.world_size != self._mesh.world_size:
            self._load_resized(states, stored.world_size)
            return
        if not data:
            what = "no shard has it, and each rank wrote its own"
            raise DamagedCheckpoint("the checkpoint", what, f"{RANK}{self._rank}")
        self._load_same(states)
        self._make_room(len(data))

    def _load_same(self, states: Mapping[str, Any]) -> None:
        for name, access in self._access.items():
            if name in states:
                access.write(states[name])
            else:
                self._say(f"the checkpoint has no state of {name!r}; {_AS_MADE}")
        for name in states:
            if name not in self._access:
                self._say(f"the checkpoint has state of {name!r}, which the script does not give")

    def _load_resized(self, states: Mapping[str, Any], before: int) -> None:
        now = self._mesh.world_size
        for name, entry in self._objects.items():
            if entry.on_resize == "refuse":
                raise UserError(
                    f"per_rank[{name!r}]: got state of {before} ranks for {now}; expected the same "
                    "number, as nothing says how to divide it among others; set `elasticity: "
                    "fixed` below `spec:` in the job's YAML, or say what may be lost: "
                    f"session.PerRank({name}, on_resize='restart') or 'same-rank'"
                )
        for name, entry in self._objects.items():
            if entry.on_resize == "restart":
                what = _AS_MADE
            else:
                if name in states:
                    self._access[name].write(states[name])
                what = (
                    f"the state of ranks {now} to {before - 1} is dropped"
                    if now < before
                    else f"on ranks {before} to {now - 1} {_AS_MADE}"
                )
            self._say(f"{before} ranks wrote the state of {name!r}, and {now} run now: {what}")

    def _say(self, what: str) -> None:
        if self._rank == 0:
            print(f"holdfast: per_rank: {what}", file=sys.stderr)


def _length(start: bytes) -> int:
    return int.from_bytes(start, "little")


def _stored_mesh(extra: Mapping[str, Any]) -> Mesh | None:
    stored = extra.get(EXTRA_KEY)
    return None if stored is None else Mesh(**stored["mesh"])
