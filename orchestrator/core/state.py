"""What the controller knows of its job: records, mutable only while `Controller.step` runs.

Owns: the shape of the state. Must not: change it. Everybody else (monitor, runtime, tests) reads.
Dictionaries keep insertion order and no set is ever iterated, so a replay is exact under any hash
seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .. import limits
from ..api.v1alpha1 import TrainingJob
from ..protocol.facts import Exit, Membership, NodeFacts, ShardFile, Stack, StagedShard
from ..protocol.mesh import Mesh
from .actions import AnyAction, LaunchGroup, Outcome, Reason, ReasonCode, RequestNodes
from .transitions import JobPhase

FailureClass = Literal["user", "infrastructure", "preemption", "hang"]
Intent = Literal["run", "suspend", "cancel", "deadline"]
Purpose = Literal["failure", "resize", "preemption", "suspend", "cancel", "deadline", "finish"]

DrainKind = Literal["finish", "suspend", "end", "park"]

StepKey = tuple[int, int]
"""(step, generation that wrote it): names one state of the training."""


@dataclass(slots=True)
class NodeRecord:
    """An agent that has joined and is not lost."""

    name: str
    facts: NodeFacts
    sequence: int
    """Order of joining."""
    generation: int = 0
    """Whose workers may run there; 0: none."""
    staged: tuple[StagedShard, ...] = ()
    """Inventory of its memory tier when it last told us (stopped or joined)."""
    offered_port: int = 0
    confirmed: bool = True
    """Heard of since the controller started."""
    preempting: bool = False
    """It will be taken away; no new generation uses it."""
    leaving: str = ""
    """Why, as far as it was told."""
    leaves_ns: int | None = None
    """When, as far as it was told."""


@dataclass(slots=True)
class Quiesce:
    """A step that all ranks are asked to stage before a planned interruption."""

    step: int
    waiting: dict[str, int]
    """Node -> action id of its StageStep."""
    wanted_ns: int
    """When somebody wanted the interruption last."""


@dataclass(slots=True)
class PendingStop:
    """A generation that is being ended, and what is known of why."""

    purpose: Purpose
    reason: Reason
    started_ns: int
    stacks_wanted: bool
    grace_s: float
    waiting: dict[str, int] = field(default_factory=dict)
    """Node -> action id of its StopGroup."""
    stacks: list[Stack] = field(default_factory=list)
    lost: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Members lost in this interruption -> (cause, detail), in the order of the news."""
    lost_first: bool = False
    """The loss of a node was the first news of this interruption."""
    hang: tuple[tuple[int, ...], str] | None = None
    launch_failure: tuple[str, str] | None = None
    refused: str = ""
    leaving: list[tuple[str, str]] = field(default_factory=list)
    """(node, why) of members that are given up because they will be taken away."""


@dataclass(slots=True)
class IncidentRecord:
    """One interruption, from the fact that opened it to the next step of all ranks."""

    number: int
    at_ns: int
    purpose: Purpose
    generation_before: int
    world_size_before: int
    failure_class: FailureClass | None = None
    rule: str = ""
    title: str = ""
    evidence: str = ""
    culprit_node: str = ""
    culprit_rank: int | None = None
    rehearsal: bool = False
    decision: str = ""
    step_before: int = -1
    """The last step finished by all ranks, as far as anybody knows."""
    generation_after: int | None = None
    world_size_after: int | None = None
    resumed_after_step: int | None = None
    restored_from: Literal["memory", "storage", "nothing", ""] = ""
    stopped_ns: int | None = None
    launched_ns: int | None = None
    started_ns: int | None = None
    """All nodes have started their workers."""
    first_step_ns: int | None = None
    traceback: str = ""
    stacks: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class PendingCheckpoint:
    """Shard files that are durable but that no manifest names yet."""

    step: int
    generation: int
    mesh: Mesh
    files: dict[int, ShardFile] = field(default_factory=dict)
    commit_action: int | None = None
    attempts: int = 0


@dataclass(slots=True)
class CommittedCheckpoint:
    """A checkpoint in the storage tier whose manifest is durable."""

    step: int
    generation: int
    num_shards: int
    num_bytes: int
    committed_ns: int
    refused: bool = False
    """A reader found it damaged."""

    @property
    def key(self) -> StepKey:
        return (self.step, self.generation)


@dataclass(slots=True)
class CheckpointCatalog:
    """What the storage tier holds, as far as manifests and reports say."""

    pending: dict[StepKey, PendingCheckpoint] = field(default_factory=dict)
    committed: list[CommittedCheckpoint] = field(default_factory=list)
    """Oldest first."""
    deleting: dict[StepKey, int] = field(default_factory=dict)
    """Checkpoint -> action id of its DeleteCheckpoint."""
    distrusted: dict[StepKey, int] = field(default_factory=dict)
    """States in memory from which generations failed before their first step -> how often."""
    strays: dict[StepKey, None] = field(default_factory=dict)
    """Written by generations that had ended when it was there: no manifest will name them."""
    last_commit_ns: int = 0


@dataclass(slots=True)
class Drain:
    """The last checkpoint of a job that ends, is suspended, or waits for nodes while one with a
    part of it leaves (park), on its way to storage."""

    kind: DrainKind
    step: int
    generation: int
    num_shards: int
    attempts: int = 0
    problem: str = ""
    """What the last attempt met, in words."""


