"""What the agent's machine is told and what it wants done: two closed unions.

Owns: the shapes. Must not: hold logic, or import anything that does IO.
"""

from __future__ import annotations

import msgspec

from holdfast.orchestrator.protocol.facts import (
    Exit,
    Membership,
    NodeFacts,
    ShardLocation,
    Stack,
    StagedShard,
    WorkerSeat,
)
from holdfast.orchestrator.protocol.messages import FromAgent, ToAgent
from holdfast.workers.worker_protocol import FromWorker, ToWorker


class InputBase(msgspec.Struct, frozen=True):
    """Base of inputs."""


class Command(msgspec.Struct, frozen=True):
    """Base of outputs."""


# -- inputs: the link -------------------------------------------------------------------------
class LinkUp(InputBase, frozen=True):
    """A connection to a controller stands; the machine answers with Hello."""

    facts: NodeFacts
    offered_port: int
    wall_ns: int = 0


class LinkDown(InputBase, frozen=True):
    pass


class Received(InputBase, frozen=True):
    """A message of the controller."""

    message: ToAgent


class Terminated(InputBase, frozen=True):
    """SIGTERM: this node will be taken away after `grace_s`, whatever it does."""

    grace_s: float
    detail: str = "got SIGTERM"


# -- inputs: workers --------------------------------------------------------------------------
class WorkerForked(InputBase, frozen=True):
    generation: int
    rank: int
    pid: int


class ForkFailed(InputBase, frozen=True):
    generation: int
    rank: int
    detail: str


class FromRank(InputBase, frozen=True):
    """A message of a worker."""

    generation: int
    rank: int
    message: FromWorker


class WorkerEnded(InputBase, frozen=True):
    """A worker was reaped. One of `code` and `signal` is None."""

    generation: int
    rank: int
    code: int | None
    signal: int | None
    out_of_memory: bool = False
    wall_ns: int = 0


class ForkserverDied(InputBase, frozen=True):
    """All workers died with it; `WorkerEnded` has been given for each before this."""

    detail: str


class StoppedRanks(InputBase, frozen=True):
    """Ranks whose process the kernel says is stopped (state T); given when it changes."""

    ranks: tuple[int, ...]


# -- inputs: results of commands --------------------------------------------------------------
class StacksTaken(InputBase, frozen=True):
    generation: int
    stacks: tuple[Stack, ...]


class PortOffered(InputBase, frozen=True):
    """Answer to OfferPort."""

    port: int


class WriteDone(InputBase, frozen=True):
    """Result of WriteStorage; `detail` says what went wrong, empty: it is durable."""

    buffer: int
    staged: StagedShard
    file: str
    checksum: str = ""
    seconds: float = 0.0
    detail: str = ""


class PushDone(InputBase, frozen=True):
    """Result of PushToBuddy."""

    buffer: int
    detail: str = ""


class CopyOffered(InputBase, frozen=True):
    """Another agent wants to push a shard here; answered with AcceptCopy or RefuseCopy."""

    copy_id: int
    staged: StagedShard


class CopyDone(InputBase, frozen=True):
    """The pushed bytes are all here (ok), or the connection broke."""

    copy_id: int
    ok: bool


class PeerAsked(InputBase, frozen=True):
    """Another agent wants a shard; answered with ServePeer or RefusePeer."""

    request_id: int
    step: int
    generation: int
    shard: int


class ServeDone(InputBase, frozen=True):
    request_id: int


class ClockTick(InputBase, frozen=True):
    """A deadline of the machine (next_deadline_ns) has come."""


Input = (
    LinkUp | LinkDown | Received | Terminated | WorkerForked | ForkFailed | FromRank | WorkerEnded
    | ForkserverDied | StoppedRanks | StacksTaken | PortOffered | WriteDone | PushDone
    | CopyOffered | CopyDone | PeerAsked | ServeDone | ClockTick
)  # fmt: skip


# -- outputs ----------------------------------------------------------------------------------
class Send(Command, frozen=True):
    """To the controller. Only given while the link is up."""

    message: FromAgent


