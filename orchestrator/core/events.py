"""The events of a job: a closed union of facts, as the journal stores them.

All but heartbeats and NodeCopiedStep change the controller's state and are journaled before their
actions run. Heartbeats only feed the progress monitor; what it concludes are events again, so a
replay does not need heartbeats. NodeCopiedStep only feeds the rounds of the buddy tier, which a new
controller learns from the agents.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .. import limits
from ..protocol.facts import (
    Exit,
    NodeFacts,
    ShardFile,
    Stack,
    StagedShard,
    StepReport,
    StepSource,
    SuspectBasis,
    WorkerBeat,
)
from ..protocol.host_memory import HostMemory

LossCause = Literal["disconnected", "silent", "no-stop", "gone", "preempted", "withdrawn"]


class Event(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """Base of all events."""


# -- requests of users ------------------------------------------------------------------------
class JobSubmitted(Event, frozen=True, kw_only=True, tag="job-submitted"):
    """First event of every journal."""

    job_id: str
    spec: dict[str, Any]
    spec_directory: str
    checkpoint_path: str = ""
    """Where its checkpoints are, resolved: a default that it comes from (the operator's, for
    example) may change later."""


class ResizeRequested(Event, frozen=True, kw_only=True, tag="resize-requested"):
    nodes: int
    by: str = ""


class AdjustRequested(Event, frozen=True, kw_only=True, tag="adjust-requested"):
    """All that may change of the spec while the job runs, except its size."""

    min_nodes: int
    spares: int
    recovery: dict[str, Any]
    """spec.recovery, as the document has it."""
    elasticity: str | tuple[int, ...] | None = None
    """None: as before."""
    by: str = ""


class SuspendRequested(Event, frozen=True, kw_only=True, tag="suspend-requested"):
    by: str = ""


class ResumeRequested(Event, frozen=True, kw_only=True, tag="resume-requested"):
    by: str = ""
    start_over: bool = False
    """True for a job that holds: begin at step 0."""


class AgainRequested(Event, frozen=True, kw_only=True, tag="again-requested"):
    """A new generation with newly edited code, from the last checkpoint."""

    code: str | None = None
    """spec.code of the new one; empty: what the image has. None: as before, and the files have
    changed where they are."""
    by: str = ""


class CancelRequested(Event, frozen=True, kw_only=True, tag="cancel-requested"):
    by: str = ""


class FaultInjected(Event, frozen=True, kw_only=True, tag="fault-injected"):
    """A fault caused on purpose; the report marks its incident. Decides nothing."""

    kind: str
    node: str
    rank: int = -1
    by: str = ""


# -- nodes ------------------------------------------------------------------------------------
class NodeJoined(Event, frozen=True, kw_only=True, tag="node-joined"):
    """An agent has connected: for the first time, again, or to a new controller."""

    node: str
    facts: NodeFacts
    generation: int = 0
    ranks: tuple[int, ...] = ()
    staged: tuple[StagedShard, ...] = ()
    offered_port: int = 0


class StandbysReported(Event, frozen=True, kw_only=True, tag="standbys-reported"):
    """Whether the standbys of a node have imported what the script imports."""

    node: str
    ready: bool


class NodeLost(Event, frozen=True, kw_only=True, tag="node-lost"):
    node: str
    cause: LossCause
    detail: str = ""
    ago_s: float = 0.0
    """Seconds since the node was last known to be there."""


class PreemptionNoticed(Event, frozen=True, kw_only=True, tag="preemption-noticed"):
    """The node will be preempted; its workers still run."""

    node: str
    detail: str = ""
    grace_s: float = 0.0
    """How long it stays at least; 0: unknown."""


# -- workers ----------------------------------------------------------------------------------
class NodeRemarked(Event, frozen=True, kw_only=True, tag="node-remarked"):
    """An agent has done something that people shall know of. Decides nothing."""

    node: str
    text: str
    shown: bool = False
    """It is the job's reason while the job runs."""


class OwnCheckpointSeen(Event, frozen=True, kw_only=True, tag="own-checkpoint-seen"):
    """A rank writes a checkpoint of the script's own."""

    node: str
    generation: int
    path: str
    times: int = 1
    unread: bool = False
    """Rank 0 was started again and has opened no checkpoint of the job before."""
    waits: bool = False
    """It would overwrite one, and waits for its end instead: nothing was written."""


