"""The state of one job's controller.

Only code that `Controller.step` calls changes it; the runtime, the monitor and the tests read it.
Dictionaries keep insertion order and no set is ever iterated, so a replay gives the same state
under any hash seed.

Snapshots hold these records field by field.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from msgspec import Struct, field

from .. import limits
from ..api.v1alpha1 import TrainingJob
from ..planner.choose import memory_of_least
from ..planner.memory import WorkerMemory
from ..protocol.facts import (
    SCRIPT_SOURCES,
    Exit,
    Membership,
    OwnCheckpoint,
    ShardFile,
    Stack,
    StepSource,
    SuspectBasis,
)
from ..protocol.mesh import Mesh
from .actions import Inflight, LaunchGroup, Outcome, Reason, ReasonCode
from .roster import Promises, Roster, StepKey
from .sizes import Sizes
from .transitions import TERMINAL, JobPhase

Place = tuple[str, str, str, int]
"""(type of the error, message, innermost frame, last finished step) of a failure."""
FailureClass = Literal["user", "infrastructure", "preemption", "hang"]
Intent = Literal["run", "suspend", "cancel", "deadline"]
Purpose = Literal[
    "failure", "resize", "new-code", "preemption", "suspend", "cancel", "deadline", "finish",
]  # fmt: skip

TimerName = Literal[
    "gather", "replacement", "capacity", "grow", "standbys", "join", "preempt", "launch",
    "launch-again", "stop", "stage", "persist", "drain", "commit", "request", "expect", "release",
    "rejoin", "cadence", "deadline", "finish", "storage",
]  # fmt: skip
# Timers by what they belong to; code that ends it disarms its timers.
PLACEMENT: tuple[TimerName, ...] = ("gather", "replacement", "capacity", "storage")
"""Waiting for nodes, or for a store that could not be read, before a launch."""
PLANNED: tuple[TimerName, ...] = ("grow", "standbys", "join", "preempt")
"""Waiting before a planned interruption of the running generation."""
LAUNCH: tuple[TimerName, ...] = ("launch", "launch-again")
DRAIN: tuple[TimerName, ...] = ("persist", "drain")

Refusal = Literal["", "damaged", "missing"]
"""Reason why a committed checkpoint is not used: its bytes are not those that were written, or the
store, which can be read, does not have it."""


class DrainKind(StrEnum):
    """Reason why the newest state in memory is written to storage."""

    FINISH = "finish"
    """All workers are done."""
    SUSPEND = "suspend"
    END = "end"
    """The job ends before its last step."""
    AT_RISK = "at-risk"
    """The job waits for nodes, and a node that holds a part of the state leaves."""


class Quiesce(Struct):
    """A step that all ranks are asked to stage before a planned interruption."""

    step: int
    waiting: dict[str, int]
    """Node -> action id of its StageStep."""
    requested_ns: int
    """Time of the last request for the interruption."""
    again: bool = False
    """Another step was asked for before."""
    missed: bool = False
    """A node could not stage this one."""


class StagingInterval(Struct, frozen=True):
    """Every how many steps the memory tier stages, chosen by staging_interval.py."""

    every_steps: int
    since_step: int
    """All ranks change at this step; 0: their generation began with it."""
    judged_from: int
    """Step from which on measurements are of this interval."""
    chosen_ns: int
    reason: Reason
    for_storage: bool = False
    """Memory holds one buffer per worker: only steps that go to storage are staged."""


class StagingSample(Struct, frozen=True):
    """Time of a staging on the slowest rank."""

    number: int
    """Stagings of the job up to it, had it always had this interval."""
    stall_s: float
    copy_s: float
    staging_s: float


class Cause(Struct, frozen=True):
    """Reason why a generation is interrupted."""

    purpose: Purpose
    reason: Reason
    stacks: bool = False
    """The agents shall collect the stacks of their workers."""
    lost: tuple[str, str, str] | None = None
    """(node, cause, detail) of a member that was lost."""
    hang: tuple[tuple[int, ...], str] | None = None
    """(suspected ranks, evidence)"""
    hang_basis: SuspectBasis = ""
    launch_failure: tuple[str, str] | None = None
    """(node, detail)"""
    refused: str = ""
    """Problem of the checkpoint that the generation started from."""
    journal_behind: str = ""
    """Nodes run a generation that is not in the journal."""
    leaving: tuple[tuple[str, str], ...] = ()
    """(node, reason) of members that have a preemption notice."""


class PendingStop(Struct):
    """A generation that is being stopped, and what is known of the cause."""

    purpose: Purpose
    reason: Reason
    started_ns: int
    stacks_wanted: bool
    grace_s: float
    waiting: dict[str, int] = field(default_factory=dict)
    """Node -> action id of its StopGroup."""
    stacks: list[Stack] = field(default_factory=list)
    lost: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Members lost in this interruption -> (cause, detail), in the order of the events."""
    lost_first: bool = False
    """The loss of a node was the first event of this interruption."""
    hang: tuple[tuple[int, ...], str] | None = None
    hang_basis: SuspectBasis = ""
    launch_failure: tuple[str, str] | None = None
    refused: str = ""
    journal_behind: str = ""
    leaving: list[tuple[str, str]] = field(default_factory=list)
    """(node, reason) of members that have a preemption notice."""
    ended_ns: int | None = None
    """Time at which the first worker failed by itself."""
    last_seen_ns: int | None = None
    """Time at which the first lost member was last known to be there."""

    def add(self, cause: Cause) -> None:
        """Another cause of the same interruption. Of launch failures the first one counts."""
        if cause.lost is not None:
            node, why, detail = cause.lost
            self.lost[node] = (why, detail)
            self.waiting.pop(node, None)
        self.launch_failure = self.launch_failure or cause.launch_failure
        self.refused = cause.refused or self.refused
        self.journal_behind = cause.journal_behind or self.journal_behind


