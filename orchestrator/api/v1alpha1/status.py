"""TrainingJobStatus: the `.status` of a TrainingJob, as a model that gives its schema.

The operator fills it from a JobView. It holds nothing that changes with every heartbeat and nothing
per rank, because each write goes to etcd.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .base import Part

MAX_INCIDENTS = 10
"""Keeps a status with long tracebacks below 100 kB; the journal has all incidents."""
Count = Annotated[int, Field(ge=0)]


class _Written(Part):
    """A part that the operator writes; not strict, because a time read back from JSON is a text."""

    model_config = ConfigDict(strict=False)


class Condition(_Written):
    """One aspect of the job's state, in the form that Kubernetes objects use."""

    type: Annotated[str, Field(max_length=316)]
    """Ready, Progressing, Suspended, Succeeded, Failed or Accepted."""
    status: Literal["True", "False", "Unknown"]
    """State of the condition."""
    observed_generation: Count | None = None
    """metadata.generation of the object that the condition describes."""
    last_transition_time: datetime
    """Time of the last change of the condition's status."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Reason as one CamelCase word, for programs."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Reason as a sentence with numbers, for people."""


class NodesStatus(_Written):
    """Numbers of nodes of the job."""

    ready: Count = 0
    """Nodes that train, without spares."""
    desired: Count = 0
    """spec.nodes.max; 0 while the job is suspended or has ended."""
    summary: str = ""
    """ready/desired, the column of `kubectl get`."""
    spares: Count = 0
    """Spare nodes that are ready."""


class CheckpointStatus(_Written):
    """The newest checkpoint in storage."""

    step: int
    """Last step that it contains."""
    time: datetime | None = None
    """Time of the commit."""
    generation: Count | None = None
    """Generation that wrote it."""
    size_bytes: Count | None = None
    """Size of all its shards, in bytes."""


class RequestStatus(_Written):
    """The answer to the last request of the annotation holdfast.dev/request."""

    id: str = ""
    """Id that the request names."""
    accepted: bool = False
    """false: the operator rejected the request."""
    message: str = ""
    """Current action, or reason why there is none."""
    step: Count | None = None
    """Step of the requested checkpoint."""


class IncidentStatus(_Written):
    """One interruption, from the fault to the next step of all ranks."""

    number: int
    """Number of the incident; counts from 1 over the life of the job."""
    time: datetime
    """Time of the fault, as far as is known."""
    failure_class: str = Field(alias="class")
    """Failure class: user, infrastructure, preemption or hang; resize or suspend if planned."""
    title: str
    """The incident in one line."""
    culprit_node: str | None = None
    """Pod that caused it."""
    culprit_machine: str | None = Field(default=None, alias="nodeName")
    """Kubernetes node on which that pod ran."""
    culprit_rank: int | None = None
    """Rank that caused it."""
    evidence: str | None = None
    """Evidence for the cause."""
    decision: str | None = None
    """The decision and its reason, with the numbers."""
    rehearsal: bool | None = None
    """true: the fault was injected with `holdfast debug`."""
    generation_before: Count | None = None
    """Generation that was interrupted."""
    generation_after: Count | None = None
    """Generation that was launched next."""
    world_size_before: Count | None = None
    """Number of workers before."""
    world_size_after: Count | None = None
    """Number of workers after."""
    resumed_after_step: int | None = None
    """Last step of the restored checkpoint; training resumed after it."""
    restored_from: str | None = None
    """Source of the restored checkpoint: memory, storage or nothing."""
    steps_lost: Count | None = None
    """Finished steps that had to be trained again."""
    steps_lost_at_least: bool | None = None
    """true: ranks were lost without a last report, so it may be a few more."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds spent in each part: detect, stop, place, launch, first-step; and total."""
    overtaken_by: int | None = None
    """Number of the next incident, if it came before all ranks had finished a step."""
    no_steps: bool | None = None
    """true: the workers report no steps, so the number of lost steps is unknown."""
    inferred: bool | None = None
    """true: they report no steps, and begin collectives again."""
    traceback: str | None = None
    """Traceback of the error, shortened."""


class TrainingJobStatus(_Written):
    """Status of the job. The operator writes it, every few seconds at most unless a condition
    changes.

    It is computed from the job's journal; edits of the status are overwritten.
    """

    conditions: list[Condition] = Field(default_factory=list, max_length=16)
    """Ready, Progressing, Suspended, Succeeded, Failed, Accepted: each with its own reason and
    sentence. Succeeded and Failed are final. Accepted is False while the job is refused."""
    observed_generation: Count | None = None
    """metadata.generation that the operator has applied."""
    state: str | None = None
    """Phase of the job, for people: pending, starting, running, recovering, finishing, suspending,
    suspended, succeeded, failed or cancelled. Programs should read the conditions."""
    reason: str | None = None
    """Reason why the job is in this phase now, with the numbers. For a job that waits: what its
    pods lack."""
    seen: datetime | None = None
    """Time at which the operator last looked at a job that has workers: a few seconds ago, unless
    no operator runs. The other fields hold for that time."""
    job_id: str | None = None
    """Identifies this job among earlier ones of the same name."""
    nodes: NodesStatus | None = None
    replicas: Count | None = None
    """Nodes that train; the replicas of the scale subresource."""
    selector: str | None = None
    """Label selector of the job's pods, for the scale subresource."""
    world_size: Count | None = None
    """Number of workers of the current generation."""
    gpus_per_worker: Count | None = None
    """GPUs of a worker, as spec.resources.gpu has it or, with auto, as the nodes have them."""
    mesh: str | None = None
    """Axes of the device mesh and their sizes."""
    strategy: str | None = None
    """Parallelism strategy: DDP, FSDP2 or HSDP."""
    generation: Count | None = None
    """Number of the current generation; each launch adds one, and checkpoints are fenced by it."""
    step: int | None = None
    """Last step that all ranks have finished."""
    total_steps: Count | None = None
    """Number of steps of the whole job, if the training script reports it."""
    step_s: float | None = None
    """Median time of the recent steps, in seconds."""
    tokens_per_second: float | None = None
    """Tokens of the global batch divided by the step time."""
    loss: float | None = None
    """Training loss of the last step."""
    restarts: Count | None = None
    """Number of restarts of all workers, after failures, resizes and suspends."""
    restarts_by_class: dict[str, int] = Field(default_factory=dict)
    """Restarts that were charged to a budget, by failure class; a resize is not."""
    goodput: str | None = None
    """Share of the time since the first launch in which new steps were trained, such as 98.2%."""
    ledger: dict[str, float] = Field(default_factory=dict)
    """Seconds by use of time; they add up to the time since submission."""
    start_time: datetime | None = None
    """Time at which the operator started the job."""
    completion_time: datetime | None = None
    """Time at which the job ended."""
    memory_step: int | None = None
    """Newest step of which the memory tier has all shards."""
    last_checkpoint: CheckpointStatus | None = None
    checkpoint_path: str | None = None
    """Directory or URL of the committed checkpoints."""
    storage_problem: str | None = None
    """Reason why the newest checkpoint could not be written to storage."""
    request: RequestStatus | None = None
    incidents: list[IncidentStatus] = Field(default_factory=list, max_length=MAX_INCIDENTS)
    """The last ten incidents, oldest first. The journal has all of them."""
    traceback: str | None = None
    """Traceback of the error that ended the job."""
