"""The view of a job: what display, report, status, metrics and `--output json` show.

projection.py fills it. Its field names are public.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.orchestrator.core.transitions import JobPhase as JobPhase
from holdfast.orchestrator.protocol.facts import StepReport

NodeState = Literal["joining", "member", "spare", "lost", "cordoned"]
LedgerCause = Literal[
    "queued", "productive", "starting", "recovering", "redone", "stalled", "waiting", "suspended",
    "finishing",
]  # fmt: skip
"""Causes of time since submission. `queued`: before the first launch, which goodput leaves out;
`redone`: steps trained again after a loss; `stalled`: by staging; `waiting`: for nodes."""


class WorkerView(msgspec.Struct, kw_only=True):
    rank: int
    local_rank: int = 0
    state: Literal["starting", "running", "suspect", "hung", "exited"] = "starting"
    phase: str = ""
    step: int = -1
    memory_bytes: int = 0
    """device_memory_peak_bytes of this worker; 0: not known."""


class NodeView(msgspec.Struct, kw_only=True):
    name: str
    state: NodeState
    address: str = ""
    heartbeat_age_s: float | None = None
    strikes: int = 0
    workers: list[WorkerView] = []


class Incident(msgspec.Struct, kw_only=True):
    """One interruption, from the fault to the next step of all ranks."""

    number: int
    at_ns: int
    """Wall clock, Unix epoch."""
    failure_class: str
    """user, infrastructure, preemption, hang; resize, suspend for planned ones."""
    title: str
    """One line: `worker 2 on node-1 was killed by SIGKILL`."""
    culprit_node: str = ""
    culprit_machine: str = ""
    """Kubernetes node of that pod; only the Kubernetes host knows it."""
    culprit_rank: int | None = None
    evidence: str = ""
    decision: str = ""
    """The decision and its reason, with the numbers."""
    rehearsal: bool = False
    """The fault was injected with `holdfast debug`."""
    generation_before: int = 0
    generation_after: int | None = None
    world_size_before: int = 0
    world_size_after: int | None = None
    resumed_after_step: int | None = None
    restored_from: Literal["memory", "storage", "nothing", ""] = ""
    steps_lost: int | None = None
    """Finished steps that have to be trained again."""
    steps_lost_at_least: bool = False
    """Ranks were lost without a last report, so it may be a few more."""
    seconds: dict[str, float] = {}
    """Phase -> seconds: detect (where known), stop, place, launch, first-step; and total."""
    overtaken_by: int | None = None
    """Number of the next incident, if it began before all ranks had finished a step."""
    no_steps: bool = False
    """The script reports no steps: the incident is over when all ranks begin collectives again. If
    they begin none, its end is unknown. So is the number of lost steps."""
    inferred: bool = False
    """True if the script reports no steps, and its ranks begin collectives again."""
    traceback: str = ""
    stacks: dict[str, str] = {}


class IncidentCount(msgspec.Struct, kw_only=True):
    """Incidents of one class since submission."""

    failure_class: str
    scope: str
    """Extent of the loss: worker, node, or job (planned ones)."""
    count: int


class PhaseTotal(msgspec.Struct, kw_only=True):
    """One phase of all incidents since submission."""

    count: int
    seconds: float


class HostMemoryView(msgspec.Struct, kw_only=True):
    """Memory of the node that can hold least of the staged state. Bytes; buffers are per worker."""

    node: str
    buffers: int
    buddy: bool
    """Each shard is copied to the memory of another node."""
    given_up: str
    """nothing, copies, buffers, memory-tier or checkpoints: the last thing in that order that does
    not fit, and all before it."""
    shard_bytes: int
    workers: int
    usable_bytes: int
    limit_bytes: int
    text: str


class CheckpointView(msgspec.Struct, kw_only=True):
    step: int
    generation: int
    num_bytes: int = 0
    committed_ns: int = 0


class RefusedCheckpoint(msgspec.Struct, kw_only=True):
    """A committed checkpoint that cannot be used."""

    step: int
    generation: int
    refusal: str = ""
    """damaged or missing."""
    problem: str = ""
    """Text of the reader."""


class PlannedView(msgspec.Struct, kw_only=True):
    """Predictions of the planner for the running mesh."""

    device_memory_bytes: int
    """Peak of torch's tensors on one worker's device."""
    sent_bytes: int
    """Bytes that one rank sends in a step."""
    step_s: float | None = None
    """None: the device is not in the catalogue."""
    categories: dict[str, int] = {}
    """device_memory_bytes by what takes it, in the phase of the step that needs most."""


class ProgressPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled step of all ranks."""

    at_ns: int
    step: int
    loss: float | None = None
    step_s: float = 0.0
    tokens_per_s: float = 0.0


