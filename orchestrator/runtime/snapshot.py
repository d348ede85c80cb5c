"""Snapshots: the controller's state and the projection's as one value, which replaces all records
before it in a journal.

A snapshot with the records after it gives exactly what a replay of all records gives. The monitor
is not in it: the monitor learns from heartbeats, which no journal holds, and starts again from the
state with ControllerStarted, the first event of every controller.

Format: a line with the version, then compressed msgpack. All nodes of a launch share one
membership, whose size grows with the job, so it is written once.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
from msgspec.structs import replace

from ..api.v1alpha1 import TrainingJob, job_from_mapping, job_to_mapping
from ..core.actions import AnyAction, Inflight, LaunchGroup, Reason
from ..core.journal import JournalError
from ..core.roster import NodeRecord, PendingNode, Promises, Roster
from ..core.state import JobState
from ..errors import Damaged
from ..protocol.facts import Membership, WorkerSeat
from .observe.projection import ProjectionState

VERSION = 2
MAGIC = b"holdfast snapshot "
COMPRESSION = 3
"""zlib level: inventories and launches are repetitive, and a recovery waits for the compression."""


class SnapshotUnreadable(JournalError):
    """A snapshot that this version of Holdfast cannot read."""


class SnapshotDamaged(SnapshotUnreadable, Damaged):
    """A snapshot that no version can read."""


class _Launch(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="launch"):
    """A LaunchGroup with the number of its membership."""

    action_id: int
    generation: int
    reason: Reason
    node: str
    node_rank: int
    seats: tuple[WorkerSeat, ...]
    buddy: str
    persist_every_steps: int
    membership: int
    own_shards: bool = False
    stage_every_steps: int = 0
    code: str = ""
    nodes_on_machine: int = 1


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    memberships: list[Membership]
    membership: int | None
    """Number of the current one."""
    launch: list[_Launch]
    inflight: list[AnyAction | _Launch]
    state: JobState
    """The state without memberships and launches."""
    memory: ProjectionState


def _document(value: Any) -> Any:
    if isinstance(value, TrainingJob):
        return job_to_mapping(value)
    if isinstance(value, Promises):
        return list(value)
    raise NotImplementedError(f"a snapshot cannot hold a {type(value).__name__}")


def _value(kind: type, document: Any) -> Any:
    if kind is TrainingJob:
        return job_from_mapping(document, "the journal")
    if kind is Promises:
        return Promises(msgspec.convert(document, list[PendingNode]))
    if kind is Roster:
        return Roster(msgspec.convert(document, dict[str, NodeRecord]))
    if kind is Inflight:
        return Inflight()
    raise NotImplementedError(f"a snapshot cannot hold a {kind.__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_document)
_DECODER = msgspec.msgpack.Decoder(_Snapshot, dec_hook=_value)


def encode(state: JobState, memory: ProjectionState) -> bytes:
    """The snapshot of a job that has been submitted."""
    table = _Memberships()
    group = replace(state.group, membership=None, launches={})
    body = _ENCODER.encode(
        _Snapshot(
            membership=table.number(state.group.membership) if state.group.membership else None,
            launch=[table.compact(action) for action in state.group.launches.values()],
            inflight=[
                table.compact(action) if isinstance(action, LaunchGroup) else action
                for action in state.inflight.values()
            ],
            memberships=table.all,
            state=replace(state, group=group, inflight=Inflight()),
            memory=memory,
        )
    )
    return MAGIC + f"{VERSION}\n".encode() + zlib.compress(body, COMPRESSION)


def decode(data: bytes) -> tuple[JobState, ProjectionState]:
    """The states in a snapshot. Raises SnapshotUnreadable."""
    saved = _read(data)
    state = saved.state
    if saved.membership is not None:
        state.group.membership = saved.memberships[saved.membership]
    state.group.launches = {act.node: _expand(act, saved.memberships) for act in saved.launch}
    for m in saved.inflight:
        launch = _expand(m, saved.memberships) if isinstance(m, _Launch) else m
        state.inflight[launch.action_id] = launch
    return state, saved.memory


def _read(data: bytes) -> _Snapshot:
    first, newline, body = data[:64].partition(b"\n")
    body = data[len(first) + 1 :]
    if not first.startswith(MAGIC) or not newline:
        raise SnapshotDamaged("the journal's snapshot is damaged: it has no header")
    version = first.removeprefix(MAGIC).decode("ascii", "replace")
    if version != str(VERSION):
        raise SnapshotUnreadable(
            f"the journal's snapshot: got version {version}; expected {VERSION}; use the Holdfast "
            f"that wrote it. Nothing was changed; training is not affected"
        )
    try:
        return _DECODER.decode(zlib.decompress(body))
    except msgspec.ValidationError as error:
        raise SnapshotUnreadable(
            f"the journal's snapshot is damaged, or of another version: {error}; use the Holdfast "
            f"that wrote it"
        ) from None
    except (zlib.error, msgspec.DecodeError) as error:
        raise SnapshotDamaged(f"the journal's snapshot is damaged: {error}") from None


class _Memberships:
    """Memberships, numbered in order of appearance."""

    def __init__(self) -> None:
        self.all: list[Membership] = []
        self._numbers: dict[int, int] = {}

    def number(self, membership: Membership) -> int:
        # By identity, which is fast; equal ones that are different objects only cost bytes.
        if id(membership) not in self._numbers:
            self._numbers[id(membership)] = len(self.all)
            self.all.append(membership)
        return self._numbers[id(membership)]

    def compact(self, action: LaunchGroup) -> _Launch:
        fields = msgspec.structs.asdict(action)
        return _Launch(**{**fields, "membership": self.number(action.membership)})


def _expand(launch: _Launch, memberships: list[Membership]) -> LaunchGroup:
    fields = msgspec.structs.asdict(launch)
    return LaunchGroup(**{**fields, "membership": memberships[launch.membership]})
