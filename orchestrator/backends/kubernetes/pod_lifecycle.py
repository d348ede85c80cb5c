"""Creates and deletes the pods of a job, and decides which pods that do not start are given up.

A pod whose workers have finished a step is never given up: its memory holds steps that are not in
storage. A job that has lost a node and cannot shrink keeps the others until a replacement starts.

Without a gang scheduler two jobs can each hold half of the capacity and wait without end. The
GangArbiter orders the incomplete jobs of an operator. The first keeps its nodes; the others release
those that it may use after a moment and request again when the first is complete. A job without a
competitor releases its nodes too, later: its competitor may be another operator's job or another
workload. While an autoscaler adds machines for a job, it holds its nodes for longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from holdfast.orchestrator.api.v1alpha1.backends import Kubernetes
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import PODS, ApiError, Conflict, TooBusy, Unreachable
from holdfast.orchestrator.kube.informer import Backoff

from . import pod_conditions
from .gang_arbiter import Contender, GangArbiter, GangPriority, shown
from .placement import KnownNode, Placement

CREATE_PAUSE_MIN_S = 0.25
CREATE_PAUSE_MAX_S = 4.0


@dataclass(frozen=True)
class PodTiming:
    """Time limits for the pods of one job."""

    create_retry_s: float = 15.0
    """Seconds that a transient error of a creation is retried. Of a thousand pods that are created
    at once the API server puts some off."""
    gang_wait_s: float = 8.0
    """Seconds after which an incomplete job releases its nodes to a job that comes first. With
    enough capacity, the pods of one request are scheduled within two seconds."""
    gang_hold_s: float = 60.0
    """Seconds after which it releases them even if no other job is known to wait."""
    provisioning_s: float = 900.0
    """The same, while an autoscaler adds machines for its pods: GPU machines take ten minutes, and
    released nodes would be removed again."""
    provisioning_check_s: float = 10.0
    """Seconds between two looks at the Events of autoscalers, while pods cannot be scheduled."""
    refused_min_s: float = 5.0
    refused_max_s: float = 300.0
    """Pauses between requests whose pods were released again."""
    agents_end_s: float = 10.0
    """Seconds that the agents of a finished job may take to end by themselves before their pods are
    deleted. Ended pods stay until the job is deleted, so that `kubectl logs` works."""
    start_limit_s: float = 1800.0
    """StartupTimeouts gives up a pod that fails to start earlier than this. One that pulls a large
    image is not late: elsewhere it would have to begin from the start."""
    debounce_s: float = 0.05
    """Pods change in bursts; the backend looks at the result of a burst once."""


# -- creation --------------------------------------------------------------------------------------
@dataclass
class CreatedPods:
    """The result of a request."""

    created: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Pods that may exist: the API server did not answer."""
    refusal: ApiError | None = None
    """The first permanent error. The remaining pods are not requested then: the pods of a request
    are alike."""


async def create_pods(
    cluster: KubeClient,
    namespace: str,
    pods: Sequence[Document],
    slots: asyncio.Semaphore,
    retry_s: float,
) -> CreatedPods:
    """Create the pods of one request, retrying transient errors for `retry_s`. A pod that waits for
    its next attempt keeps its slot, to spare a busy API server. Raises no ApiError."""
    result = CreatedPods()

    async def create(pod: Document) -> None:
        async with slots:
            if result.refusal is None:
                await _create_one(cluster, namespace, pod, result, retry_s)

    await asyncio.gather(*map(create, pods))
    return result


async def _create_one(
    cluster: KubeClient, namespace: str, pod: Document, result: CreatedPods, retry_s: float
) -> None:
    name = pod["metadata"]["name"]
    backoff = Backoff(CREATE_PAUSE_MIN_S, CREATE_PAUSE_MAX_S)
    in_doubt = False
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + retry_s
    while True:
        try:
            await cluster.create(PODS, namespace, pod)
        except ApiError as error:
            if in_doubt and isinstance(error, Conflict) and error.exists:
                break
            in_doubt = in_doubt or isinstance(error, Unreachable | TooBusy)
            late = loop.time() > deadline_s
            if late or result.refusal is not None or not is_transient(error):
                result.refusal = result.refusal or error
                result.unknown += [name] if in_doubt else []
                return
            await asyncio.sleep(backoff.next_s())
        else:
            break
    result.created.append(name)


