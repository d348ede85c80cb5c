"""A job's controller as one value: what a journal keeps instead of all the events before it.

Owns: its form and version. Must not: leave anything out that a replay would have known.

It holds the controller's state and the story's memory. It does not hold the monitor's: what that
knows comes from heartbeats, which no journal has, and the first event after every opening of a
journal is ControllerStarted, with which the monitor forgets all of it and begins anew from the
state. So a snapshot with the records after it gives exactly what a replay of every event gives;
tests/unit/runtime/test_snapshot.py holds it to that.

A snapshot begins with a line that names its version; what follows is msgpack, compressed. All
nodes of a launch share one membership, whose size grows with the job: it is written once.
"""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

import msgspec

from ..api.v1alpha1 import TrainingJob, job_from_mapping, job_to_mapping
from ..core.actions import AnyAction, LaunchGroup, Reason
from ..core.journal import JournalError
from ..core.state import JobState, PendingNode
from ..errors import Damaged
from ..protocol.facts import Membership, WorkerSeat
from .observe.projection import ProjectionState

VERSION = 1
MAGIC = b"holdfast snapshot "
COMPRESSION = 3
"""zlib: inventories and launches repeat themselves, and a recovery must not wait for the rest."""


class SnapshotUnreadable(JournalError):
    """A journal begins with something that this Holdfast cannot go on from."""


class SnapshotDamaged(SnapshotUnreadable, Damaged):
    """Nor could any other."""


class _Launch(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="launch"):
    """A LaunchGroup, its membership by number."""

    action_id: int
    generation: int
    reason: Reason
    node: str
    node_rank: int
    seats: tuple[WorkerSeat, ...]
    buddy: str
    persist_every_steps: int
    membership: int


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    memberships: list[Membership]
    membership: int | None
    """The current one, by number."""
    launch: list[_Launch]
    inflight: list[AnyAction | _Launch]
    state: JobState
    """Without what is above."""
    memory: ProjectionState


def _document(value: Any) -> Any:
    if isinstance(value, TrainingJob):
        return job_to_mapping(value)
    raise NotImplementedError(f"a snapshot cannot hold a {type(value).__name__}")


def _value(kind: type, document: Any) -> Any:
    if kind is TrainingJob:
        return job_from_mapping(document, "the journal")
    raise NotImplementedError(f"a snapshot cannot hold a {kind.__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_document)
_DECODER = msgspec.msgpack.Decoder(_Snapshot, dec_hook=_value)


class _Place(msgspec.Struct, frozen=True):
    checkpoint_path: str = ""


class _Where(msgspec.Struct, frozen=True):
    """So much of a _Snapshot."""

    state: _Place


class _OldPending(msgspec.Struct, frozen=True):
    """Pending nodes as snapshots had them before JobState.pending_nodes existed: name -> since
    when; `?` begins the key of a node without a name; `found` by a new controller."""

    coming: dict[str, int] = {}
    found: dict[str, None] = {}


class _OldSnapshot(msgspec.Struct, frozen=True):
    state: _OldPending


_WHERE = msgspec.msgpack.Decoder(_Where)
_OLD = msgspec.msgpack.Decoder(_OldSnapshot)
T = TypeVar("T")


def encode(state: JobState, memory: ProjectionState) -> bytes:
    """The snapshot of a job that has been submitted."""
    table = _Memberships()
    body = _ENCODER.encode(
        _Snapshot(
            membership=table.number(state.membership) if state.membership else None,
            launch=[table.shorten(action) for action in state.launch_actions.values()],
            inflight=[
                table.shorten(action) if isinstance(action, LaunchGroup) else action
                for action in state.inflight.values()
            ],
            memberships=table.all,
            state=msgspec.structs.replace(state, membership=None, launch_actions={}, inflight={}),
            memory=memory,
        )
    )
    return MAGIC + f"{VERSION}\n".encode() + zlib.compress(body, COMPRESSION)


def decode(data: bytes) -> tuple[JobState, ProjectionState]:
    """The job again. Raises SnapshotUnreadable, saying why."""
    found = _read(data, _DECODER)
    state = found.state
    old = _read(data, _OLD).state
    state.pending_nodes += [
        PendingNode(None if name.startswith("?") else name, since_ns, name in old.found)
        for name, since_ns in old.coming.items()
    ]
    if found.membership is not None:
        state.membership = found.memberships[found.membership]
    state.launch_actions = {one.node: _lengthen(one, found.memberships) for one in found.launch}
    state.inflight = {
        one.action_id: _lengthen(one, found.memberships) if isinstance(one, _Launch) else one
        for one in found.inflight
    }
    return state, found.memory


def checkpoint_path(data: bytes) -> str:
    """Only that of it: it is wanted before the rest is. Raises as `decode`."""
    return _read(data, _WHERE).state.checkpoint_path


def _read(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    first, newline, body = data[:64].partition(b"\n")
    body = data[len(first) + 1 :]
    if not first.startswith(MAGIC) or not newline:
        raise SnapshotDamaged("the journal's snapshot is damaged: it does not begin like one")
    version = first.removeprefix(MAGIC).decode("ascii", "replace")
    if version != str(VERSION):
        raise SnapshotUnreadable(
            f"the journal's snapshot: got version {version}; expected {VERSION}; use the Holdfast "
            f"that wrote it. Nothing was changed; training is not affected"
        )
    try:
        return decoder.decode(zlib.decompress(body))
    except msgspec.ValidationError as error:
        raise SnapshotUnreadable(
            f"the journal's snapshot is damaged, or of another version: {error}; use the Holdfast "
            f"that wrote it"
        ) from None
    except (zlib.error, msgspec.DecodeError) as error:
        raise SnapshotDamaged(f"the journal's snapshot is damaged: {error}") from None


class _Memberships:
    """Numbers them in the order in which they are met."""

    def __init__(self) -> None:
        self.all: list[Membership] = []
        self._numbers: dict[int, int] = {}

    def number(self, membership: Membership) -> int:
        # By identity, which is quick; two equal ones that are not the same cost only their bytes.
        if id(membership) not in self._numbers:
            self._numbers[id(membership)] = len(self.all)
            self.all.append(membership)
        return self._numbers[id(membership)]

    def shorten(self, action: LaunchGroup) -> _Launch:
        fields = msgspec.structs.asdict(action)
        return _Launch(**{**fields, "membership": self.number(action.membership)})


def _lengthen(launch: _Launch, memberships: list[Membership]) -> LaunchGroup:
    fields = msgspec.structs.asdict(launch)
    return LaunchGroup(**{**fields, "membership": memberships[launch.membership]})