class IncidentRecord(Struct):
    """One interruption, from the fault to the next step of all ranks."""

    number: int
    at_ns: int
    """Time of the fault, as far as is known."""
    noticed_ns: int
    """Time at which the controller noticed it."""
    purpose: Purpose
    generation_before: int
    world_size_before: int
    failure_class: FailureClass | None = None
    rule: str = ""
    title: str = ""
    evidence: str = ""
    culprit_node: str = ""
    culprit_rank: int | None = None
    fault_injected: bool = False
    """A user caused it with `holdfast debug`."""
    decision: str = ""
    step_before: int = -1
    """The last step known to be finished by all ranks."""
    generation_after: int | None = None
    world_size_after: int | None = None
    resumed_after_step: int | None = None
    resumed_estimated: bool = False
    """A script that does not report each step began after about that one."""
    restored_from: Literal["memory", "storage", "nothing", ""] = ""
    shows_progress: bool = False
    """The job has shown progress before, so the incident is over when it does so again."""
    at_least: bool = False
    """Ranks were lost without a last report: more steps may have been finished than step_before."""
    stopped_ns: int | None = None
    launched_ns: int | None = None
    started_ns: int | None = None
    """Time at which all nodes had started their workers."""
    first_step_ns: int | None = None
    """Time at which all ranks had finished a step, or begun collectives if none is reported."""
    traceback: str = ""
    stacks: dict[int, str] = field(default_factory=dict)


class PendingCheckpoint(Struct):
    """Shard files that are durable but that no manifest names yet."""

    step: int
    generation: int
    mesh: Mesh
    files: dict[int, ShardFile] = field(default_factory=dict)
    commit_action: int | None = None


class CommittedCheckpoint(Struct):
    """A checkpoint in the storage tier whose manifest is durable."""

    step: int
    generation: int
    num_shards: int
    num_bytes: int
    committed_ns: int
    refused: bool = False
    """A reader found it damaged or missing."""
    refusal: Refusal = ""
    problem: str = ""
    """The reader's text, with the names of files and tensors that it knows."""

    @property
    def key(self) -> StepKey:
        return (self.step, self.generation)


