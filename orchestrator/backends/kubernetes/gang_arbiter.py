"""The order of jobs that each have some of their nodes, but not enough, and would wait for each
other without end.

* A job whose nodes have trained comes before one that has not started. Then the priority of the
  pods counts, which their PriorityClass gives, then age. spec.priority orders the jobs of one
  namespace only: each user who may create a job may set it.
* A job gives nodes up only to one that may use them: where no node of a job is allowed for the pods
  of another, the two do not compete.
* Only a job that has given nodes up to another one waits for it, and only while that one holds
  nodes and is incomplete. A job that has never been complete within its hold time comes last from
  then on, until it has been complete once.

So a job that can never be placed delays no job whose pods can be placed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .placement import KnownNode, Placement

ANYWHERE = Placement()


@dataclass(frozen=True)
class GangPriority:
    """Order of the incomplete jobs."""

    namespace: str
    name: str
    created: str = ""
    """creationTimestamp, RFC 3339: sorts as text."""
    class_priority: int = 0
    """Priority of the pods' PriorityClass."""
    priority: int = 0
    """spec.priority; compared within the namespace only."""
    trained: bool = False
    """Nodes of the job have finished a step."""
    failed: bool = False
    """The job was not complete at the end of its last hold time."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def _tier(self) -> tuple[bool, bool, int]:
        return not self.trained, self.failed, -self.class_priority


@dataclass(frozen=True)
class Contender:
    """An incomplete job."""

    rank: GangPriority
    placement: Placement = ANYWHERE
    nodes: tuple[KnownNode, ...] = ()
    """Kubernetes nodes that its pods take up."""


class GangArbiter:
    """The incomplete jobs of one operator."""

    def __init__(self) -> None:
        self._contenders: dict[str, Contender] = {}

    def enter(self, job: Contender) -> None:
        self._contenders[job.rank.key] = job

    def leave(self, key: str) -> None:
        self._contenders.pop(key, None)

    def ahead_of(self, key: str) -> GangPriority | None:
        """The first job that comes before this one and may use a node that it holds."""
        job = self._contenders[key]
        for other in _in_order(self._contenders.values()):
            if other.rank.key == key:
                return None
            if any(map(other.placement.allows, job.nodes)):
                return other.rank
        return None

    def is_incomplete(self, key: str) -> bool:
        return key in self._contenders


def _in_order(jobs: Iterable[Contender]) -> list[Contender]:
    """Sort by tier, then the namespace with the oldest job comes first, then the order within the
    namespace: an order without cycles."""
    contenders = list(jobs)
    oldest: dict[tuple[object, str], str] = {}
    for job in contenders:
        where = (job.rank._tier, job.rank.namespace)
        oldest[where] = min(oldest.get(where, job.rank.created), job.rank.created)

    def order(job: Contender) -> tuple[object, ...]:
        rank = job.rank
        since = oldest[rank._tier, rank.namespace]
        return (rank._tier, since, rank.namespace, -rank.priority, rank.created, rank.name)

    return sorted(contenders, key=order)


def shown(ahead: GangPriority, namespace: str) -> str:
    """The name of a job for users of a namespace; jobs of other namespaces have none."""
    if ahead.namespace == namespace:
        return f"job {ahead.name}"
    return "a job of another namespace"
