"""What is kept and what is done when things break: checkpoints, detection, budgets.

Owns: these fields and their defaults (the numbers themselves are in limits.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from holdfast.orchestrator import limits

from .base import Auto, Part

Seconds = Annotated[float, Field(gt=0, le=limits.MAX_SECONDS, allow_inf_nan=False)]
Wait = Annotated[float, Field(ge=0, le=limits.MAX_SECONDS, allow_inf_nan=False)]
"""Seconds that may be none."""
Steps = Annotated[int, Field(ge=1, le=limits.MAX_COUNT)]


class MemoryTier(Part):
    """Copies in the memory of the nodes: cheap, frequent, gone with two failure domains."""

    every_steps: int = Field(default=limits.MEMORY_EVERY_STEPS, ge=0, le=limits.MAX_COUNT)
    """Stage after every Nth step; 0 switches the tier off."""
    buddy: Literal["auto", "always", "never"] = "auto"
    """Copy to another node's memory. auto: only where no replica group holds the same shard."""


class StorageTier(Part):
    """Copies on persistent storage, written by the agent, outside the training process."""

    every_steps: Steps | None = None
    """Write after every Nth step. Without any cadence: every 100 steps."""
    every_s: Seconds | None = None
    """Write when this long has passed since the last one."""
    final_timeout_s: Seconds = limits.PERSIST_TIMEOUT_S
    """How long a job that ends or is suspended tries to write its last checkpoint, whatever it ends
    for. A job that has trained to its end but cannot write it has failed."""

    @model_validator(mode="after")
    def _one_cadence(self) -> StorageTier:
        if self.every_steps is not None and self.every_s is not None:
            raise ValueError("got everySteps and everySeconds; expected at most one of them")
        return self


class Retention(Part):
    """Which committed checkpoints stay. The newest good one is never deleted."""

    keep_last: int = Field(default=limits.KEEP_LAST, ge=1, le=limits.MAX_COUNT)
    """The newest N."""
    keep_every_steps: Steps | None = None
    """Besides them, those written after every Nth step, for ever. Steps count from 0: with 100,
    `holdfast checkpoint list` shows 99, 199, 299, ..."""


class Checkpoint(Part):
    """Where training state is kept and how often."""

    path: str | None = Field(default=None, min_length=1)
    """Directory, relative to the spec file, or URL (such as s3://bucket/prefix) of the storage
    tier, which every node can write. Credentials and endpoint come from the environment, as the
    store's driver looks for them, or from spec.env. Without a path: on one machine a directory
    beside the job's journal; on Ray one in the home of each node's user; on Kubernetes one below
    the operator's --checkpoint-root, and without that the job is refused. One path holds the
    checkpoints of one job only. See docs/user/storage.md."""
    memory: MemoryTier = MemoryTier()
    storage: StorageTier = StorageTier()
    retention: Retention = Retention()

    @property
    def staging_interval(self) -> int:
        """Workers stage after every Nth step. With the memory tier off, staging still is the way to
        storage."""
        if self.memory.every_steps:
            return self.memory.every_steps
        if self.storage.every_s is not None:
            return 1  # the agent picks by the clock; all ranks must offer the same steps
        return self.storage.every_steps or limits.STORAGE_EVERY_STEPS

    @model_validator(mode="after")
    def _path_is_shared_and_public(self) -> Checkpoint:
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
    """How many restarts of one failure class within a sliding window before the job fails."""

    restarts: int = Field(ge=0, le=limits.MAX_COUNT)
    """So many within the window; one more fails the job."""
    window_s: Seconds = limits.BUDGET_WINDOW_S
    """Older restarts are forgotten."""


class Budgets(Part):
    """One budget per failure class. A resize is never charged."""

    user: Budget = Budget(restarts=limits.BUDGET_USER)
    """Exceptions and exit codes of your code. The same one at the same step twice fails at once."""
    infrastructure: Budget = Budget(restarts=limits.BUDGET_INFRASTRUCTURE)
    """Lost nodes, kills from outside, memory, network and device errors."""
    preemption: Budget = Budget(restarts=limits.BUDGET_PREEMPTION)
    """Nodes taken away with notice."""
    hang: Budget = Budget(restarts=limits.BUDGET_HANG)
    """Progress stopped while processes lived."""


class Recovery(Part):
    """How failures are noticed and what is done about them."""

    heartbeat_interval_s: Seconds = limits.HEARTBEAT_INTERVAL_S
    """How often an agent reports."""
    heartbeat_timeout_s: Seconds = limits.HEARTBEAT_TIMEOUT_S
    """Silence after which a node counts as lost. A closed connection is noticed at once."""
    hang_timeout_s: Seconds | Auto = "auto"
    """No step for this long is a hang. auto: 3 s plus three of the job's own step times."""
    startup_timeout_s: Seconds = limits.STARTUP_TIMEOUT_S
    """From launch to the first step of a generation."""
    replacement_wait_s: Wait = limits.REPLACEMENT_WAIT_S
    """How long a shrink waits at most for a replacement that is on its way. It does not wait at all
    when the job's own nodes have shown that none comes that fast."""
    capacity_timeout_s: Seconds | None = None
    """How long the job waits for nodes.min nodes before it fails; its newest checkpoint is kept.
    Without it, the job waits for as long as it takes."""
    grow_delay_s: Wait = limits.GROW_DELAY_S
    """How long arriving nodes are gathered before the job grows."""
    termination_grace_s: Wait = limits.TERMINATION_GRACE_S
    """SIGTERM to SIGKILL when a script is stopped on purpose."""
    budgets: Budgets = Budgets()
    bad_node_strikes: int = Field(default=limits.BAD_NODE_STRIKES, ge=1, le=limits.MAX_COUNT)
    """A node blamed this often within the infrastructure window is not used again."""

    @model_validator(mode="after")
    def _beats_fit(self) -> Recovery:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"heartbeatTimeoutSeconds: got {self.heartbeat_timeout_s:g}; expected at least "
                f"twice heartbeatIntervalSeconds ({2 * self.heartbeat_interval_s:g})"
            )
        return self