@dataclass(slots=True)
class JobState:
    """Everything. `members` is the node order of the current generation: index = node rank."""

    job: TrainingJob
    """As submitted, but with the size that was last asked for."""
    job_id: str
    submitted_ns: int
    now_ns: int
    checkpoint_path: str = ""
    """As submitted."""
    phase: JobPhase = "pending"
    reason: Reason = field(default_factory=lambda: Reason("submitted", "submitted"))
    intent: Intent = "run"
    asked: str = ""
    """Who wants the intent, in words."""
    step_s: float = 0.0
    """The last step time heard of."""
    resized: bool = False
    """Somebody asked for another size and the job has not got it yet."""
    finish_action: int | None = None
    """FinishJob without a result."""
    outcome: Outcome | None = None
    """Set when the end is certain; the phase says when it has come."""
    verdict: Reason | None = None
    """Why the job ends before its last step; its newest state goes to storage first."""
    incarnation: int = 0
    next_action_id: int = 1
    inflight: dict[int, AnyAction] = field(default_factory=dict)
    timers: dict[str, int] = field(default_factory=dict)

    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    """Nodes that were lost or given back -> why. Names are never used again."""
    unreleased: dict[str, str] = field(default_factory=dict)
    """Nodes whose release failed -> why they were given up."""
    coming: dict[str, int] = field(default_factory=dict)
    """Nodes that the backend has promised and that have not joined -> since when."""
    found: dict[str, None] = field(default_factory=dict)
    """Those of `coming` that a new controller found with the backend: since when is not known."""
    starts: list[int] = field(default_factory=list)
    """Nanoseconds from promise to arrival of the last nodes that came; see arrivals.py."""
    start_told_ns: int | None = None
    """How long a node takes to start, as the backend said when it last promised one."""
    start_limit_s: float = limits.NODE_WAIT_S
    """After which a promised node is given back, as the backend said likewise."""
    unstarted: dict[str, str] = field(default_factory=dict)
    """The last nodes that ended before they joined -> how; empty when one has joined since."""
    false_starts: int = 0
    """How often in a row."""
    no_room: bool = False
    """The last request for nodes was refused."""
    why_no_room: str = ""
    """In the backend's words; empty where it had none."""
    strikes: dict[str, list[int]] = field(default_factory=dict)
    cordoned: dict[str, str] = field(default_factory=dict)
    sequence: int = 0

    generation: int = 0
    launches: int = 0
    membership: Membership | None = None
    members: tuple[str, ...] = ()
    launch: dict[str, LaunchGroup] = field(default_factory=dict)
    launching: dict[str, int] = field(default_factory=dict)
    """Node -> action id of a LaunchGroup without a result."""
    active: bool = False
    """Workers of the current generation may run."""
    launched_ns: int = 0
    exits: dict[int, tuple[str, Exit]] = field(default_factory=dict)
    """Rank -> (node, how it ended), of the current generation, in the order of the news."""
    stepped: bool = False
    """All ranks have finished a step in this generation."""
    stepped_ns: int = 0
    """When that was heard."""
    step: int = -1
    """The last step known to be finished by all ranks."""
    staging: Quiesce | None = None
    stop: PendingStop | None = None
    placing: bool = False
    """Nothing runs and a new generation is wanted."""
    deadline_left_s: float | None = None
    """Of a suspended job's activeDeadline: it does not run meanwhile."""
    drain: Drain | None = None

    charges: dict[FailureClass, list[int]] = field(default_factory=dict)
    restarts: dict[FailureClass, int] = field(default_factory=dict)
    """Restarts charged since the beginning, by class."""
    user_errors: dict[tuple[str, str, str, int], int] = field(default_factory=dict)
    """(type, message, last frame, step) -> how often."""
    rehearsals: dict[str, int] = field(default_factory=dict)
    """Node -> when somebody injected a failure there."""
    ledger: CheckpointCatalog = field(default_factory=CheckpointCatalog)
    meshes: dict[int, Mesh] = field(default_factory=dict)
    """Mesh of recent generations."""
    incidents: list[IncidentRecord] = field(default_factory=list)
    num_incidents: int = 0
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Recent things worth telling that decided nothing."""
    traceback: str = ""
    """Of the error that ended the job."""

    @property
    def target_nodes(self) -> int:
        """The size wanted: nodes.max of the spec, until somebody resizes."""
        return self.job.spec.nodes.max

    @property
    def expected_nodes(self) -> int:
        """Requested and not yet joined."""
        asked = (a.count for a in self.inflight.values() if isinstance(a, RequestNodes))
        return sum(asked) + len(self.coming)

    @property
    def terminal(self) -> bool:
        return self.phase in ("succeeded", "failed", "cancelled")

    @property
    def mesh(self) -> Mesh | None:
        return self.membership.mesh if self.membership else None

    @property
    def min_nodes(self) -> int:
        return self.job.spec.nodes.min

    @property
    def incident(self) -> IncidentRecord | None:
        """The interruption that is not over yet."""
        if self.incidents and self.incidents[-1].first_step_ns is None:
            return self.incidents[-1]
        return None

    def node_of(self, rank: int) -> str:
        """The node that a rank of the current generation runs on; empty outside the world."""
        index = rank // self.job.spec.workers_per_node
        return self.members[index] if 0 <= index < len(self.members) else ""


PURPOSE_CODE: dict[Purpose, ReasonCode] = {
    "failure": "infrastructure",
    "resize": "resize",
    "preemption": "preemption",
    "suspend": "suspend",
    "cancel": "cancel",
    "deadline": "deadline",
    "finish": "finish",
}
