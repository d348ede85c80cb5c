"""Agent <-> controller messages, and control requests of the command line. msgpack, never pickle.

Owns: the wire format. A frame is a 4-byte big-endian length and a msgpack map with a `type`. An
agent dials in and says Hello; the controller answers Welcome or Refused. Everything that carries a
generation other than the receiver's current one is answered with Refused or ignored, never obeyed.
Must not: decide.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .. import limits
from .facts import (
    Exit,
    Membership,
    NodeFacts,
    ShardFile,
    Stack,
    StagedShard,
    WorkerBeat,
    WorkerSeat,
)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all messages."""


# -- agent -> controller ----------------------------------------------------------------------
class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of an agent; the same again after every reconnect."""

    version: int = limits.PROTOCOL_VERSION
    token: str
    job: str
    node: str
    facts: NodeFacts
    generation: int = 0
    """The generation whose workers run here; 0: none."""
    ranks: tuple[int, ...] = ()
    """Ranks that run here."""
    staged: tuple[StagedShard, ...] = ()
    offered_port: int = 0
    """A port that is free here, for MASTER_PORT of the next generation."""


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    generation: int
    workers: tuple[WorkerBeat, ...] = ()
    staged_step: int = -1
    """Newest step that all workers of this node have staged."""


class Launched(Message, frozen=True, kw_only=True, tag="launched"):
    """Result of Launch."""

    action_id: int
    generation: int
    ok: bool
    detail: str = ""


class WorkerExitReport(Message, frozen=True, kw_only=True, tag="worker-exited"):
    generation: int
    exit: Exit


class Stopped(Message, frozen=True, kw_only=True, tag="stopped"):
    """Result of Stop: nothing of that generation runs here any more; this is what is left."""

    action_id: int
    generation: int
    exits: tuple[Exit, ...] = ()
    staged: tuple[StagedShard, ...] = ()
    stacks: tuple[Stack, ...] = ()
    offered_port: int = 0


class ShardStaged(Message, frozen=True, kw_only=True, tag="staged"):
    """Result of Stage."""

    action_id: int
    ok: bool
    detail: str = ""


class Persisted(Message, frozen=True, kw_only=True, tag="persisted"):
    """A shard is durable in storage; it counts once the controller commits the manifest."""

    generation: int
    shard: ShardFile
    seconds: float


class ShardPersistFailed(Message, frozen=True, kw_only=True, tag="persist-failed"):
    generation: int
    step: int
    shard: int
    detail: str
    tried: bool = True
    """False: nothing was written because there was nothing to write, or no time for it."""


class NodeLeaving(Message, frozen=True, kw_only=True, tag="leaving"):
    """This node will be taken away (SIGTERM). It serves on until it is told Shutdown, or until
    `grace_s` seconds from now; said again after every Welcome."""

    detail: str
    grace_s: float


class AgentEvent(Message, frozen=True, kw_only=True, tag="agent-event"):
    """Something worth telling that decides nothing (a forkserver was restarted ...)."""

    text: str


# -- controller -> agent ----------------------------------------------------------------------
class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The job as the agent needs it. `spec` is the TrainingJob document."""

    spec: dict[str, Any]
    spec_directory: str
    """Directory of the spec file: what workingDirectory is relative to."""
    checkpoint_path: str
    log_directory: str
    heartbeat_interval_s: float


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The connection ends after this. `final`: do not come back."""

    detail: str
    final: bool


class LaunchWorkers(Message, frozen=True, kw_only=True, tag="launch"):
    """Fork these workers. Idempotent: a generation that already runs here answers Launched."""

    action_id: int
    membership: Membership
    node_rank: int
    seats: tuple[WorkerSeat, ...]
    buddy: str = ""
    """Node that gets a copy of what this node stages; empty: none needed."""
    buddy_address: str = ""
    buddy_port: int = 0
    persist_every_steps: int = 0
    """Write every Nth step to storage unasked; 0: only on Persist."""


class StopWorkers(Message, frozen=True, kw_only=True, tag="stop"):
    """End all workers of a generation: SIGTERM, then SIGKILL after grace_s (0: at once)."""

    action_id: int
    generation: int
    grace_s: float = 0.0
    stacks: bool = False
    """Take the stacks of every worker first."""


class Stage(Message, frozen=True, kw_only=True, tag="stage"):
    """Have all workers stage this very step, whatever their cadence."""

    action_id: int
    """0: nobody waits for the answer."""
    generation: int
    step: int
    hold: bool = False
    """Wait a moment after it: a Stop follows."""


class Persist(Message, frozen=True, kw_only=True, tag="persist"):
    """Write the first step >= `step` that this node has staged or will stage to storage: the first,
    so that all nodes write the same one."""

    action_id: int
    generation: int
    step: int


class Committed(Message, frozen=True, kw_only=True, tag="committed"):
    """A manifest is durable: memory that was kept for it may go."""

    generation: int
    step: int


class Chaos(Message, frozen=True, kw_only=True, tag="chaos"):
    """Rehearsal of a failure, asked for by a person."""

    kind: str
    """kill-worker, hang-worker or kill-node."""
    rank: int = -1


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """End the workers and this agent; leave nothing behind."""

    detail: str


# -- command line <-> controller --------------------------------------------------------------
class Request(Message, frozen=True, kw_only=True, tag="request"):
    """First message of a connection of the command line."""

    version: int = limits.PROTOCOL_VERSION
    token: str
    job: str = ""
    """Empty: the only job of this controller."""
    verb: str
    """status, watch, resize, suspend, resume, cancel, chaos, checkpoint."""
    arguments: dict[str, Any] = {}


class Reply(Message, frozen=True, kw_only=True, tag="reply"):
    ok: bool
    detail: str = ""
    body: dict[str, Any] = {}


FromAgent = (
    Hello | Heartbeat | Launched | WorkerExitReport | Stopped | ShardStaged | Persisted
    | ShardPersistFailed    | NodeLeaving | AgentEvent
)  # fmt: skip
ToAgent = (
    Welcome | Refused | LaunchWorkers | StopWorkers | Stage | Persist | Committed | Chaos | Shutdown
)

_ENCODER = msgspec.msgpack.Encoder()
AnyMessage = FromAgent | ToAgent | Request | Reply
_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class BadFrame(Exception):
    """The peer does not speak our protocol; the connection is of no use any more."""


def encode(message: Message) -> bytes:
    """A whole frame, length included."""
    body = _ENCODER.encode(message)
    assert len(body) <= limits.MAX_FRAME_BYTES, f"{type(message).__name__}: {len(body)} bytes"
    return len(body).to_bytes(4, "big") + body


def decode(body: bytes) -> AnyMessage:
    """The message in a frame's body. Raises BadFrame for anything else."""
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise BadFrame(str(error)) from None


def frame_length(header: bytes) -> int:
    """Body length from the four header bytes. Raises BadFrame above MAX_FRAME_BYTES."""
    length = int.from_bytes(header, "big")
    if length > limits.MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {length} bytes; at most {limits.MAX_FRAME_BYTES}")
    return length