def is_transient(error: ApiError) -> bool:
    """A retry may succeed: the server was busy or unreachable, or a concurrent pod changed the same
    quota (409, and not because the name is taken)."""
    if isinstance(error, Conflict):
        return not error.exists
    return isinstance(error, TooBusy | Unreachable)


# -- deletion --------------------------------------------------------------------------------------
class PodDeletion:
    """Deletes pods of one job; `slots` bounds the concurrent requests."""

    def __init__(self, cluster: KubeClient, namespace: str, slots: asyncio.Semaphore) -> None:
        self._cluster, self._namespace, self._slots = cluster, namespace, slots

    async def once(self, nodes: Iterable[str]) -> None:
        """Raises the first error, after all have been tried."""
        for error in (await self._all(tuple(nodes))).values():
            raise error

    async def until_done(self, nodes: Iterable[str]) -> None:
        """Retry without limit: no later request would delete these pods, and they would take up
        capacity as long as the job lives."""
        left, backoff = tuple(nodes), Backoff()
        while left := tuple(await self._all(left)):
            await asyncio.sleep(backoff.next_s())

    async def _all(self, nodes: tuple[str, ...]) -> dict[str, ApiError]:
        """The errors of those that could not be deleted."""
        results = await asyncio.gather(*map(self._one, nodes))
        return {node: error for node, error in zip(nodes, results, strict=True) if error}

    async def _one(self, node: str) -> ApiError | None:
        async with self._slots:
            try:
                await self._cluster.delete(PODS, self._namespace, node)
            except ApiError as error:
                return error
        return None


# -- pods that do not start ------------------------------------------------------------------------
@dataclass
class StartupDecision:
    release: dict[str, str] = field(default_factory=dict)
    """Pod -> reason."""
    hold_off: str = ""
    """Reason why no new pods are requested for a while; empty: they may be."""
    due_s: float | None = None
    """Decide again at this time, even if nothing changes."""


