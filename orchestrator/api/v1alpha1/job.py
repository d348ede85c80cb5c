"""TrainingJob: what a user writes. ONE definition gives validation, JSON schema and the reference.

Owns: the root of the tree and the checks across fields. Must not: read files (load.py does) or
decide anything (the planner and the core do).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from holdfast.orchestrator import limits

from .base import Part
from .env import problem_of_name
from .kubernetes import RESOURCE_PATTERN, Kubernetes
from .ray import Ray
from .resilience import Checkpoint, Recovery, Seconds
from .workload import MODULE_PATTERN, Entrypoint, Fabric, Nodes, Parallelism, Resources

API_VERSION = "holdfast.dev/v1alpha1"
KIND = "TrainingJob"

# RFC 1123 label, as Kubernetes demands of names that end up in host names.
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=52)]
Namespace = Annotated[str, Field(pattern=NAME_PATTERN, max_length=63)]

# A name with a domain before it, as batch/v1 demands of spec.managedBy.
MANAGER_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$"

PATTERNS = {
    NAME_PATTERN: "lower-case letters, digits and dashes, beginning and ending with no dash",
    RESOURCE_PATTERN: "a name such as nvidia.com/gpu: letters, digits, dashes, dots, one slash",
    MODULE_PATTERN: "a module's full name, such as package.train: as `python -m` takes it",
    MANAGER_PATTERN: "a domain, a slash and a name, such as example.com/dispatcher",
}
"""What a pattern means, for error messages."""


class Metadata(Part):
    """Identity of the job, as Kubernetes has it. Fields that only a cluster sets are accepted."""

    model_config = ConfigDict(extra="ignore")

    name: Name
    """Unique among the jobs of one place; at most 52 lower-case letters, digits and dashes."""
    namespace: Namespace = "default"
    """Where the cluster has namespaces."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Yours. On Kubernetes the job's pods have them too; elsewhere nothing reads them."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Yours. Pods do not get them; spec.kubernetes.podTemplate.metadata can give them some."""


class Metrics(Part):
    """What is exported to Prometheus."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of /metrics on the controller of a job of this machine; 0: any free one, shown by
    `holdfast status`. On Ray its exporter serves them, on Kubernetes the operator."""
    per_rank: bool = False
    """Series per rank, of a job of this machine only. Off by default: they grow with the world
    size."""


class JobSpec(Part):
    """What is wanted."""

    entrypoint: Entrypoint
    nodes: Nodes = Nodes()
    workers_per_node: int = Field(default=1, ge=1, le=64)
    """Worker processes on each node; with GPUs, one per GPU."""
    resources: Resources = Resources()
    image: str | None = None
    """Container image of a node, on Kubernetes."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of every worker. Overrides what a fabric profile chose; ranks and addresses
    cannot be overridden."""
    working_directory: str = "."
    """Where scripts run; relative to the spec file."""
    parallelism: Parallelism = Parallelism()
    fabric: Fabric = Fabric()
    checkpoint: Checkpoint = Checkpoint()
    recovery: Recovery = Recovery()
    metrics: Metrics = Metrics()
    kubernetes: Kubernetes = Kubernetes()
    ray: Ray = Ray()
    priority: int = Field(default=0, ge=-limits.MAX_COUNT, le=limits.MAX_COUNT)
    """Higher goes first among the jobs of one cluster that wait for room, on Kubernetes with
    kubernetes.gang none. Nothing else reads it: queues and schedulers have priority classes."""
    queue: str | None = None
    """Queue to be admitted by, with kubernetes.gang kueue (a LocalQueue of the job's namespace) or
    volcano (a Queue)."""
    managed_by: str | None = Field(default=None, max_length=63, pattern=MANAGER_PATTERN)
    """Controller that runs the job, as in a batch/v1 Job: a name such as example.com/dispatcher
    makes the operator of Holdfast leave the job alone. Without it, or with holdfast.dev/operator:
    Holdfast."""
    suspend: bool = False
    """true: hold the job, keeping its newest checkpoint."""
    active_deadline_s: Seconds | None = None
    """The job fails when it has run for this long; while it is suspended does not count."""
    ttl_s_after_finished: int | None = Field(
        default=None, ge=0, le=limits.MAX_SECONDS, alias="ttlSecondsAfterFinished"
    )
    """How long a finished job's record is kept, and the checkpoints in its directory. On one
    machine the first `holdfast run` after that deletes them."""

    @model_validator(mode="after")
    def _names_are_free(self) -> JobSpec:
        for name in self.env:
            if problem := problem_of_name(name):
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _mesh_is_possible(self) -> JobSpec:
        nodes, mesh = self.nodes, self.parallelism
        if nodes.max < nodes.min:
            raise ValueError(
                f"nodes.max: got {nodes.max}; expected at least nodes.min ({nodes.min})"
            )
        world = nodes.max * self.workers_per_node
        inner = mesh.tensor * mesh.context * mesh.pipeline
        if world % inner:
            raise ValueError(
                f"parallelism: got {inner} for tensor x context x pipeline; expected a divisor of "
                f"{world} workers (nodes.max {nodes.max} x workersPerNode {self.workers_per_node})"
            )
        room = world // inner
        if mesh.shard != "auto" and room % mesh.shard:
            raise ValueError(
                f"parallelism.shard: got {mesh.shard}; expected a divisor of {room} workers; "
                f"use {_choices(room)}"
            )
        if mesh.shard != "auto" and mesh.replicate not in ("auto", room // mesh.shard):
            raise ValueError(
                f"parallelism.replicate: got {mesh.replicate}; expected {room // mesh.shard} "
                f"({room} workers / shard {mesh.shard}); use auto or {room // mesh.shard}"
            )
        if mesh.shard == "auto" and mesh.replicate != "auto" and room % mesh.replicate:
            raise ValueError(
                f"parallelism.replicate: got {mesh.replicate}; expected a divisor of {room} "
                f"workers; use {_choices(room)}"
            )
        shard = mesh.shard
        if shard == "auto" and mesh.replicate != "auto":
            shard = room // mesh.replicate
        group = inner * (shard if shard != "auto" else 1)
        # Whole replica groups on whole nodes, see planner/choose.py.
        need = math.lcm(group, self.workers_per_node) // self.workers_per_node
        if nodes.min < need:
            raise ValueError(
                f"nodes.min: got {nodes.min}; expected at least {need}: replica groups of {group} "
                f"workers, {self.workers_per_node} on each node, fill whole nodes only then; raise "
                f"nodes.min or lower parallelism.shard"
            )
        keep = mesh.reshard_after_forward
        if not isinstance(keep, bool) and (keep < 1 or (shard != "auto" and shard % keep)):
            raise ValueError(
                f"parallelism.reshardAfterForward: got {keep}; expected true, false or a divisor "
                f"of shard ({shard})"
            )
        return self

    @model_validator(mode="after")
    def _recipe_can_do_it(self) -> JobSpec:
        recipe, mesh = self.entrypoint.recipe, self.parallelism
        if recipe is None:
            return self
        for axis in ("tensor", "context", "pipeline"):
            if getattr(mesh, axis) > 1:
                raise ValueError(
                    f"parallelism.{axis}: got {getattr(mesh, axis)}; expected 1 with the recipe "
                    f"{recipe.name}, which splits data and states only; use your own script"
                )
        return self


class TrainingJob(Part):
    """A training job, in the shape that `kubectl apply` takes."""

    api_version: Literal["holdfast.dev/v1alpha1"]
    kind: Literal["TrainingJob"]
    metadata: Metadata
    spec: JobSpec

    @property
    def name(self) -> str:
        return self.metadata.name


def _choices(total: int) -> str:
    divisors = [str(n) for n in range(1, total + 1) if total % n == 0]
    return divisors[0] if len(divisors) == 1 else ", ".join(divisors[:-1]) + " or " + divisors[-1]
