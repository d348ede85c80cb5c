"""TrainingJobStatus: what a cluster shows of a job. One definition gives its schema and `explain`.

Owns: the shape of `.status`. The operator fills it from a JobView; printer columns, the scale
subresource and `holdfast status --kubernetes` read it. Must not: hold heartbeats or anything per
rank: what changes with every beat does not belong into etcd.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .base import Part

MAX_INCIDENTS = 10
"""So that a status stays below 100 kB with long tracebacks; the journal has them all."""
Count = Annotated[int, Field(ge=0)]


class _Written(Part):
    """The operator wrote it and no person did; read back from JSON, a time is a text."""

    model_config = ConfigDict(strict=False)


class Condition(_Written):
    """One aspect of the job's state, by the conventions of Kubernetes."""

    type: Annotated[str, Field(max_length=316)]
    """Ready, Progressing, Suspended, Succeeded or Failed."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Count | None = None
    """metadata.generation that this was said about."""
    last_transition_time: datetime
    """When status last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Why, as one CamelCase word for machines."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Why, as a sentence with the numbers, for people."""


class NodesStatus(_Written):
    """Nodes of the job: how many there are and how many it wants."""

    ready: Count = 0
    """Nodes that train, spares not counted."""
    desired: Count = 0
    """What spec.nodes.max asks for; 0 while the job is suspended or has ended."""
    summary: str = ""
    """ready/desired, as the column of `kubectl get` shows it."""
    spares: Count = 0
    """Nodes that wait, warm and idle."""


class CheckpointStatus(_Written):
    """The newest checkpoint that is committed to storage."""

    step: int
    """Last step in it."""
    time: datetime | None = None
    """When it was committed."""
    generation: Count | None = None
    """Launch that wrote it."""
    size_bytes: Count | None = None
    """All its shards together."""


class IncidentStatus(_Written):
    """One interruption, from the fact that opened it to the next step of all ranks."""

    number: int
    """Counts from 1 over the life of the job."""
    time: datetime
    """When the fact became known."""
    failure_class: str = Field(alias="class")
    """user, infrastructure, preemption or hang; resize or suspend for planned ones."""
    title: str
    """What happened, in one line."""
    culprit_node: str | None = None
    """Pod that is to blame."""
    culprit_rank: int | None = None
    """Rank that is to blame."""
    evidence: str | None = None
    """What says so."""
    decision: str | None = None
    """What was done and why, with the numbers."""
    rehearsal: bool | None = None
    """Somebody asked for it with `holdfast chaos`."""
    generation_before: Count | None = None
    """Launch that was interrupted."""
    generation_after: Count | None = None
    """Launch that took over."""
    world_size_before: Count | None = None
    """Workers before."""
    world_size_after: Count | None = None
    """Workers after."""
    resumed_after_step: int | None = None
    """Training went on after this step."""
    restored_from: str | None = None
    """memory, storage or nothing."""
    steps_lost: Count | None = None
    """Finished steps that were computed again."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """By phase: stop, place, launch, first-step; and total."""
    overtaken_by: int | None = None
    """The next incident, where it came before all ranks had finished a step."""
    no_steps: bool | None = None
    """The workers report no steps, so nobody here knows what was lost."""
    traceback: str | None = None
    """Of the error, shortened."""


class TrainingJobStatus(_Written):
    """What is. Only the operator writes it, at most every few seconds unless a condition changes.

    Whatever stands here is computed anew from the job's journal: an edited status is overwritten.
    """

    conditions: list[Condition] = Field(default_factory=list, max_length=16)
    """Ready, Progressing, Suspended, Succeeded, Failed: each with a reason and a sentence."""
    observed_generation: Count | None = None
    """metadata.generation that the operator has acted on."""
    state: str | None = None
    """One word for people: pending, starting, running, recovering, finishing, suspending,
    suspended, succeeded, failed or cancelled. Programs look at conditions."""
    reason: str | None = None
    """Why it is in this state, with the numbers."""
    job_id: str | None = None
    """Distinguishes this job from earlier ones of the same name."""
    nodes: NodesStatus | None = None
    replicas: Count | None = None
    """Nodes that train: what the scale subresource reports."""
    selector: str | None = None
    """Label selector of the job's pods, as the scale subresource wants it."""
    world_size: Count | None = None
    """Workers of the current generation."""
    mesh: str | None = None
    """Its axes, in words."""
    strategy: str | None = None
    """DDP, FSDP2 or HSDP."""
    generation: Count | None = None
    """Launches of a membership so far; the fencing token of checkpoints."""
    step: int | None = None
    """Last step that all ranks have finished."""
    total_steps: Count | None = None
    """Steps of the whole job, where it has said so."""
    step_s: float | None = None
    """Median time of the recent steps."""
    tokens_per_second: float | None = None
    """Tokens of the global batch over the step time."""
    loss: float | None = None
    """Training loss of the last step."""
    restarts: Count | None = None
    """Launches that were charged to a budget; a resize is none."""
    restarts_by_class: dict[str, int] = Field(default_factory=dict)
    """The same by failure class."""
    goodput: str | None = None
    """Share of the time since the first launch that moved the model forward, such as 98.2%."""
    ledger: dict[str, float] = Field(default_factory=dict)
    """Where the time went: seconds by cause, which add up to the time since submission."""
    start_time: datetime | None = None
    """When the operator took the job up."""
    completion_time: datetime | None = None
    """When it ended."""
    memory_step: int | None = None
    """Newest step complete in the memory of the nodes."""
    last_checkpoint: CheckpointStatus | None = None
    checkpoint_path: str | None = None
    """Where committed checkpoints are."""
    storage_problem: str | None = None
    """Why the newest checkpoint that was tried is not in storage."""
    incidents: list[IncidentStatus] = Field(default_factory=list, max_length=MAX_INCIDENTS)
    """The last ten, oldest first. All of them are in the journal and in Events."""
    traceback: str | None = None
    """Of the error that ended the job."""