class OwnCheckpointRead(Event, frozen=True, kw_only=True, tag="own-checkpoint-read"):
    """Rank 0 of a script that was started again reads a checkpoint of the job."""

    node: str
    generation: int
    path: str


class WorkerExited(Event, frozen=True, kw_only=True, tag="worker-exited"):
    node: str
    generation: int
    exit: Exit


class StepCompleted(
    StepReport,
    frozen=True,
    kw_only=True,
    tag_field="type",
    tag="step-completed",
    omit_defaults=True,
):
    """Every rank has finished `step`. The first of a generation ends its start-up; later ones are
    sampled (limits.PROGRESS_JOURNAL_INTERVAL_S) for the report and decide nothing. `step_s` is the
    median over recent steps, the other numbers are the largest of all ranks."""

    generation: int
    step: int
    counted_by: StepSource = ""
    began_after: int | None = None
    """The step after which a script began that keeps its own checkpoints; None: not known."""
    began_estimated: bool = False
    """It may have been another one."""
    first_ago_s: float = 0.0
    """How long ago the first step of the generation was finished, if a framework reports its
    progress later."""


class HangDetected(Event, frozen=True, kw_only=True, tag="hang-detected"):
    """The progress monitor observed no progress within the limit while processes are alive."""

    generation: int
    ranks: tuple[int, ...]
    """Suspects, the likeliest first."""
    evidence: str
    basis: SuspectBasis = ""
    quiet_s: float = 0.0
    """How long there was no progress; of a script that reports no step: how long no rank had begun
    a collective, or the stopped rank did not run. 0: not known."""


class HangSuspected(Event, frozen=True, kw_only=True, tag="hang-suspected"):
    """The progress monitor observed no progress for almost the hang limit. The workers are
    inspected and go on; nothing is charged."""

    generation: int
    evidence: str


class HangSuspicionEnded(Event, frozen=True, kw_only=True, tag="hang-suspicion-ended"):
    """The progress monitor observed progress again."""

    generation: int
    seconds: float
    """How long there was none."""


class CollectivesBegun(Event, frozen=True, kw_only=True, tag="collectives-begun"):
    """The progress monitor observed that all ranks of a script that reports nothing begin
    collectives, so it probably trains. A later one of the same generation corrects the time."""

    generation: int
    ago_s: float = 0.0
    """How long ago the training began."""


class GroupInspected(Event, frozen=True, kw_only=True, tag="group-inspected"):
    """What the workers of one node do, while a hang is suspected."""

    node: str
    generation: int
    stacks: tuple[Stack, ...] = ()


class StragglerDetected(Event, frozen=True, kw_only=True, tag="straggler-detected"):
    """The progress monitor found a slow rank; noted, not acted on."""

    generation: int
    node: str
    evidence: str
    rank: int = -1


class HeartbeatsLost(Event, frozen=True, kw_only=True, tag="heartbeats-lost"):
    """The progress monitor observed that no node sends heartbeats, so the cause is probably on the
    controller's side; no node is declared lost yet."""

    nodes: int
    seconds: float
    """Since the last heartbeat of any node."""
    patience_s: float
    """After this much time without heartbeats all nodes are declared lost."""


class HeartbeatsRestored(Event, frozen=True, kw_only=True, tag="heartbeats-restored"):
    """The progress monitor observed that heartbeats arrive again."""

    seconds: float
    """How long there was none."""


# -- results of actions -----------------------------------------------------------------------
class ActionSucceeded(Event, frozen=True, kw_only=True, tag="action-succeeded"):
    action_id: int
    generation: int = 0
    detail: str = ""
    nodes: tuple[str, ...] = ()
    """The promised nodes of RequestNodes. Empty: the backend cannot name them yet."""
    start_s: float | None = None
    """RequestNodes: how long a node takes to start now, where the backend knows."""
    start_limit_s: float = limits.NODE_WAIT_S
    """RequestNodes: a node that has not joined after this is released."""


