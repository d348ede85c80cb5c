"""The actions that the core decides on: a closed union, carried out by the runtime's executor.

Every action has an id, unique within the job, and the generation it belongs to, and ends in exactly
one result: the event ActionSucceeded, ActionFailed or ActionUnknown, or the fact GroupStopped.
Launch and stop are idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ..protocol.facts import Membership, ShardFile, WorkerSeat
from ..protocol.mesh import Mesh
from ..protocol.messages import CopyStep, StageEvery

ReasonCode = Literal[
    "submitted", "user-error", "infrastructure", "preemption", "hang", "resize", "suspend",
    "resume", "cancel", "finish", "deadline", "budget", "capacity", "checkpoint", "retention",
    "bad-node", "controller-restart", "does-not-fit", "new-code",
]  # fmt: skip
"""Labels metrics; keep it small."""

Outcome = Literal["succeeded", "failed", "cancelled"]


class Reason(msgspec.Struct, frozen=True):
    """Reason: a code that labels metrics, and a sentence with the numbers for people."""

    code: ReasonCode
    text: str


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all actions."""

    action_id: int
    generation: int
    reason: Reason


class RequestNodes(Action, frozen=True, kw_only=True, tag="request-nodes"):
    """Get this many more nodes. Succeeds when the backend has promised them, with their names in
    the result's `nodes`; each joins by itself. Fails when the backend has no capacity."""

    count: int
    avoid: tuple[str, ...] = ()


class ReleaseNode(Action, frozen=True, kw_only=True, tag="release-node"):
    """Give a node back: end its agent and its resources. For a lost node: make sure it is gone."""

    node: str


class LaunchGroup(Action, frozen=True, kw_only=True, tag="launch-group"):
    """Start one node's workers of a generation."""

    node: str
    node_rank: int
    membership: Membership
    seats: tuple[WorkerSeat, ...]
    buddy: str = ""
    persist_every_steps: int = 0
    own_shards: bool = False
    """The state was written on the same mesh, the number of replicas aside: each rank reads its own
    shard only, and the node is sent the sources of its ranks' shards only."""
    stage_every_steps: int = 0
    code: str = ""
    """spec.code."""
    nodes_on_machine: int = 1
    """Members on the same machine, which share its memory."""


class StopGroup(Action, frozen=True, kw_only=True, tag="stop-group"):
    """End one node's workers of a generation; its result is GroupStopped."""

    node: str
    grace_s: float = 0.0
    stacks: bool = False
    save_grace_s: float = 0.0
    """Grace for workers in a declared save, in a stop without grace."""
    after_step: int = -1
    """Step after which a script that asks for notices saves, in a stop with grace; -1: none."""
    keep: bool = False
    """Workers that can leave their step keep their process."""


class InspectGroup(Action, frozen=True, kw_only=True, tag="inspect-group"):
    """Have a node report what its workers do. Succeeds when sent; GroupInspected answers."""

    node: str


class StageStep(Action, frozen=True, kw_only=True, tag="stage-step"):
    """Have all workers of a node stage exactly this step. Fails when one of them is past it."""

    node: str
    step: int


class PersistStep(Action, frozen=True, kw_only=True, tag="persist-step"):
    """Have a node write the newest step >= `step` that it stages to storage."""

    node: str
    step: int


class CommitManifest(Action, frozen=True, kw_only=True, tag="commit-manifest"):
    """Write the manifest of a complete set of shard files, last and atomically."""

    step: int
    mesh: Mesh
    files: tuple[ShardFile, ...]


class Retained(msgspec.Struct, frozen=True):
    """Checkpoints that stay on the storage tier, named by (step, generation)."""

    keep: tuple[tuple[int, int], ...]
    newest: tuple[int, int]
    """The newest good checkpoint: others may be deleted, newer ones with a manifest stay."""
    abandoned: tuple[int, int]
    """Newest version up to which files without a manifest get none and are deleted."""
    generation: int
    """Newest generation whose files may be deleted."""


class CleanStorage(Action, frozen=True, kw_only=True, tag="clean-storage"):
    """List the job's checkpoints once and delete what is not retained, complete or not."""

    retained: Retained


class FinishJob(Action, frozen=True, kw_only=True, tag="finish-job"):
    """The job is over: release everything, then clean the storage tier, to which no node writes any
    more. The last action of a job."""

    outcome: Outcome
    retained: Retained


AnyAction = (
    RequestNodes | ReleaseNode | LaunchGroup | StopGroup | InspectGroup | StageStep | PersistStep
    | CommitManifest | CleanStorage | FinishJob
)  # fmt: skip


class ToNode(msgspec.Struct, frozen=True):
    """Sent to a node like an action, but without a result: the node's reports show it."""

    node: str
    message: CopyStep | StageEvery


class Inflight(dict[int, AnyAction]):
    """Id -> action without a result. Only `[]`, `pop` and `clear` modify it."""

    def __init__(self, actions: Mapping[int, AnyAction] | None = None) -> None:
        super().__init__()
        self.requests: dict[int, RequestNodes] = {}
        self.num_requested = 0
        """Nodes of these requests."""
        self.releases: dict[str, ReleaseNode] = {}
        """Node -> its release."""
        for action_id, action in (actions or {}).items():
            self[action_id] = action

    def __setitem__(self, action_id: int, action: AnyAction) -> None:
        super().__setitem__(action_id, action)
        if isinstance(action, RequestNodes):
            self.requests[action_id] = action
            self.num_requested += action.count
        elif isinstance(action, ReleaseNode):
            self.releases[action.node] = action

    def pop(self, action_id: int, default: None = None) -> AnyAction | None:  # type: ignore[override]
        action = super().pop(action_id, default)
        if isinstance(action, RequestNodes):
            del self.requests[action_id]
            self.num_requested -= action.count
        elif isinstance(action, ReleaseNode):
            del self.releases[action.node]
        return action

    def clear(self) -> None:
        super().clear()
        self.requests.clear()
        self.num_requested = 0
        self.releases.clear()