class StartupTimeouts:
    """Decides which pods are given up because they do not start. Pure: time is an argument."""

    def __init__(
        self,
        rank: GangPriority,
        needed: int,
        limit_s: float,
        gangs: GangArbiter,
        timing: PodTiming,
    ) -> None:
        self._rank, self._limit_s, self._gangs, self._timing = rank, limit_s, gangs, timing
        self.needed = needed
        """Pods without which the job cannot train; an edit of the spec may change it."""
        self.placement = Placement()
        """Constraints on where the job's pods may run."""
        self.stuck_since: dict[str, float] = {}
        """Pod that does not start -> time of its first problem."""
        self._incomplete_since: float | None = None
        self._waits_for: GangPriority | None = None
        """The job that this one has given nodes up to."""

    def decide(
        self,
        now_s: float,
        pods: Mapping[str, Document],
        trained: Set[str] = frozenset(),
        *,
        provisioned: Set[str] = frozenset(),
        known: Callable[[str], KnownNode | None] = lambda node: None,
    ) -> StartupDecision:
        """`pods`: those that are neither over nor released. `trained`: pods that have finished a
        step, perhaps over since. `provisioned`: pods for which an autoscaler adds machines.
        `known`: Kubernetes nodes by name."""
        stuck = {}
        for name, pod in pods.items():
            problem = pod_conditions.problem(pod)
            # A gated pod takes up no capacity, and its queue decides how long it waits.
            if problem is not None and problem.code != pod_conditions.GATED:
                stuck[name] = self.stuck_since.get(name, now_s)
        self.stuck_since = stuck
        decision = self._gang(now_s, pods, trained, provisioned, known)
        if decision.release:
            return decision
        limits_s = {
            name: max(self._limit_s, self._timing.provisioning_s * (name in provisioned))
            for name in stuck
        }
        for name in [name for name, since in stuck.items() if now_s - since >= limits_s[name]]:
            decision.release[name] = pod_conditions.not_started(pods[name], limits_s[name])
            decision.hold_off = f"{name}: {decision.release[name]}"
            del stuck[name]
        due = [since + limits_s[name] for name, since in stuck.items()]
        if decision.due_s is not None:
            due.append(decision.due_s)
        decision.due_s = min(due, default=None)
        return decision

    def follow(self, priority: int, needed: int, kubernetes: Kubernetes) -> None:
        """The spec has changed."""
        self.needed, self._limit_s = needed, kubernetes.start_timeout_s
        self._rank = replace(self._rank, priority=priority)
        self.placement = Placement()  # is made again from the pods

    def blocked_by(self) -> GangPriority | None:
        """The job that this one has given nodes up to and that still lacks some: a request now
        would take its capacity away."""
        if self._waits_for is not None and not self._gangs.is_incomplete(self._waits_for.key):
            self._waits_for = None
        return self._waits_for

    def leave(self) -> None:
        """The job is complete, has no nodes, or requests none any more."""
        self._incomplete_since = None
        self._gangs.leave(self._rank.key)

    def _gang(
        self,
        now_s: float,
        pods: Mapping[str, Document],
        trained: Set[str],
        provisioned: Set[str],
        known: Callable[[str], KnownNode | None],
    ) -> StartupDecision:
        scheduled = [name for name, pod in pods.items() if pod_conditions.node_name(pod)]
        waiting = [name for name in self.stuck_since if name not in scheduled]
        new = {name: pod for name, pod in pods.items() if name not in trained}
        if len(scheduled) >= self.needed:
            self._rank, self._waits_for = replace(self._rank, failed=False), None
        if not waiting or not scheduled or len(scheduled) >= self.needed:
            self.leave()
            return StartupDecision()
        if self._incomplete_since is None:
            self._incomplete_since = now_s
        hold_s = self._timing.gang_hold_s
        if provisioned & set(waiting):
            hold_s = max(hold_s, self._timing.provisioning_s)
        hold_until_s = self._incomplete_since + hold_s
        self._rank = replace(
            self._rank,
            trained=bool(trained),
            class_priority=max(int(pod["spec"].get("priority") or 0) for pod in pods.values()),
        )
        if not any(name in new for name in scheduled):
            # The replacement comes before jobs that have not started, but for a limited time: there
            # may never be capacity for it.
            if now_s < hold_until_s:
                self._enter(pods, new, known)
                return StartupDecision(due_s=hold_until_s)
            self._gangs.leave(self._rank.key)
            return StartupDecision()
        self._enter(pods, new, known)
        ahead = self._gangs.ahead_of(self._rank.key)
        until_s = self._incomplete_since + self._timing.gang_wait_s if ahead else hold_until_s
        if now_s < until_s:
            # A job that comes first may enter meanwhile.
            return StartupDecision(due_s=min(now_s + self._timing.gang_wait_s / 2, until_s))
        return self._give_up(len(scheduled), pods, new, ahead)

    def _enter(
        self,
        pods: Mapping[str, Document],
        new: Mapping[str, Document],
        known: Callable[[str], KnownNode | None],
    ) -> None:
        """Count nodes that would be given up; an unknown node counts as usable by all."""
        taken = sorted({pod_conditions.node_name(pods[name]) for name in new} - {""})
        nodes = tuple(known(name) or KnownNode(name) for name in taken)
        self._gangs.enter(Contender(self._rank, self.placement, nodes))

    def _give_up(
        self,
        num_scheduled: int,
        pods: Mapping[str, Document],
        new: Mapping[str, Document],
        ahead: GangPriority | None,
    ) -> StartupDecision:
        whose = "all of them" if new.keys() == pods.keys() else "those that never trained"
        winner = "other workloads"
        if ahead is not None:
            winner = f"{shown(ahead, self._rank.namespace)}, which comes first"
        else:
            self._rank = replace(self._rank, failed=True)
        self._waits_for = ahead
        text = (
            f"{num_scheduled} nodes are scheduled and at least {self.needed} are needed; {whose} "
            f"are released to {winner}"
        )
        self.leave()
        self.stuck_since = {}
        return StartupDecision(dict.fromkeys(new, text), text)
