"""Checkpoints, failure detection, recovery and restart budgets. The defaults are in limits.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from holdfast.orchestrator import limits

from .base import Auto, Choice, NoSettings, Part, Seconds, Steps, Wait


class MemoryTier(Part):
    """Checkpoints in the memory of the nodes. They survive the loss of one failure domain, not of
    two."""

    every_steps: Auto | Annotated[int, Field(ge=0, le=limits.MAX_COUNT)] = "auto"
    """Stage after every Nth step; 0: no memory tier; auto: as often as budgetPercent allows."""
    budget_percent: float = Field(
        default=limits.STAGING_BUDGET_PERCENT, gt=0, le=100, allow_inf_nan=False
    )
    """Percent of the step time that staging may cost, with everySteps: auto."""
    buddy: Literal["auto", "always", "never"] = "auto"
    """Copies of each shard in the memory of a second node. auto: only if no other replica holds the
    same shard."""
    buddy_network_percent: int = Field(default=limits.BUDDY_NETWORK_PERCENT, ge=1, le=100)
    """Percent of the network that copies to a buddy may use while training uses it too; with less,
    copies are older."""


class StorageTier(Part):
    """Checkpoints on persistent storage, written by the agents outside the training processes."""

    every_steps: Steps | None = None
    """Write after every Nth step. Default: 100, unless everySeconds is set."""
    every_s: Seconds | None = None
    """Write when this many seconds have passed since the last checkpoint. Default: everySteps
    counts."""
    final_timeout_s: Seconds = limits.PERSIST_TIMEOUT_S
    """Seconds that an ending or suspended job tries to write its last checkpoint; a finished job
    that cannot write it fails."""

    @model_validator(mode="after")
    def _check_interval(self) -> StorageTier:
        if self.every_steps is not None and self.every_s is not None:
            raise ValueError("got everySteps and everySeconds; expected at most one of them")
        return self


class Retention(Part):
    """Rules that keep committed checkpoints. The newest good one is never deleted."""

    keep_last: int = Field(default=limits.KEEP_LAST, ge=1, le=limits.MAX_COUNT)
    """Keep the newest N checkpoints."""
    keep_every_steps: Steps | None = None
    """Keep also the checkpoints written after every Nth step; steps count from 0, so 100 keeps 99,
    199, ... Default: none."""


class OwnCheckpointGuard(Choice):
    """Care for a script's own checkpoints before a restart: incomplete ones are renamed; trainers
    of transformers, Lightning and DeepSpeed resume. See docs/user/script-checkpoints.md."""

    choices = ("directories", "never")
    default_choice = "auto"

    directories: Annotated[tuple[str, ...], Field(max_length=16)] | None = None
    """Directories of them, relative to workingDirectory, used by no other job. Default: what ranks
    are seen to write, and directories that the arguments name."""
    never: NoSettings | None = None
    """Rename nothing, and patch no framework."""


class Checkpoint(Part):
    """Place and frequency of checkpoints."""

    path: str | None = Field(default=None, min_length=1)
    """Storage tier of this job alone: a directory, relative to the spec file, or a URL such as
    s3://bucket/prefix, that every node can write. Default: by backend, see docs/user/storage.md."""
    secret_name: str | None = Field(default=None, min_length=1, max_length=253)
    """Kubernetes Secret with the store's credentials as AWS_* variables, for pods and operator;
    required for stores that the operator does not open with its own."""
    memory: MemoryTier = MemoryTier()
    storage: StorageTier = StorageTier()
    retention: Retention = Retention()
    guard: OwnCheckpointGuard = OwnCheckpointGuard()

    @property
    def staging_interval(self) -> int:
        """Workers stage after every Nth step, with auto until the controller chooses another
        interval. Without the memory tier they stage for storage only."""
        if self.memory.every_steps == "auto":
            return 1
        if self.memory.every_steps:
            return self.memory.every_steps
        if self.storage.every_s is not None:
            return 1  # the agent chooses by the clock; all ranks must stage the same steps
        return self.storage.every_steps or limits.STORAGE_EVERY_STEPS

    def stages(self, step: int, every_steps: int) -> bool:
        """True if workers stage this step, if every `every_steps`-th one is. Steps count from 0."""
        if (step + 1) % every_steps == 0:
            return True
        if self.memory.every_steps != "auto" or self.storage.every_s is not None:
            return False
        return self.stores(step)

    def stores(self, step: int) -> bool:
        """True if this step goes to storage, unless the time since the last one decides."""
        return (step + 1) % (self.storage.every_steps or limits.STORAGE_EVERY_STEPS) == 0

    @model_validator(mode="after")
    def _check_path(self) -> Checkpoint:
        path = self.path or ""
        if any(part.startswith("memory://") for part in path.split("::")):
            raise ValueError(
                f"path: got {path}; expected a directory or the URL of a store; memory:// is the "
                f"memory of a single process, and a job has many"
            )
        scheme, is_url, rest = path.partition("://")
        if is_url and "/" not in scheme and not rest.strip("/"):
            raise ValueError(
                f"path: got {path}; expected a bucket or a directory after ://, such as "
                f"s3://bucket/prefix"
            )
        user, at, _ = rest.partition("/")[0].rpartition("@")
        if at and ":" in user:
            raise ValueError(
                f"path: got {scheme}://... with a password in it; expected a URL without; put "
                f"credentials into the environment or spec.env: paths are printed"
            )
        return self