class CheckpointCatalog(Struct):
    """Content of the storage tier, according to manifests and reports."""

    pending: dict[StepKey, PendingCheckpoint] = field(default_factory=dict)
    committed: list[CommittedCheckpoint] = field(default_factory=list)
    """Oldest first, without those that retention has dropped."""
    distrusted: dict[StepKey, int] = field(default_factory=dict)
    """States in memory from which generations failed before their first step -> how often."""
    last_commit_ns: int = 0
    start_over: bool = False
    """A user wants to begin at step 0, although there were checkpoints; until the next commit."""


class Drain(Struct):
    """The newest state in memory, on its way to storage."""

    kind: DrainKind
    step: int
    generation: int
    num_shards: int
    attempts: int = 0
    problem: str = ""
    """Reason why the last attempt failed."""
    hopeless: bool = False
    """Another attempt cannot succeed."""


class Hold(Struct, frozen=True):
    """The job waits for a user's decision: none of its committed checkpoints can be used."""

    since_ns: int
    text: str
    ignored: bool = False
    """The script can use its own checkpoints, and has begun at step 0 all the same."""


class Joining(Struct):
    """Workers that are started beside the running generation; joining.py writes it."""

    planned_for: tuple[int, int, int]
    """The running generation, the size of the next one, and the number of usable nodes."""
    members: tuple[str, ...]
    """Nodes of the next generation, in the order of their node ranks."""
    actions: dict[str, int]
    """Node that joins -> action id of its LaunchGroup, which ends when its workers are ready."""
    problem: str = ""
    """Reason why a node's workers start after the stop; empty: none."""


class Keeping(Struct):
    """Worker processes that survive their generation; keeping.py writes it."""

    reported: bool = False
    """Rank 0 of the running generation keeps its process."""

    workers: dict[str, int] = {}
    """Node -> processes that it has kept of the newest generation."""
    fixed_size: str = ""
    """Reason why they cannot go on in a world of another size."""
    why_not: str = ""
    """Reason that a worker gave why its process cannot be kept."""
    replicas: int = 1
    """Replicas in the last generation whose workers all were new."""
    renewed_in: int = 0
    """The number of that generation."""
    doubtful: tuple[int, int] = (1, 0)
    """First and last generation whose states may differ between replicas; none at first."""
    again: int = 0
    """The generation after which processes run their script again."""
    num_failures: int = 0
    """Generations with kept processes that failed before their first step."""
    why_never: str = ""
    """Reason why this job keeps none any more; empty: it may."""

    def doubts(self, generation: int) -> bool:
        """True if what this generation staged is neither restored nor written to storage."""
        return self.doubtful[0] <= generation <= self.doubtful[1]


class Supply(Struct):
    """Nodes that are promised or given back; provisioning.py writes it."""

    promised: Promises = field(default_factory=Promises)
    released: dict[str, str] = {}
    """Nodes that were lost or released -> why. Names are never used again."""
    unreleased: dict[str, str] = {}
    """Nodes whose release failed and is tried again -> why they were released."""
    start_durations_ns: list[int] = []
    """Times from promise to join of the last nodes that joined."""
    expected_start_ns: int | None = None
    """Time that a node takes to start, as the backend last reported."""
    start_limit_s: float = limits.NODE_WAIT_S
    """Seconds after which a promised node is released, as the backend last said."""
    failed_starts: dict[str, str] = {}
    """The last nodes that ended before they joined -> how; empty when one has joined since."""
    num_failed_starts: int = 0
    """Failed starts in a row."""
    denied: bool = False
    """The last request for nodes was refused."""
    denial: str = ""
    """Reason, as the backend said; may be empty."""


class Staging(Struct):
    """Steps that the memory tier stages; staging_interval.py writes it."""

    interval: StagingInterval | None = None
    """The interval of checkpoint.memory.everySteps: auto, once stagings were measured."""
    samples: list[StagingSample] = []
    """The last stagings in this interval."""


class GivenUp(Struct):
    """Uses of memory that the running generation lacks room for; host_memory.py writes it."""

    copies: bool = False
    """A member has no memory for buddy copies, so none are made."""
    memory_tier: bool = False
    """A member has memory for one buffer per worker, or for none."""


