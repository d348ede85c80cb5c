"""What the core is told. A small closed union; every event is a fact, none is a wish of the core.

Owns: the events and their wire form (they are what the journal stores). Must not: hold logic.

`DURABLE` events change the controller's state and are journaled before their actions run. The
others feed `health.Monitor`, whose verdicts are durable events again, so a replay never needs them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .. import limits
from ..protocol.facts import Exit, NodeFacts, ShardFile, Stack, StagedShard, StepReport, WorkerBeat

LossCause = Literal["disconnected", "silent", "no-stop", "gone", "preempted", "withdrawn"]


class Event(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """Base of all events."""


# -- what people ask for ----------------------------------------------------------------------
class JobSubmitted(Event, frozen=True, kw_only=True, tag="job-submitted"):
    """First event of every journal."""

    job_id: str
    spec: dict[str, Any]
    spec_directory: str
    checkpoint_path: str = ""
    """Where its checkpoints are, resolved: a default that it comes from (the operator's, say) may
    change later, and they stay. Empty in journals of before."""


class ResizeRequested(Event, frozen=True, kw_only=True, tag="resize-requested"):
    nodes: int
    by: str = ""


class AdjustRequested(Event, frozen=True, kw_only=True, tag="adjust-requested"):
    """What of the spec may change while the job lives, beside its size; all of it, as it is now."""

    min_nodes: int
    spares: int
    recovery: dict[str, Any]
    """spec.recovery, as the document has it."""
    by: str = ""


class SuspendRequested(Event, frozen=True, kw_only=True, tag="suspend-requested"):
    by: str = ""


class ResumeRequested(Event, frozen=True, kw_only=True, tag="resume-requested"):
    by: str = ""


class CancelRequested(Event, frozen=True, kw_only=True, tag="cancel-requested"):
    by: str = ""


class FaultInjected(Event, frozen=True, kw_only=True, tag="chaos-injected"):
    """A rehearsed failure, noted so that the report can say so. Decides nothing."""

    kind: str
    node: str
    rank: int = -1
    by: str = ""


# -- nodes ------------------------------------------------------------------------------------
class NodeJoined(Event, frozen=True, kw_only=True, tag="node-joined"):
    """An agent said Hello: for the first time, after a reconnect, or to a new controller."""

    node: str
    facts: NodeFacts
    generation: int = 0
    ranks: tuple[int, ...] = ()
    staged: tuple[StagedShard, ...] = ()
    offered_port: int = 0


class NodeLost(Event, frozen=True, kw_only=True, tag="node-lost"):
    node: str
    cause: LossCause
    detail: str = ""


class PreemptionNoticed(Event, frozen=True, kw_only=True, tag="preemption-noticed"):
    """The node will be taken away; its workers still run."""

    node: str
    detail: str = ""
    grace_s: float = 0.0
    """It is there for so long at least; 0: nobody knows."""


# -- workers ----------------------------------------------------------------------------------
class WorkerExited(Event, frozen=True, kw_only=True, tag="worker-exited"):
    node: str
    generation: int
    exit: Exit


class StepCompleted(
    StepReport,
    frozen=True,
    kw_only=True,
    tag_field="type",
    tag="steps-advanced",
    omit_defaults=True,
):
    """Every rank has finished `step`. The first of a generation ends its start-up; later ones are
    sampled (limits.PROGRESS_JOURNAL_INTERVAL_S) for the report and decide nothing. `step_s` is the
    median over recent steps, the other numbers are the largest of all ranks."""

    generation: int
    step: int


class HangDetected(Event, frozen=True, kw_only=True, tag="hang-detected"):
    """Verdict of the monitor: no progress within the limit while processes live."""

    generation: int
    ranks: tuple[int, ...]
    """Suspects, the likeliest first."""
    evidence: str


class StragglerDetected(Event, frozen=True, kw_only=True, tag="straggler-detected"):
    """Verdict of the monitor; noted, not acted on."""

    generation: int
    node: str
    evidence: str


class HeartbeatsLost(Event, frozen=True, kw_only=True, tag="all-silent"):
    """Verdict of the monitor: no node is heard of, so the reason may be on our side; nobody is
    given up for it yet."""

    nodes: int
    seconds: float
    """Since anybody was heard of."""
    patience_s: float
    """After so much silence it is believed."""


class HeartbeatsRestored(Event, frozen=True, kw_only=True, tag="heard-again"):
    """Verdict of the monitor: a silence of all nodes is over."""

    seconds: float
    """How long it was."""


# -- results of actions -----------------------------------------------------------------------
class ActionSucceeded(Event, frozen=True, kw_only=True, tag="action-succeeded"):
    action_id: int
    generation: int = 0
    detail: str = ""
    start_s: float | None = None
    """Of RequestNodes: how long a node takes to start now, where the backend knows."""
    start_limit_s: float = limits.NODE_WAIT_S
    """Of RequestNodes: a node that has not joined after this is given back."""


class ActionFailed(Event, frozen=True, kw_only=True, tag="action-failed"):
    action_id: int
    generation: int = 0
    detail: str = ""


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
    """False: nothing was written because there was nothing to write, or no time for it."""


class CheckpointRefused(Event, frozen=True, kw_only=True, tag="checkpoint-refused"):
    """A committed checkpoint turned out to be damaged; fall back to the one before."""

    step: int
    generation: int
    detail: str


# -- the controller itself --------------------------------------------------------------------
class ControllerStarted(Event, frozen=True, kw_only=True, tag="controller-started"):
    """Written by every incarnation after the replay: what ran before must be observed anew."""

    incarnation: int
    committed: tuple[ShardFile, ...] = ()
    """Files of the checkpoints whose manifests were found in storage."""
    nodes: tuple[str, ...] | None = None
    """Nodes that the backend has, joined or not; None: it was not asked."""


class Tick(Event, frozen=True, tag="tick"):
    """A deadline of the controller (next_deadline_ns) has come."""


# -- volatile: only the monitor sees it -------------------------------------------------------
class HeartbeatReceived(Event, frozen=True, kw_only=True, tag="heartbeat"):
    node: str
    generation: int
    workers: tuple[WorkerBeat, ...] = ()
    staged_step: int = -1


AnyEvent = (
    JobSubmitted | ResizeRequested | AdjustRequested | SuspendRequested | ResumeRequested
    | CancelRequested
    | FaultInjected | NodeJoined | NodeLost | PreemptionNoticed | WorkerExited | StepCompleted
    | HangDetected | StragglerDetected | HeartbeatsLost | HeartbeatsRestored
    | ActionSucceeded | ActionFailed | ActionUnknown
    | GroupStopped | ShardPersisted | PersistFailed | CheckpointRefused | ControllerStarted
    | Tick | HeartbeatReceived
)  # fmt: skip