class CloseLink(Command, frozen=True):
    detail: str


class Configure(Command, frozen=True):
    """The job is known now: the forkserver and the storage writer may be told."""


class Fork(Command, frozen=True):
    """Start one worker (or hand the seat to a standby) and send it Assign."""

    membership: Membership
    node_rank: int
    seat: WorkerSeat


class Kill(Command, frozen=True):
    """Signal the process group of a worker."""

    generation: int
    rank: int
    signal: int


class TakeStacks(Command, frozen=True):
    """Answer with StacksTaken within limits.STACK_TIMEOUT_S."""

    generation: int
    ranks: tuple[int, ...]


class OfferPort(Command, frozen=True):
    """Find a port that is free; answer with PortOffered."""


class ToRank(Command, frozen=True):
    """A message to a worker; with `buffer`, the descriptor of that buffer goes along."""

    generation: int
    rank: int
    message: ToWorker
    buffer: int | None = None


class MakeBuffer(Command, frozen=True):
    """Allocate and touch a buffer, before the commands that follow use it."""

    buffer: int
    num_bytes: int


class FreeBuffer(Command, frozen=True):
    """Give the memory back; nobody uses it any more."""

    buffer: int


class WriteStorage(Command, frozen=True):
    """Copy a buffer to a durable file; answer with WriteDone."""

    buffer: int
    staged: StagedShard
    directory: str
    file: str


class PushToBuddy(Command, frozen=True):
    """Copy a buffer to another agent; answer with PushDone."""

    buffer: int
    staged: StagedShard
    node: str
    address: str
    port: int


class FetchFromPeer(Command, frozen=True):
    """Get a shard from one of the sources and hand it to the worker (Shard + descriptor), or tell
    it NoShard. No answer to the machine."""

    generation: int
    rank: int
    wanted: StagedShard
    """num_bytes is not known: 0."""
    sources: tuple[ShardLocation, ...]


class AcceptCopy(Command, frozen=True):
    copy_id: int
    buffer: int


class RefuseCopy(Command, frozen=True):
    copy_id: int
    detail: str


class ServePeer(Command, frozen=True):
    request_id: int
    buffer: int
    staged: StagedShard


class RefusePeer(Command, frozen=True):
    request_id: int
    detail: str


class Note(Command, frozen=True):
    """For the agent's log."""

    text: str


class RefillStandbys(Command, frozen=True):
    """The machine is quiet: fork workers ahead of the next launch."""

    count: int


class KillNode(Command, frozen=True):
    """A rehearsed loss of the node: SIGKILL this very process."""


class EndNode(Command, frozen=True):
    """Nothing runs here any more: end the agent."""

    detail: str


Output = (
    Send | CloseLink | Configure | Fork | Kill | TakeStacks | OfferPort | ToRank | MakeBuffer
    | FreeBuffer | WriteStorage | PushToBuddy | FetchFromPeer | AcceptCopy | RefuseCopy | ServePeer
    | RefusePeer | Note | RefillStandbys | KillNode | EndNode
)  # fmt: skip

__all__ = [
    "AcceptCopy",
    "ClockTick",
    "CloseLink",
    "Command",
    "Configure",
    "CopyDone",
    "CopyOffered",
    "EndNode",
    "Exit",
    "FetchFromPeer",
    "Fork",
    "ForkFailed",
    "ForkserverDied",
    "FreeBuffer",
    "FromRank",
    "Input",
    "Kill",
    "KillNode",
    "LinkDown",
    "LinkUp",
    "MakeBuffer",
    "Note",
    "OfferPort",
    "Output",
    "PeerAsked",
    "PortOffered",
    "PushDone",
    "PushToBuddy",
    "Received",
    "RefillStandbys",
    "RefuseCopy",
    "RefusePeer",
    "Send",
    "ServeDone",
    "ServePeer",
    "StacksTaken",
    "StoppedRanks",
    "TakeStacks",
    "Terminated",
    "ToRank",
    "WorkerEnded",
    "WorkerForked",
    "WriteDone",
    "WriteStorage",
]  # fmt: skip