class OwnCheckpointState(Struct):
    """Checkpoints that the script writes by itself; own_checkpoints.py writes it."""

    written: dict[str, OwnCheckpoint] = {}
    """Path -> what was written there; the last one last."""
    read_in: int = 0
    """The last generation in which rank 0 read one of them."""
    ignored_in: int = 0
    """The last generation that is known to have begun at step 0 although there were some."""


class Ledger(Struct):
    """Cost of failures, and who is blamed; recovery.py writes it."""

    charges: dict[FailureClass, list[int]] = {}
    """Restarts charged to the restart budgets, by class -> when."""
    restarts: dict[FailureClass, int] = {}
    """Restarts charged since the submission, by class."""
    failed_at: dict[Place, list[tuple[str, int]]] = {}
    """Place of a failure -> (culprit node, time) of each."""
    strikes: dict[str, list[int]] = {}
    cordoned: dict[str, str] = {}
    injected_faults: dict[str, int] = {}
    """Node -> when `holdfast debug` injected a fault there."""
    num_store_failures: int = 0
    """Generations in a row that could not read the store."""


class Group(Struct):
    """The workers of the current generation."""

    membership: Membership | None = None
    members: tuple[str, ...] = ()
    """Nodes in the order of their node ranks."""
    launches: dict[str, LaunchGroup] = {}
    launching: dict[str, int] = {}
    """Node -> action id of a LaunchGroup without a result."""
    active: bool = False
    """Workers may run."""
    launched_ns: int = 0
    exits: dict[int, tuple[str, Exit]] = {}
    """Rank -> (node, how it ended), in the order of the events."""
    first_step_ns: int = 0
    """Time of the report that all ranks have finished a step; 0: they have not."""

    def launch(self, action_id: int, action: LaunchGroup) -> None:
        self.launches[action.node], self.launching[action.node] = action, action_id

    def launched(self, node: str) -> None:
        self.launching.pop(node, None)


