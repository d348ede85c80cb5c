"""The events of a job: a closed union of facts, as the journal stores them.

What an agent reports is declared once, as its message (protocol/messages.py), and is in FromNode.

All but Heartbeat and StepCopied change the controller's state and are journaled before their
actions run. Heartbeats only feed the progress monitor; what it concludes are events again, so a
replay does not need heartbeats. StepCopied only feeds the rounds of the buddy tier, which a new
controller learns from the agents.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .. import limits
from ..protocol.facts import ShardFile, StepReport, StepSource, SuspectBasis
from ..protocol.messages import Fact

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
    """Directory or URL of its checkpoints, resolved: a default that it comes from (the operator's,
    for example) may change later."""


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
class FromNode(Event, frozen=True, tag="from-node"):
    """A fact from a node's agent, or from the backend about the node."""

    node: str
    fact: Fact


class NodeLost(Event, frozen=True, kw_only=True, tag="node-lost"):
    node: str
    cause: LossCause
    detail: str = ""
    ago_s: float = 0.0
    """Seconds since the node was last known to be there."""


# -- conclusions of the progress monitor --------------------------------------------------------
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
    """True if that step may have been another one."""
    first_ago_s: float = 0.0
    """Seconds since the generation's first step, if a framework reports its progress later."""
    ago_s: float = 0.0
    """Seconds without progress of any rank since then."""
    keeps: bool = False
    """Rank 0 keeps its process when a peer fails."""


class HangDetected(Event, frozen=True, kw_only=True, tag="hang-detected"):
    """The progress monitor observed no progress within the limit while processes are alive."""

    generation: int
    ranks: tuple[int, ...]
    """Suspects, the likeliest first."""
    evidence: str
    basis: SuspectBasis = ""
    quiet_s: float = 0.0
    """Seconds without progress; without step reports: seconds in which no rank had begun a
    collective, or the stopped rank did not run. 0: not known."""


class HangSuspected(Event, frozen=True, kw_only=True, tag="hang-suspected"):
    """The progress monitor observed no progress for almost the hang limit. The workers are
    inspected and continue; nothing is charged."""

    generation: int
    evidence: str


class HangSuspicionEnded(Event, frozen=True, kw_only=True, tag="hang-suspicion-ended"):
    """The progress monitor observed progress again."""

    generation: int
    seconds: float
    """Seconds without progress."""


class CollectivesBegun(Event, frozen=True, kw_only=True, tag="collectives-begun"):
    """The progress monitor observed that all ranks of a script that reports nothing begin
    collectives, so it probably trains. A later one of the same generation corrects the time."""

    generation: int
    ago_s: float = 0.0
    """Seconds since the training began."""


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
    """Seconds since the last heartbeat of any node."""
    patience_s: float
    """Seconds without any heartbeat; all nodes are declared lost."""


class HeartbeatsRestored(Event, frozen=True, kw_only=True, tag="heartbeats-restored"):
    """The progress monitor observed that heartbeats arrive again."""

    seconds: float
    """Seconds without heartbeats."""


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


# -- checkpoints ------------------------------------------------------------------------------
class CheckpointRefused(Event, frozen=True, kw_only=True, tag="checkpoint-refused"):
    """A committed checkpoint is damaged; fall back to the one before."""

    step: int
    generation: int
    detail: str


class CheckpointsListed(Event, frozen=True, kw_only=True, tag="checkpoints-listed"):
    """Present content of storage; read when a user resumes a job that holds."""

    files: tuple[ShardFile, ...] = ()


# -- the controller itself --------------------------------------------------------------------
class ControllerStarted(Event, frozen=True, kw_only=True, tag="controller-started"):
    """The first event of each incarnation after the replay: what ran is observed again."""

    incarnation: int
    committed: tuple[ShardFile, ...] = ()
    """Files of the checkpoints whose manifests were found in storage."""
    listed: bool = False
    """Storage has answered: a checkpoint that is not in `committed` is not there."""
    nodes: tuple[str, ...] | None = None
    """Nodes that the backend has, joined or not; None: it was not asked."""


class Tick(Event, frozen=True, tag="tick"):
    """A timer of the controller (next_deadline_ns) is due."""


AnyEvent = (
    FromNode | JobSubmitted | ResizeRequested | AdjustRequested | SuspendRequested
    | ResumeRequested | AgainRequested | CancelRequested | FaultInjected | NodeLost
    | StepCompleted | HangDetected | HangSuspected | HangSuspicionEnded | CollectivesBegun
    | StragglerDetected | HeartbeatsLost | HeartbeatsRestored | ActionSucceeded | ActionFailed
    | ActionUnknown | CheckpointRefused | CheckpointsListed | ControllerStarted | Tick
)  # fmt: skip
