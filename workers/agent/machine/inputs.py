"""Inputs of the agent's machine: messages, results of commands and clock ticks."""

from __future__ import annotations

import msgspec

from holdfast.orchestrator.protocol.facts import CoverageSum, NodeFacts, Stack, StagedShard
from holdfast.orchestrator.protocol.messages import ToAgent
from holdfast.workers.worker_protocol import Failed, FromWorker


class InputBase(msgspec.Struct, frozen=True):
    """Base of all inputs."""


# -- the controller ---------------------------------------------------------------------------
class LinkUp(InputBase, frozen=True):
    """The agent has a connection to a controller. The machine answers with Hello."""

    facts: NodeFacts
    offered_port: int


class LinkDown(InputBase, frozen=True):
    """The connection to the controller is lost."""


class Received(InputBase, frozen=True):
    """A message of the controller."""

    message: ToAgent


class Terminated(InputBase, frozen=True):
    """SIGTERM: this node will be taken away after `grace_s`."""

    grace_s: float
    detail: str = "got SIGTERM"


# -- workers ----------------------------------------------------------------------------------
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
    crash: Failed | None = None
    """Crash in native code, by its output."""
    before_ours: bool = False
    """True if the process was ending when our first signal was sent."""


class JobConfigured(InputBase, frozen=True):
    """Result of Configure. `must_import`: standbys have modules to import, from spec.preload or
    from what an earlier start of the script imported."""

    must_import: bool


class StandbysReady(InputBase, frozen=True):
    """All standbys that were forked have imported what the script imports. Result of
    RefillStandbys, seconds later."""


class ForkserverDied(InputBase, frozen=True):
    """All workers died with the forkserver; their `WorkerEnded` came before this."""

    detail: str


class StoppedRanks(InputBase, frozen=True):
    """Ranks whose process is stopped (kernel state T); given when the set changes."""

    ranks: tuple[int, ...]


class ActivityMeasured(InputBase, frozen=True):
    """Activity of the workers' processes, twice a second."""

    idle_s: dict[int, float]
    """Rank -> seconds without CPU use and I/O."""
    cpu_pressure: float


class MemoryMeasured(InputBase, frozen=True):
    """The memory of this node, before an input that may need more of it."""

    limit_bytes: int
    available_bytes: int
    """Free memory, this node's own buffers apart."""
    held_bytes: int
    """Bytes in those buffers."""
    on_cpu: bool = False
    """The workers train in this memory."""


# -- results of commands ----------------------------------------------------------------------
class StacksTaken(InputBase, frozen=True):
    """Result of TakeStacks."""

    generation: int
    stacks: tuple[Stack, ...]
    by_signal: bool


class PortOffered(InputBase, frozen=True):
    """Result of OfferPort."""

    port: int


class WriteDone(InputBase, frozen=True):
    """Result of WriteStorage. `detail` is the error; empty: the file is durable."""

    buffer: int
    staged: StagedShard
    file: str
    checksum: str = ""
    coverage: CoverageSum = CoverageSum()
    seconds: float = 0.0
    detail: str = ""


class PushDone(InputBase, frozen=True):
    """Result of PushToBuddy. `detail` is the error."""

    buffer: int
    detail: str = ""
    seconds: float = 0.0


# -- other agents -----------------------------------------------------------------------------
class CopyDone(InputBase, frozen=True):
    """The push into a buffer of `accept_copy` is complete (ok), or its connection broke."""

    buffer: int
    ok: bool


class ServeDone(InputBase, frozen=True):
    """Another agent has fetched the shard that `lend` gave, or its connection broke."""

    buffer: int


class ClockTick(InputBase, frozen=True):
    """A deadline of the machine (next_deadline_ns) has come."""


Input = (
    LinkUp | LinkDown | Received | Terminated | WorkerForked | ForkFailed | FromRank | WorkerEnded
    | JobConfigured | StandbysReady | ForkserverDied | StoppedRanks | ActivityMeasured
    | MemoryMeasured | StacksTaken | PortOffered | WriteDone | PushDone
    | CopyDone | ServeDone | ClockTick
)  # fmt: skip