class JobState(Struct):
    """The state of one job."""

    job: TrainingJob
    """The job as submitted, with the size and the limits that were last requested."""
    job_id: str
    submitted_ns: int
    now_ns: int
    checkpoint_path: str = ""
    """The path as submitted."""
    phase: JobPhase = "pending"
    reason: Reason = field(default_factory=lambda: Reason("submitted", "submitted"))
    intent: Intent = "run"
    intent_reason: str = ""
    """Sentence that names who requested the intent."""
    last_controller_ns: int = 0
    """Time of the last record of the controller before this one; 0: this is the first."""
    step_s: float = 0.0
    """The last reported step time."""
    resize_pending: bool = False
    """Another size was requested and no generation has it yet."""
    new_code: bool = False
    """A generation with newly edited code was requested, and none has been launched yet."""
    finish_action: int | None = None
    """FinishJob without a result."""
    outcome: Outcome | None = None
    """The job's end, once it is certain; the phase changes when the last action is done."""
    termination_reason: Reason | None = None
    """Reason why the job ends before its last step; its newest state goes to storage first."""
    incarnation: int = 0
    next_action_id: int = 1
    inflight: Inflight = field(default_factory=Inflight)
    timers: dict[TimerName, int] = field(default_factory=dict)
    """Name -> when it is due."""

    nodes: Roster = field(default_factory=Roster)
    supply: Supply = field(default_factory=Supply)
    num_joined: int = 0

    generation: int = 0
    num_launches: int = 0
    group: Group = field(default_factory=Group)
    step: int = -1
    """The last step known to be finished by all ranks."""
    counted_by: StepSource = ""
    """Source of the steps of the newest generation that had any."""
    inspected: dict[int, Stack] = field(default_factory=dict)
    """Rank -> what it did when a hang was last suspected; empty while there is progress."""
    quiesce: Quiesce | None = None
    stop: PendingStop | None = None
    keeping: Keeping = field(default_factory=Keeping)
    joining: Joining | None = None
    needs_placement: bool = False
    """No workers run and a new generation is wanted."""
    deadline_left_s: float | None = None
    """Seconds left of activeDeadlineSeconds, which does not run while the job is suspended."""
    drain: Drain | None = None
    hold: Hold | None = None
    """Hold for a user's decision; the intent is then "suspend"."""
    staging: Staging = field(default_factory=Staging)
    given_up: GivenUp = field(default_factory=GivenUp)

    ledger: Ledger = field(default_factory=Ledger)
    sizes: Sizes = field(default_factory=Sizes)
    """World sizes at which the script has worked, or failed."""
    catalog: CheckpointCatalog = field(default_factory=CheckpointCatalog)
    own: OwnCheckpointState = field(default_factory=OwnCheckpointState)
    meshes: dict[int, Mesh] = field(default_factory=dict)
    """Mesh of recent generations."""
    incidents: list[IncidentRecord] = field(default_factory=list)
    num_incidents: int = 0
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Recent remarks for people; they decide nothing."""
    traceback: str = ""
    """Traceback of the error that ended the job."""

    @property
    def target_nodes(self) -> int:
        """The wanted size: nodes.max of the spec, until a resize is requested."""
        return self.job.spec.nodes.max

    @property
    def expected_nodes(self) -> int:
        """Requested and not yet joined."""
        return self.inflight.num_requested + len(self.supply.promised)

    @property
    def terminal(self) -> bool:
        return self.phase in TERMINAL

    @property
    def mesh(self) -> Mesh | None:
        return self.group.membership.mesh if self.group.membership else None

    @property
    def runs(self) -> bool:
        """Workers run, and nothing stops them."""
        return self.group.active and self.stop is None

    @property
    def worker_memory(self) -> WorkerMemory:
        """Memory of a worker on the smallest of the nodes that are here."""
        return memory_of_least(self.job, *self.nodes.least_memory())

    @property
    def keeps_own_checkpoints(self) -> bool:
        """The script does, or nothing is known of its steps: Holdfast stages and restores none."""
        return self.counted_by in (*SCRIPT_SOURCES, "collectives")

    def led_to(self, generation: int) -> IncidentRecord | None:
        """The newest incident, if this generation was launched after it and no later one began."""
        last = self.incidents[-1] if self.incidents else None
        return last if last is not None and last.generation_after == generation else None

    @property
    def may_keep_own_checkpoints(self) -> bool:
        """The same, also before anything is known of its steps."""
        return self.job.spec.entrypoint.recipe is None and self.counted_by != "session"

    @property
    def incident(self) -> IncidentRecord | None:
        """The interruption that is not over yet."""
        if self.incidents and self.incidents[-1].first_step_ns is None:
            return self.incidents[-1]
        return None

    @property
    def stage_every_steps(self) -> int:
        """Every how many steps the running generation stages, or will once a change is effective.
        Without a memory tier: for storage."""
        checkpoint, chosen = self.job.spec.checkpoint, self.staging.interval
        if chosen and (checkpoint.memory.every_steps == "auto" or chosen.for_storage):
            return chosen.every_steps
        return checkpoint.staging_interval

    @property
    def stages_for_storage_only(self) -> bool:
        """One buffer per worker: only the steps that go to storage are staged. With
        storage.everySeconds those are not known beforehand."""
        checkpoint = self.job.spec.checkpoint
        by_step = bool(checkpoint.memory.every_steps) and checkpoint.storage.every_s is None
        return self.given_up.memory_tier and by_step

    def is_member(self, name: str) -> bool:
        """A node of the current generation, whose workers may run."""
        return self.group.active and name in self.group.launches

    def node_of(self, rank: int) -> str:
        """The node that a rank of the current generation runs on; empty outside the world."""
        index = rank // self.job.spec.workers_per_node
        return self.group.members[index] if 0 <= index < len(self.group.members) else ""

    def gpu_model(self, node: str) -> str:
        """Model of a node's first GPU; empty without one, or without the node."""
        entry = self.nodes.get(node)
        return entry.facts.gpus[0].name if entry is not None and entry.facts.gpus else ""


PURPOSE_CODE: dict[Purpose, ReasonCode] = {
    "failure": "infrastructure", "resize": "resize", "new-code": "new-code",
    "preemption": "preemption", "suspend": "suspend", "cancel": "cancel", "deadline": "deadline",
    "finish": "finish",
}  # fmt: skip