class Budget(Part):
    """Restarts of one failure class that are allowed within a sliding window."""

    restarts: int = Field(ge=0, le=limits.MAX_COUNT)
    """Restarts allowed within the window; one more fails the job."""
    window_s: Seconds = limits.BUDGET_WINDOW_S
    """Length of the window in seconds."""


class Budgets(Part):
    """One budget per failure class. A resize is never charged."""

    user: Budget = Budget(restarts=limits.BUDGET_USER)
    """Exceptions and exit codes of your code; the same failure twice at the same step fails the job
    at once."""
    infrastructure: Budget = Budget(restarts=limits.BUDGET_INFRASTRUCTURE)
    """Lost nodes, kills from outside, memory, network and device errors."""
    preemption: Budget = Budget(restarts=limits.BUDGET_PREEMPTION)
    """Nodes that were preempted with notice."""
    hang: Budget = Budget(restarts=limits.BUDGET_HANG)
    """Workers that were alive and made no progress."""


class Recovery(Part):
    """Detection of failures, and what follows."""

    heartbeat_interval_s: Seconds = limits.HEARTBEAT_INTERVAL_S
    """Seconds between an agent's heartbeats; more than 1,000 nodes raise it to at least 0.0005 per
    node."""
    heartbeat_timeout_s: Seconds = limits.HEARTBEAT_TIMEOUT_S
    """Seconds without a heartbeat after which a node is lost; three intervals at least with more
    than 1,000 nodes."""
    hang_timeout_s: Seconds | Auto = "auto"
    """Seconds without a step after which workers count as hung, whatever they do. auto: by
    docs/concepts/hangs.md."""
    busy_timeout_s: Seconds = limits.BUSY_TIMEOUT_S
    """Seconds without a step that a worker may compute, read or compile, with hangTimeoutSeconds:
    auto; a longer gap that ended by itself raises it."""
    replace_stragglers: bool = False
    """true: a spare takes the place of a node with a rank that stays slower than its peers, charged
    as a preemption; false: only report it."""
    gpu_standbys: bool = False
    """true: standbys keep a CUDA context open, which saves 2 to 5 s of a recovery and takes about
    0.5 GB of each GPU; for resources.gpu 1."""
    keep_processes: Literal["auto", "never"] = "auto"
    """auto: on CPUs, survivors keep process and model in loops over session.steps and under
    in_memory(trainer), with torch 2.15. After a failure other scripts run again in their process.
    never: all restart."""
    startup_timeout_s: Seconds = limits.STARTUP_TIMEOUT_S
    """Seconds from a launch to its first step; on one machine also for the start of nodes."""
    replacement_wait_s: Wait = limits.REPLACEMENT_WAIT_S
    """Seconds that the job waits for a replacement of a lost node before it shrinks; none where
    earlier nodes took longer to start. With 0, killed workers hold up no whole replica."""
    capacity_timeout_s: Seconds | None = None
    """Seconds that the job waits for nodes.min nodes before it fails. Default: no limit."""
    grow_delay_s: Wait = limits.GROW_DELAY_S
    """Seconds that the job collects new nodes before it restarts with them."""
    termination_grace_s: Wait = limits.TERMINATION_GRACE_S
    """Seconds from SIGTERM to SIGKILL in a planned stop of the workers."""
    on_ignored_checkpoint: Literal["hold", "warn"] = "hold"
    """Reaction to a restarted script that has read none of its checkpoints and is about to
    overwrite one. hold suspends the job until `holdfast resume`; warn only reports it."""
    budgets: Budgets = Budgets()
    controller_absence_s: Seconds | Auto | Literal["never"] = "auto"
    """Seconds without a controller after which agents write their state to storage and exit. auto:
    never on Kubernetes, else 900; never: training continues without limit."""
    bad_node_strikes: int = Field(default=limits.BAD_NODE_STRIKES, ge=1, le=limits.MAX_COUNT)
    """Incidents within the infrastructure window after which the node that caused them is cordoned.
    """

    @model_validator(mode="after")
    def _check_heartbeat_timeout(self) -> Recovery:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"heartbeatTimeoutSeconds: got {self.heartbeat_timeout_s:g}; expected at least "
                f"twice heartbeatIntervalSeconds ({2 * self.heartbeat_interval_s:g})"
            )
        return self
