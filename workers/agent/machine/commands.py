"""Commands of the agent's machine. The agent process carries them out in order."""

from __future__ import annotations

import msgspec

from holdfast.orchestrator.protocol.facts import (
    Membership,
    ShardLocation,
    StagedShard,
    WorkerSeat,
)
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.protocol.messages import FromAgent
from holdfast.workers.worker_protocol import ToWorker


class CommandBase(msgspec.Struct, frozen=True):
    """Base of all commands."""


# -- the controller and the node --------------------------------------------------------------
class Send(CommandBase, frozen=True):
    """Send a message to the controller. Only given while the connection is up."""

    message: FromAgent


class CloseLink(CommandBase, frozen=True):
    """Close the connection to the controller."""

    detail: str


class Configure(CommandBase, frozen=True):
    """The job is known: configure the forkserver and the storage writer."""


class OfferPort(CommandBase, frozen=True):
    """Reserve a free port; the result is PortOffered."""


class Note(CommandBase, frozen=True):
    """Write a line to the agent's log."""

    text: str


class KillNode(CommandBase, frozen=True):
    """An injected loss of the node: SIGKILL this process."""


class EndNode(CommandBase, frozen=True):
    """No worker runs here any more: end the agent."""

    detail: str
    code: int = 0


# -- workers ----------------------------------------------------------------------------------
class Fork(CommandBase, frozen=True):
    """Fork one worker, or take a standby, and send it Assign."""

    membership: Membership
    node_rank: int
    seat: WorkerSeat
    stage_every_steps: int = 0
    twins: tuple[int, ...] = ()
    """Local ranks of this launch with the same shard index, its own included."""
    code: str = ""
    """The archive in whose files it runs; empty: in those of the node."""
    kept: tuple[int, int] | None = None
    """(generation, rank) of a kept worker that gets this seat, unless it has ended."""


class RefillStandbys(CommandBase, frozen=True):
    """Fork standbys until there are `count`."""

    count: int


class Kill(CommandBase, frozen=True):
    """Signal the process group of a worker."""

    generation: int
    rank: int
    signal: int
    injected: bool = False


class Halt(CommandBase, frozen=True):
    """Have workers leave their step and wait; each answers with Halted."""

    generation: int
    ranks: tuple[int, ...]


class TakeStacks(CommandBase, frozen=True):
    """Take the stacks of workers; the result is StacksTaken within limits.STACK_TIMEOUT_S."""

    generation: int
    ranks: tuple[int, ...]
    by_signal: bool
    """False: ask them what they do, and interrupt nothing."""


class ToRank(CommandBase, frozen=True):
    """Send a message to a worker; with `buffer`, also the descriptor of that buffer."""

    generation: int
    rank: int
    message: ToWorker
    buffer: int | None = None


# -- memory and storage -----------------------------------------------------------------------
class MakeBuffer(CommandBase, frozen=True):
    """Allocate a buffer before the commands that follow use it."""

    buffer: int
    num_bytes: int


class FreeBuffer(CommandBase, frozen=True):
    """Free the memory of a buffer that is not in use."""

    buffer: int


class SealBuffer(CommandBase, frozen=True):
    """Several workers have written the parts of a shard file: write the checksum of its header."""

    buffer: int


class WriteStorage(CommandBase, frozen=True):
    """Copy a buffer to a durable file; the result is WriteDone."""

    buffer: int
    staged: StagedShard
    directory: str
    file: str
    mesh: Mesh | None = None
    """Mesh for a note beside the file, which is written without a controller."""


class PushToBuddy(CommandBase, frozen=True):
    """Copy a buffer to another agent; the result is PushDone."""

    buffer: int
    staged: StagedShard
    node: str
    address: str
    port: int
    confirmed: int = -1
    """The newest step that all agents have pushed; -1: none. The buddy may not know it yet."""


class FetchFromPeer(CommandBase, frozen=True):
    """Fetch a shard from one of the sources and send it to the worker (Shard and descriptor), or
    send the worker NoShard. The machine gets no result."""

    generation: int
    rank: int
    wanted: StagedShard
    """num_bytes is unknown: 0."""
    sources: tuple[ShardLocation, ...]
    readers: int = 1
    """Workers of the node that will ask for this shard: one file serves all of them."""


Command = (
    Send | CloseLink | Configure | OfferPort | Note | KillNode | EndNode | Fork | RefillStandbys
    | Kill | Halt | TakeStacks | ToRank
    | MakeBuffer | FreeBuffer | SealBuffer | WriteStorage | PushToBuddy
    | FetchFromPeer
)  # fmt: skip
