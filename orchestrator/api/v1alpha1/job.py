"""TrainingJob, the root of the spec: one definition gives validation, JSON schema, CRD and docs.

Checks across fields are validators here; checks inside one part stand in its model.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from holdfast.orchestrator import limits

from .backends import Kubernetes, Ray
from .base import RESOURCE_PATTERN, Count, Part, Seconds, Word
from .mesh_checks import MESH_CHECKS, size_problem
from .notify import Notify
from .parallelism import Parallelism
from .resilience import Checkpoint, Recovery
from .workload import (
    LINE_PATTERN,
    MODULE_PATTERN,
    Entrypoint,
    Fabric,
    Nodes,
    Resources,
)

Elasticity = (
    Literal["any", "fixed"]
    | Annotated[tuple[Count, ...], Field(min_length=1, max_length=limits.MAX_SIZES)]
)

API_VERSION = "holdfast.dev/v1alpha1"
KIND = "TrainingJob"

# An RFC 1123 label, as Kubernetes requires of names that become part of host names.
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=52)]
ModuleName = Annotated[str, Field(pattern=MODULE_PATTERN, max_length=253)]
Namespace = Annotated[str, Field(pattern=NAME_PATTERN, max_length=63)]

# A domain, a slash and a name, as batch/v1 requires of spec.managedBy.
MANAGER_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$"

CODE_PATTERN = r"^[0-9a-f]{64}$"

PATTERNS = {
    NAME_PATTERN: "lower-case letters, digits and dashes, beginning and ending with no dash",
    RESOURCE_PATTERN: "a name such as nvidia.com/gpu: letters, digits, dashes, dots, one slash",
    MODULE_PATTERN: "a module's full name, such as package.train: as `python -m` takes it",
    LINE_PATTERN: "one line",
    CODE_PATTERN: "64 hexadecimal digits, as `holdfast run --kubernetes` writes them",
    MANAGER_PATTERN: "a domain, a slash and a name, such as example.com/dispatcher",
}
"""Pattern -> what it means, for error messages."""

# -- environment variables ----------------------------------------------------------------------
CONTRACT_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables that Holdfast sets for each worker; a job cannot override them."""
RESERVED_PREFIXES = ("TORCHELASTIC_", "HOLDFAST_")

HIDDEN = "(hidden)"
_SECRET = re.compile(r"SECRET|TOKEN(?!IZ)|PASSW|CREDENTIAL|KEY|AUTH|^FSSPEC_", re.IGNORECASE)
_IN_A_URL = re.compile(r"://[^/@\s]+@")


def redacted(name: str, value: str) -> str:
    """The value of an environment variable for display: hidden if the name suggests a secret, and
    without a user and a password in a URL."""
    return HIDDEN if _SECRET.search(name) else _IN_A_URL.sub(f"://{HIDDEN}@", value)


def redacted_document(
    document: dict[str, Any], of_line: dict[str, str] | None = None
) -> dict[str, Any]:
    """A job's document for display. `of_line`: variables of its command, which spec.env has in the
    document of a submitted job."""
    spec = dict(document.get("spec", {}))
    entry, env = spec.get("entrypoint", {}), {**(of_line or {}), **spec.get("env", {})}
    if spec.get("notify"):
        spec["notify"] = [n | ({"url": HIDDEN} if n.get("url") else {}) for n in spec["notify"]]
        document = {**document, "spec": spec}
    hidden = {name: text for name, value in env.items() if (text := redacted(name, value)) != value}
    if not hidden:
        return document
    if spec.get("env"):
        spec["env"] = {name: hidden.get(name, value) for name, value in spec["env"].items()}
    if line := entry.get("command"):
        spec["entrypoint"] = {**entry, "command": _redacted_command(line, hidden)}
    return {**document, "spec": spec}


def _redacted_command(line: str, hidden: dict[str, str]) -> str:
    """The line without the values of hidden variables, which stand before the program."""
    for name, text in hidden.items():
        quoted = rf"'{name}=[^']*'|\b{name}=(\"[^\"]*\"|'[^']*'|\S+)"
        line = re.sub(quoted, f"{name}={text}".replace("\\", r"\\"), line)
    return line


def _problem_of_variable(name: str, value: str) -> str:
    """Reason why a job cannot set this variable, in the `got; expected; fix` form; "" if it can."""
    if name in CONTRACT_NAMES or name.startswith(RESERVED_PREFIXES):
        return (
            f"env.{name}: got a variable that Holdfast sets for each worker; expected any other "
            f"name; remove it: ranks and addresses change with every generation"
        )
    num_bytes = len(name) + len(value.encode()) + 2
    if num_bytes > limits.MAX_VARIABLE_BYTES:
        return (
            f"env.{name}: got {len(value.encode())} bytes; expected at most "
            f"{limits.MAX_VARIABLE_BYTES - len(name) - 2}: the kernel starts no process with a "
            f"longer variable; write the text to a file that the nodes have, and its path here"
        )
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return f"env: got the name {name!r}; expected letters, digits and underscores"
    return ""