class ActionFailed(Event, frozen=True, kw_only=True, tag="action-failed"):
    action_id: int
    generation: int = 0
    detail: str = ""
    final: bool = False
    """CommitManifest: another attempt cannot succeed, as its shards do not hold every value."""


class ActionUnknown(Event, frozen=True, kw_only=True, tag="action-unknown"):
    """The controller died, or the connection, before the result came."""

    action_id: int
    generation: int = 0
    detail: str = ""


class GroupStopped(Event, frozen=True, kw_only=True, tag="group-stopped"):
    """Result of StopGroup on one node."""

    action_id: int
    node: str
    generation: int
    exits: tuple[Exit, ...] = ()
    staged: tuple[StagedShard, ...] = ()
    stacks: tuple[Stack, ...] = ()
    offered_port: int = 0


class NodeMemoryPlanned(Event, frozen=True, kw_only=True, tag="node-memory-planned"):
    """What a node's memory can hold of staged state."""

    node: str
    generation: int
    memory: HostMemory


# -- checkpoints ------------------------------------------------------------------------------
class ShardPersisted(Event, frozen=True, kw_only=True, tag="shard-persisted"):
    node: str
    generation: int
    shard: ShardFile
    seconds: float = 0.0


class PersistFailed(Event, frozen=True, kw_only=True, tag="persist-failed"):
    node: str
    generation: int
    step: int
    shard: int
    detail: str
    tried: bool = True
    """False: there was nothing to write, or no time to write it."""


class CheckpointRefused(Event, frozen=True, kw_only=True, tag="checkpoint-refused"):
    """A committed checkpoint is damaged; fall back to the one before."""

    step: int
    generation: int
    detail: str


class CheckpointsListed(Event, frozen=True, kw_only=True, tag="checkpoints-listed"):
    """What storage has now; read when a user wants a job to go on that holds."""

    files: tuple[ShardFile, ...] = ()


# -- the controller itself --------------------------------------------------------------------
class ControllerStarted(Event, frozen=True, kw_only=True, tag="controller-started"):
    """The first event of every incarnation after the replay: what ran before must be observed
    again."""

    incarnation: int
    committed: tuple[ShardFile, ...] = ()
    """Files of the checkpoints whose manifests were found in storage."""
    listed: bool = False
    """Storage has answered: a checkpoint that is not in `committed` is not there."""
    nodes: tuple[str, ...] | None = None
    """Nodes that the backend has, joined or not; None: it was not asked."""


class Tick(Event, frozen=True, tag="tick"):
    """A timer of the controller (next_deadline_ns) is due."""


# -- not journaled: only for the progress monitor ----------------------------------------------
class NodeCopiedStep(Event, frozen=True, kw_only=True, tag="node-copied-step"):
    """A node has copied a step to its buddy, or could not (messages.StepCopied). Only for the
    choice of the next step (copy_rounds.py)."""

    node: str
    generation: int
    wanted: int
    step: int
    staged_step: int
    seconds: float = 0.0
    detail: str = ""
    missed: bool = False


class HeartbeatReceived(Event, frozen=True, kw_only=True, tag="heartbeat"):
    node: str
    generation: int
    workers: tuple[WorkerBeat, ...] = ()
    staged_step: int = -1
    copied_step: int = -1
    stage_every_steps: int = 0
    stage_from_step: int = 0
    cpu_pressure: float = 0.0


AnyEvent = (
    JobSubmitted | ResizeRequested | AdjustRequested | SuspendRequested | ResumeRequested
    | AgainRequested | CancelRequested
    | FaultInjected | NodeJoined | StandbysReported | NodeLost | PreemptionNoticed | WorkerExited
    | StepCompleted
    | HangDetected | HangSuspected | HangSuspicionEnded | CollectivesBegun | GroupInspected
    | StragglerDetected
    | HeartbeatsLost | HeartbeatsRestored
    | ActionSucceeded | ActionFailed | ActionUnknown
    | GroupStopped | NodeMemoryPlanned
    | ShardPersisted | PersistFailed | CheckpointRefused | CheckpointsListed
    | ControllerStarted
    | Tick | HeartbeatReceived | NodeCopiedStep | NodeRemarked
    | OwnCheckpointSeen | OwnCheckpointRead
)  # fmt: skip