class JobView(StepReport, msgspec.Struct, kw_only=True, frozen=False):  # type: ignore[misc]
    """StepReport's numbers belong to the newest step."""

    name: str
    job_id: str = ""
    state: JobPhase = "pending"
    reason: str = ""
    """Reason why it is in this state, with the numbers."""
    submitted_ns: int = 0
    finished_ns: int | None = None
    now_ns: int = 0
    generation: int = 0
    world_size: int = 0
    gpus_per_worker: int = 0
    """0: the job trains on the CPU."""
    mesh: str = ""
    """Empty: not known. A script that does not use the session chooses its parallelism itself."""
    strategy: str = ""
    restarts: dict[str, int] = {}
    """Restarts that were charged to a budget, by failure class."""
    relaunches: int = 0
    """Number of restarts of all workers: after failures, resizes and suspends."""
    step: int = -1
    """Last step finished by all ranks; -1: none."""
    tokens_per_s: float = 0.0
    mfu: float | None = None
    """None where the peak FLOP/s of the device is unknown."""
    planned: PlannedView | None = None
    """None: a script or a module, or nothing has been launched."""
    history: list[ProgressPoint] = []
    """Samples over the whole job, oldest first, at most 240."""
    tokens_total: int = 0
    """Trained so far; steps that were trained twice count twice."""
    first_step_s: float | None = None
    """Seconds from submission to the first step of all ranks."""
    commits: int = 0
    """Checkpoints committed to storage so far."""
    durable_s: float = 0.0
    """Longest write of a shard of the newest checkpoint, from memory to durable."""
    storage_problem: str = ""
    """Reason why the newest checkpoint could not be written to storage; empty: it is there."""
    journal_problem: str = ""
    """Reason why the controller's newest records are in its memory only; empty: they are not."""
    storage_failures: int = 0
    """Shards and manifests that could not be written so far."""
    storage_skipped: int = 0
    """Shards skipped so far because an older one was still being written."""
    memory_step: int = -1
    """Newest step complete in the memory tier."""
    copied_step: int = -1
    """Newest step of which all buddies hold a copy; -1: none, or no buddies are needed."""
    copies: str = ""
    """Sentence on how often all buddies get a copy, and why."""
    keeping: str = ""
    """Workers that start again when one fails, and why; empty: not known."""
    staging: str = ""
    """Every how many steps the memory tier stages, and why."""
    stage_every_steps: int = 0
    """0: there is no memory tier."""
    host_memory: HostMemoryView | None = None
    """None: not planned yet."""
    checkpoints: list[CheckpointView] = []
    """Committed to storage, oldest first."""
    refused_checkpoints: list[RefusedCheckpoint] = []
    own_checkpoint: str | None = None
    """Newest checkpoint of a script that keeps its own; empty: none was seen. None: Holdfast has
    the state."""
    hold: str = ""
    """Reason why the job waits for a user's decision; empty: it does not."""
    checkpoint_path: str = ""
    result: str = ""
    """Directory of the trained model; empty: checkpoints have it."""
    nodes: list[NodeView] = []
    incidents: list[Incident] = []
    """The newest ones, oldest first; the counters below cover all."""
    num_incidents: int = 0
    incident_counts: list[IncidentCount] = []
    recovery: dict[str, PhaseTotal] = {}
    """Recovery times by phase, and total."""
    steps_lost: int | None = 0
    """Finished steps that had to be trained again; None: not known, the script reports none."""
    steps_lost_at_least: bool = False
    ledger: dict[str, float] = {}
    goodput: float = 0.0
    """productive / time since the first launch, 0 to 1."""
    traceback: str = ""
    """Traceback of the error that ended the job."""
    metrics_port: int = 0
    controller_alive: bool = True
    controller_restarts: int = 0