class Metadata(Part):
    """Identity of the job, as in Kubernetes. Fields that only a cluster sets are accepted."""

    model_config = ConfigDict(extra="ignore")

    name: Name
    """Unique in its namespace, Ray cluster or home directory; at most 52 lower-case letters, digits
    and dashes."""
    namespace: Namespace = "default"
    """Kubernetes namespace; other backends ignore it."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that are copied to the job's pods on Kubernetes; other backends ignore them."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the job; set annotations of pods in spec.kubernetes.podTemplate.metadata."""


class Metrics(Part):
    """Prometheus metrics of the job."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of /metrics on the controller of a local job; 0: any free port, which `holdfast status`
    shows."""
    per_rank: bool = False
    """true: also export one series per rank, for local jobs only."""


class JobSpec(Part):
    """Program, nodes and recovery of the job."""

    entrypoint: Entrypoint
    nodes: Nodes = Nodes()
    workers_per_node: int = Field(default=1, ge=1, le=64)
    """Worker processes on each node; with GPUs, one per GPU."""
    elasticity: Elasticity = "any"
    """World sizes that the job may train with, in workers. any: all that the mesh allows, from
    nodes.min to nodes.max; fixed: nodes.max x workersPerNode only; a list such as [8, 16, 32]:
    these, the largest is the full size."""
    resources: Resources = Resources()
    image: str | None = None
    """Container image of the nodes, on Kubernetes. Default: the operator's --worker-image."""
    env: dict[str, Word] = Field(default_factory=dict)
    """Environment variables of every worker; they override the fabric profile. `kubectl apply`
    needs quotes around numbers."""
    preload: Annotated[tuple[ModuleName, ...], Field(max_length=64)] = ()
    """Installed modules, such as transformers, that each node imports once before it forks workers.
    """
    learn_preload: bool = True
    """true: standbys of a script also import the installed modules that its workers imported at
    their first start, so a restart does not wait for them."""
    working_directory: str = "."
    """Working directory of the workers; relative to the spec file."""
    code: str | None = Field(default=None, pattern=CODE_PATTERN)
    """SHA-256 of the uploaded code that workers run in, on Kubernetes; `holdfast run --kubernetes`
    sets it. Default: the files of the image."""
    parallelism: Parallelism = Parallelism()
    fabric: Fabric = Fabric()
    checkpoint: Checkpoint = Checkpoint()
    recovery: Recovery = Recovery()
    metrics: Metrics = Metrics()
    notify: Annotated[tuple[Notify, ...], Field(max_length=8)] = ()
    """Servers that get a message when the job fails, recovers, finishes or waits."""
    kubernetes: Kubernetes = Kubernetes()
    ray: Ray = Ray()
    priority: int = Field(default=0, ge=-limits.MAX_COUNT, le=limits.MAX_COUNT)
    """Rank among the namespace's jobs with a part of their nodes: higher ones keep them; only for
    Kubernetes with kubernetes.gang none, and after the pods' priority."""
    queue: str | None = None
    """LocalQueue of the namespace that admits the job, with kubernetes.gang kueue."""
    managed_by: str | None = Field(default=None, max_length=63, pattern=MANAGER_PATTERN)
    """Controller that runs the job, as in a batch/v1 Job; the operator ignores jobs of other
    controllers. Default: holdfast.dev/operator."""
    suspend: bool = False
    """true: release all nodes and keep the job with its newest checkpoint."""
    active_deadline_s: Seconds | None = None
    """Seconds that the job may run before it fails, without suspended time. Default: no limit."""
    ttl_s_after_finished: int | None = Field(
        default=None, ge=0, le=limits.MAX_SECONDS, alias="ttlSecondsAfterFinished"
    )
    """Seconds until a finished job and the checkpoints in its directory are deleted; for a local
    job, by the next `holdfast run`. Default: never."""

    @model_validator(mode="after")
    def _check_command(self) -> JobSpec:
        """Variables before a command become the job's; its sizes must be the job's."""
        for name, value in self.entrypoint.program.env.items():
            if self.env.setdefault(name, value) != value:
                raise ValueError(
                    f"entrypoint.command: got {name} with another value than spec.env has; "
                    f"expected one of them; remove it from the command"
                )
        if problem := size_problem(self):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_env(self) -> JobSpec:
        for name, value in self.env.items():
            if problem := _problem_of_variable(name, value):
                raise ValueError(problem)
        total = sum(len(name) + len(value.encode()) + 2 for name, value in self.env.items())
        if total > limits.MAX_ENVIRONMENT_BYTES:
            raise ValueError(
                f"env: got {total} bytes in all; expected at most {limits.MAX_ENVIRONMENT_BYTES}; "
                f"write long texts to files that the nodes have, and their paths here"
            )
        return self

    @model_validator(mode="after")
    def _check_elasticity(self) -> JobSpec:
        sizes = () if isinstance(self.elasticity, str) else self.elasticity
        for size in sizes:
            if size % self.workers_per_node:
                raise ValueError(
                    f"elasticity: got {size} workers; expected multiples of workersPerNode "
                    f"({self.workers_per_node}): nodes are used whole"
                )
        return self

    @model_validator(mode="after")
    def _check_mesh(self) -> JobSpec:
        for check in MESH_CHECKS:
            if problem := check(self):
                raise ValueError(problem)
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
