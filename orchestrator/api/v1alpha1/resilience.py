"""Checkpoints, failure detection, recovery and restart budgets. The defaults are in limits.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from holdfast.orchestrator import limits

from .base import Auto, Part, Seconds, Steps, Wait


class MemoryTier(Part):
    """Checkpoints in the memory of the nodes: cheap and frequent. They survive the loss of one
    failure domain, not of two."""

    every_steps: Auto | Annotated[int, Field(ge=0, le=limits.MAX_COUNT)] = "auto"
    """Stage after every Nth step; 0: no memory tier. auto: after every step, or as often as
    budgetPercent allows, by what the job measures; steps that go to storage are staged too."""
    budget_percent: float = Field(
        default=limits.STAGING_BUDGET_PERCENT, gt=0, le=100, allow_inf_nan=False
    )
    """Share of the step time that staging may cost, with everySteps: auto."""
    buddy: Literal["auto", "always", "never"] = "auto"
    """Whether each shard is also copied to the memory of a second node. auto: only if no other
    replica group holds the same shard."""
    buddy_network_percent: int = Field(default=limits.BUDDY_NETWORK_PERCENT, ge=1, le=100)
    """Share of the network that copies to a buddy may use while training uses it too. A smaller one
    makes copies older: the steps of which all buddies get a copy are chosen by how long the slowest
    push takes."""


class StorageTier(Part):
    """Checkpoints on persistent storage. The agents write them, outside the training processes."""

    every_steps: Steps | None = None
    """Write after every Nth step. Default: 100, unless everySeconds is set."""
    every_s: Seconds | None = None
    """Write when this many seconds have passed since the last checkpoint. Default: everySteps
    decides."""
    final_timeout_s: Seconds = limits.PERSIST_TIMEOUT_S
    """Seconds that a job which ends or is suspended tries to write its last checkpoint. A job that
    has trained to its end but cannot write it fails."""

    @model_validator(mode="after")
    def _check_interval(self) -> StorageTier:
        if self.every_steps is not None and self.every_s is not None:
            raise ValueError("got everySteps and everySeconds; expected at most one of them")
        return self


class Retention(Part):
    """Which committed checkpoints are kept. The newest good one is never deleted."""

    keep_last: int = Field(default=limits.KEEP_LAST, ge=1, le=limits.MAX_COUNT)
    """Keep the newest N checkpoints."""
    keep_every_steps: Steps | None = None
    """Also keep, without limit, the checkpoints written after every Nth step. Default: none. Steps
    count from 0: with 100, `holdfast checkpoint list` shows 99, 199, 299, ..."""


class Checkpoint(Part):
    """Where checkpoints are kept and how often they are made."""

    path: str | None = Field(default=None, min_length=1)
    """Storage tier: a directory, relative to the spec file, or a URL such as s3://bucket/prefix.
    Every node must be able to write there. The fsspec driver takes credentials and endpoint from
    the environment or from spec.env. One path holds the checkpoints of one job only. Default: for a
    local job, a directory beside its journal; on Ray, one in the home directory of each node's
    user; on Kubernetes, one below the operator's --checkpoint-root (without it the job is refused).
    See docs/user/storage.md."""
    secret_name: str | None = Field(default=None, min_length=1, max_length=253)
    """On Kubernetes: Secret of the job's namespace with credentials of the store, as environment
    variables (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL). Pods get them, and the
    operator uses them instead of its own. Required for a path outside of those that the operator
    opens with its own credentials, and for an endpoint of your own."""
    memory: MemoryTier = MemoryTier()
    storage: StorageTier = StorageTier()
    retention: Retention = Retention()
    guard: Literal["auto", "never"] = "auto"
    """auto: before the workers of a script are started again, checkpoints that the script itself
    wrote and that are incomplete are renamed, so that it takes the newest complete one, and
    trainers of transformers, Lightning and DeepSpeed are patched to resume from it. See
    docs/user/script.md. never: nothing is looked at or patched."""
    guard_directories: Annotated[tuple[str, ...], Field(max_length=16)] = ()
    """Where the script keeps its own checkpoints, relative to workingDirectory, and no other job
    does. Default: what ranks are seen to write, and directories that the arguments name."""

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
        """Whether workers stage this step, if every `every_steps`-th one is. Steps count from 0."""
        if (step + 1) % every_steps == 0:
            return True
        if self.memory.every_steps != "auto" or self.storage.every_s is not None:
            return False
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
    """How many restarts of one failure class are allowed within a sliding window."""

    restarts: int = Field(ge=0, le=limits.MAX_COUNT)
    """Restarts allowed within the window; one more fails the job."""
    window_s: Seconds = limits.BUDGET_WINDOW_S
    """Length of the window in seconds; older restarts do not count."""


class Budgets(Part):
    """One budget per failure class. A resize is never charged."""

    user: Budget = Budget(restarts=limits.BUDGET_USER)
    """Exceptions and exit codes of your code. The same failure twice at the same step fails the job
    at once."""
    infrastructure: Budget = Budget(restarts=limits.BUDGET_INFRASTRUCTURE)
    """Lost nodes, kills from outside, memory, network and device errors."""
    preemption: Budget = Budget(restarts=limits.BUDGET_PREEMPTION)
    """Nodes that were preempted with notice."""
    hang: Budget = Budget(restarts=limits.BUDGET_HANG)
    """Workers that were alive and made no progress."""


class Recovery(Part):
    """How failures are detected and what is done about them."""

    heartbeat_interval_s: Seconds = limits.HEARTBEAT_INTERVAL_S
    """Seconds between two heartbeats of an agent; in a job of more than 1,000 nodes at least 0.0005
    per node."""
    heartbeat_timeout_s: Seconds = limits.HEARTBEAT_TIMEOUT_S
    """Seconds without a heartbeat after which a node is lost, at least three intervals in a job of
    more than 1,000 nodes. A closed connection is noticed at once."""
    hang_timeout_s: Seconds | Auto = "auto"
    """Seconds without a step after which the workers hang, whatever they do. auto: 3 s for a
    stopped process; 3 s plus three times the job's own step time for a worker that uses no CPU and
    does no I/O while its peers wait; busyTimeoutSeconds for one that computes, reads or compiles.
    """
    busy_timeout_s: Seconds = limits.BUSY_TIMEOUT_S
    """Seconds without a step that a worker may compute, read or compile, with hangTimeoutSeconds
    auto. Three times the longest such time that ended by itself, if that is longer; four times as
    long on a machine whose processes wait for the CPU."""
    replace_stragglers: bool = False
    """A node with a rank that works much longer than its peers in every step is replaced by a
    spare, if there is one; it is charged as a preemption. Otherwise it is only noted. Such a rank
    is found by the CPU time of its training thread; with a GPU by the speed of the GPU, so a slow
    processor is not found there."""
    gpu_standbys: bool = False
    """true: standby processes keep the CUDA context of their GPU open, which a recovery then does
    not wait for (2 to 5 s); it takes about 0.5 GB of each GPU's memory. For whole GPUs with
    resources.gpu 1."""
    startup_timeout_s: Seconds = limits.STARTUP_TIMEOUT_S
    """Seconds from the launch of a generation to its first step. A script that reports no steps may
    do nothing for so long while it loads. On one machine, nodes have as long to start, 120 s at
    least."""
    replacement_wait_s: Wait = limits.REPLACEMENT_WAIT_S
    """Seconds that the job waits for a replacement of a lost node before it goes on with fewer
    nodes. It does not wait if its earlier nodes took longer than that to start."""
    capacity_timeout_s: Seconds | None = None
    """Seconds that the job waits for nodes.min nodes before it fails; its newest checkpoint is
    kept. Default: no limit."""
    grow_delay_s: Wait = limits.GROW_DELAY_S
    """Seconds that the job collects new nodes before it grows, so that it restarts once. It then
    trains on until their standbys have imported the libraries of a script, 60 s at most."""
    termination_grace_s: Wait = limits.TERMINATION_GRACE_S
    """Seconds from SIGTERM to SIGKILL in a planned stop of the workers."""
    on_ignored_checkpoint: Literal["hold", "warn"] = "hold"
    """If a script was started again, has opened none of its own checkpoints, and is about to write
    over one: hold suspends the job before that, until `holdfast resume`; warn only reports it."""
    budgets: Budgets = Budgets()
    controller_absence_s: Seconds | Auto | Literal["never"] = "auto"
    """Seconds without a controller after which each agent writes the state in its memory to storage
    and ends its node; until then training goes on. never: it goes on without limit. auto: never on
    Kubernetes, where another operator takes over, else 900. Agents read it when they connect."""
    bad_node_strikes: int = Field(default=limits.BAD_NODE_STRIKES, ge=1, le=limits.MAX_COUNT)
    """A node that caused this many incidents within the infrastructure window is cordoned."""

    @model_validator(mode="after")
    def _check_heartbeat_timeout(self) -> Recovery:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"heartbeatTimeoutSeconds: got {self.heartbeat_timeout_s:g}; expected at least "
                f"twice heartbeatIntervalSeconds ({2 * self.heartbeat_interval_s:g})"
            )
        return self
