"""The nodes of one job as pods of a cluster.

A pod is one node of the job, and its name is never used again. All jobs share one watch of pods. A
pod whose end Kubernetes cannot confirm (its node is NotReady) is deleted without force;
orphan_pods.py removes it when that is safe. Its workers are fenced by the generation anyway.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import starmap

import msgspec

from holdfast.orchestrator import tasks
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import PODS, ApiError, Forbidden
from holdfast.orchestrator.kube.informer import Backoff, Change
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.protocol.facts import NodeFacts

from ..base import NodeGone, NoRoom, Starts, coordinates
from . import pod_conditions, provisioning
from .gang_arbiter import GangArbiter, GangPriority, shown
from .job_secret import KeysUnusable
from .node_informer import NodeInformer
from .placement import Placement
from .pod_informer import PodInformer
from .pod_lifecycle import (
    CreatedPods,
    PodDeletion,
    PodTiming,
    StartupTimeouts,
    create_pods,
)
from .pods import PodSettings, pod_document
from .queues.admission import Admission

MAX_CONCURRENT = 16
"""Requests of one job at a time."""
REFUSAL_FRESH_S = 30.0
"""A job that still needs nodes requests them every few seconds; an older refusal is not shown."""

log = logging.getLogger("holdfast.kubernetes")


@dataclass
class OperatorContext:
    """Objects that the backends of all jobs of an operator share."""

    cluster: KubeClient
    pod_informer: PodInformer
    node_informer: NodeInformer
    gangs: GangArbiter
    settings: PodSettings
    timing: PodTiming = field(default_factory=PodTiming)


@dataclass(frozen=True)
class Refusal:
    """Reason why pods are not created, and until when none are requested."""

    why: str = ""
    until_s: float = 0.0
    code: str = "NoRoom"
    """CamelCase, the reason in the job's conditions."""
    of_size: bool = False
    """True if this number of pods was rejected and a smaller one may not be."""

    @classmethod
    def of(cls, count: int, error: HoldfastError, until_s: float, created: int = 0) -> Refusal:
        """The refusal of a request for `count` pods; `created` were created. Quotes the API server,
        except for errors that the user has to fix: a missing right and an unusable Secret."""
        code, why = "NoRoom", error.message if isinstance(error, ApiError) else str(error)
        if isinstance(error, Forbidden) and error.right_missing:
            code, why = "MissingRight", str(error)
        elif isinstance(error, KeysUnusable):
            code = "KeysUnusable"
        elif isinstance(error, ApiError):
            code = pod_conditions.refusal_code(error.message)
        requested = "1 pod was" if count == 1 else f"{count} pods were"
        result = f"only {created} created" if created else "none was created"
        return cls(f"{requested} requested and {result}: {why}", until_s, code, of_size=True)

    def left_s(self, now_s: float) -> float:
        return max(0.0, self.until_s - now_s)

    def text(self, now_s: float) -> str:
        """Empty when nothing was rejected recently."""
        return self.why if now_s < self.until_s + REFUSAL_FRESH_S else ""


@dataclass
class PodTracker:
    """The backend's own knowledge of its pods, beside the informer's."""

    creating: set[str] = field(default_factory=set)
    """Requested, and not in the informer yet."""
    ended: set[str] = field(default_factory=set)
    """Reported as ended."""
    noticed: set[str] = field(default_factory=set)
    """Reported as being removed."""
    released: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    """Nodes that have finished a step, by the core or their labels."""
    node_names: dict[str, str] = field(default_factory=dict)
    """Pod -> Kubernetes node, of all pods ever seen."""

    def present(self, pods: Mapping[str, Document]) -> set[str]:
        """Nodes that exist or are being created, gated ones included."""
        inactive = {name for name, pod in pods.items() if not pod_conditions.is_active(pod)}
        return {*pods, *self.creating} - inactive - self.ended - self.released

    def blamed(self, avoid: tuple[str, ...], pods: Mapping[str, Document]) -> dict[str, str]:
        """Blamed node of the job -> Kubernetes node, also of earlier operators."""
        kubernetes_nodes: dict[str, str] = {}
        for pod in pods.values():
            text = pod["metadata"].get("annotations", {}).get(names.BLAMED)
            kubernetes_nodes |= json.loads(text) if text else {}
        return kubernetes_nodes | {n: self.node_names[n] for n in avoid if self.node_names.get(n)}

    def doubtful(self, pods: Mapping[str, Document]) -> set[str]:
        """Kubernetes nodes with a released pod whose end is not confirmed. A dead machine is in
        that state for up to a minute, and the scheduler prefers it as the emptiest."""
        return {
            pod_conditions.node_name(pod)
            for name, pod in pods.items()
            if name in self.released
            and pod_conditions.node_name(pod)
            and not pod_conditions.is_over(pod)
        }


class KubernetesBackend:
    """Implements backends.base.Backend."""

    def __init__(
        self,
        job: TrainingJob,
        owner: Owner,
        shared: OperatorContext,
        *,
        created: str = "",
        checkpoint_path: str = "",
        on_notice: Callable[[str, str], None] = lambda node, detail: None,
        on_change: Callable[[], None] = lambda: None,
        ensure_secret: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`checkpoint_path`: where the job's checkpoints are.

        `on_notice(node, detail)`: Kubernetes is about to remove a node. `on_change`:
        `problems()` may have changed. `ensure_secret`: called before pods are created."""
        self._job, self._owner, self._shared = job, owner, shared
        self._cluster, self._timing = shared.cluster, shared.timing
        self._key = (owner.namespace, owner.name)
        self.queue = Admission(job, owner, shared.cluster)
        self._startup = StartupTimeouts(
            GangPriority(owner.namespace, owner.name, created, priority=job.spec.priority),
            job.spec.nodes.min,
            job.spec.kubernetes.start_timeout_s,
            shared.gangs,
            shared.timing,
        )
        self._on_notice, self._on_change = on_notice, on_change
        self._ensure_secret = ensure_secret
        self._checkpoint_path = checkpoint_path
        self._on_node_gone: Callable[[NodeGone], None] = lambda gone: None
        self._tracker = PodTracker()
        self._refusal = Refusal()
        limits_s = (shared.timing.refused_min_s, shared.timing.refused_max_s)
        self._startup_backoff, self._create_backoff = Backoff(*limits_s), Backoff(*limits_s)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = tasks.TaskSet(
            lambda error: log.warning("%s", error, extra={"job": owner.key})
        )
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._deletion = PodDeletion(shared.cluster, owner.namespace, self._slots)
        self._is_open = self._closing = self._check_pending = False
        self._pods_changed = asyncio.Event()
        self._provisioned: set[str] = set()
        """Pods for which an autoscaler adds machines."""
        self._looks_for_autoscaler = False

    # -- the contract --------------------------------------------------------------------------
    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        self._on_node_gone = on_node_gone
        await self._shared.pod_informer.synced()
        for name, pod in self._pods().items():
            self._locate(pod)
            if pod_conditions.has_trained(pod):
                self._tracker.trained.add(name)
            if pod_conditions.is_over(pod):
                self._tracker.ended.add(name)
        self.queue.opened(self._pods())
        self._shared.pod_informer.subscribe(self._key, self._on_pod_change)
        self._is_open = True
        self._check_startup()

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        """Create pods. Behind a queue, wait until some are admitted: gated pods are not nodes."""
        self._refuse_early()
        while True:
            changed = self.queue.changed
            await self._deletion.once(self.queue.succeeded_members(self._pods()))
            plan = self.queue.plan(count, self._pods(), self._tracker.creating)
            created = await self._create(plan.create, avoid) if plan.create else ()
            if plan.ready or not plan.held:
                return plan.ready or created
            await changed.wait()

    async def follow(self, job: TrainingJob) -> None:
        """The spec has changed: size, suspension, termination grace or, while the job is
        suspended, where its pods run. Raises ApiError."""
        if job.spec.nodes != self._job.spec.nodes:
            self._create_backoff.reset()
            if self._refusal.of_size:
                self._refusal = Refusal()  # another size may fit
        self._job = job
        self._startup.follow(job.spec.priority, job.spec.nodes.min, job.spec.kubernetes)
        self.queue.follow(job)
        if self._is_open:
            self._check_startup()
        await self._deletion.once(self.queue.surplus(self._pods()))

    async def release_node(self, node: str) -> None:
        self._tracker.creating.discard(node)
        self._tracker.released.add(node)
        pod = self._pods().get(node)
        if pod is None or not pod_conditions.is_terminating(pod):
            await self._deletion.once((node,))

    async def list_nodes(self) -> tuple[str, ...]:
        listed = {
            name
            for name, pod in self._pods().items()
            if not pod_conditions.is_over(pod) and not self.queue.is_held(pod)
        }
        return tuple(sorted(listed | self._tracker.creating))

    def starts(self) -> Starts:
        return Starts(limit_s=self._timing.start_limit_s)

    async def close(self, *, release: bool) -> None:
        self._closing = True
        self.queue.stop()
        self._startup.leave()
        if release and self._is_open:
            await self._end_all()
        if self._timer is not None:
            self._timer.cancel()
        if self._is_open:
            self._shared.pod_informer.unsubscribe(self._key)
            self._is_open = False
        await tasks.end(self._tasks)

    # -- beyond the contract -------------------------------------------------------------------
    def withhold(self, seconds: float) -> None:
        """Fault injection: report no capacity for this long."""
        self._hold_off(seconds, f"replacements are withheld for {seconds:g} s (fault injection)")

    def problems(self) -> list[pod_conditions.PodProblem]:
        """Reason why pods do not start or are not created, without duplicates."""
        problems = [
            self.queue.problem(pod) or pod_conditions.problem(pod) for pod in self._pods().values()
        ]
        if refusal := self._refusal.text(asyncio.get_running_loop().time()):
            problems.append(pod_conditions.PodProblem(self._refusal.code, refusal))
        return list(dict.fromkeys(problem for problem in problems if problem is not None))

    @property
    def machines(self) -> Mapping[str, str]:
        """Pod -> Kubernetes node, of all pods that this operator has seen."""
        return self._tracker.node_names

    def facts_of(self, node: str, facts: NodeFacts) -> NodeFacts:
        """The facts that an agent reports, with its location as Kubernetes knows it."""
        node_name = self._tracker.node_names.get(node, "")
        if not node_name:
            return facts
        labels = self._shared.node_informer.labels(node_name)
        keys = self._job.spec.kubernetes.topology_keys
        topology = (*coordinates(labels, keys), node_name)
        return msgspec.structs.replace(facts, failure_domain=node_name, topology=topology)

    def label(self, generation: int, ranks: Mapping[str, int]) -> None:
        """Write generation and lowest rank on the pods that train, and remove them from the others.
        Called when a generation has finished its first step."""
        self._tracker.trained.update(ranks)
        for name, pod in self._pods().items():
            rank = ranks.get(name)
            labels = {
                names.LABEL_RANK: None if rank is None else str(rank),
                names.LABEL_GENERATION: None if rank is None else str(generation),
            }
            current = pod["metadata"].get("labels", {})
            if pod_conditions.is_over(pod) or all(current.get(k) == v for k, v in labels.items()):
                continue
            self._tasks.start(self._patch(name, {"metadata": {"labels": labels}}))

    # -- creating pods -------------------------------------------------------------------------
    def _refuse_early(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if left_s := self._refusal.left_s(now_s):
            raise NoRoom(f"{self._refusal.text(now_s)}; next attempt in {left_s:.0f} s")
        if ahead := self._startup.blocked_by():
            first = shown(ahead, self._owner.namespace)
            text = f"waiting for capacity: {first} comes first and lacks nodes too"
            self._hold_off(0.0, text)
            raise NoRoom(text)

    async def _create(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        blamed = self._tracker.blamed(avoid, self._pods())
        nodes = tuple(names.new_node_name(self._owner.name) for _ in range(count))
        self._tracker.creating.update(nodes)
        try:
            if self._ensure_secret is not None:
                await self._ensure_secret()
            pods = [self._document(node, blamed, index) for index, node in enumerate(nodes)]
            await self.queue.ensure(self._pods())
        except HoldfastError as error:
            self._tracker.creating.difference_update(nodes)
            raise self._no_room(count, error) from None
        result = await create_pods(
            self._cluster, self._owner.namespace, pods, self._slots, self._timing.create_retry_s
        )
        if result.refusal is not None:
            return await self._keep_part(nodes, result, result.refusal)
        self._refusal = Refusal()
        self._create_backoff.reset()
        self._on_change()
        return nodes

    async def _keep_part(
        self, nodes: tuple[str, ...], result: CreatedPods, refusal: ApiError
    ) -> tuple[str, ...]:
        """Keep the created pods of a partly rejected request if the job can train with them.
        Otherwise delete them: they would only take up capacity."""
        created = result.created
        self._tracker.creating.difference_update(set(nodes) - set(created))
        self._tracker.ended.update(result.unknown)
        if created and len(self._tracker.present(self._pods())) >= self._job.spec.nodes.min:
            self._tasks.start(self._deletion.until_done(result.unknown))
            self._create_backoff.reset()
            self._no_room(len(nodes), refusal, len(created))
            return tuple(created)
        self._tracker.creating.difference_update(created)
        self._tracker.ended.update(created)
        self._tasks.start(self._deletion.until_done((*created, *result.unknown)))
        pause_s = self._create_backoff.next_s() if created else 0.0
        raise self._no_room(len(nodes), refusal, pause_s=pause_s)

    def _document(self, node: str, blamed: Mapping[str, str], index: int) -> Document:
        settings, doubtful = self._shared.settings, self._tracker.doubtful(self._pods())
        pod = pod_document(
            self._job, self._owner, settings, node, blamed, doubtful, self._checkpoint_path
        )
        return self.queue.decorate(pod, self._pods(), index)

    def _no_room(
        self, count: int, error: HoldfastError, created: int = 0, pause_s: float = 0.0
    ) -> NoRoom:
        until_s = asyncio.get_running_loop().time() + pause_s
        self._refusal = Refusal.of(count, error, until_s, created)
        self._on_change()
        return NoRoom(self._refusal.why)

    def _hold_off(self, seconds: float, why: str) -> None:
        self._refusal = Refusal(why, asyncio.get_running_loop().time() + seconds)
        self._on_change()

    # -- changes of pods -----------------------------------------------------------------------
    def _pods(self) -> dict[str, Document]:
        pods = self._shared.pod_informer.pods(self._key)
        return {name: pod for name, pod in pods.items() if self._owner.owns(pod)}

    def _on_pod_change(self, change: Change, pod: Document) -> None:
        if not self._owner.owns(pod):
            return
        name = pod["metadata"]["name"]
        self._locate(pod)
        if change == "DELETED":
            self._report_end(name, pod_conditions.end(pod, deleted=True))
        elif pod_conditions.is_over(pod):
            self._report_end(name, pod_conditions.end(pod))
        elif change == "ADDED" and name not in self._tracker.creating:
            # The API server did not answer its creation, and the request has failed since.
            self._tracker.ended.add(name)
            self._tasks.start(self._deletion.once((name,)))
        else:
            self._report_removal(name, pod)
        self._tracker.creating.discard(name)
        if pod_conditions.is_running(pod):
            self._startup_backoff.reset()
        self._pods_changed.set()
        self.queue.wake()
        if not self._check_pending:
            self._check_pending = True
            delay_s = self._timing.debounce_s
            asyncio.get_running_loop().call_later(delay_s, self._check_startup)

    def _locate(self, pod: Document) -> None:
        name, node_name = pod["metadata"]["name"], pod_conditions.node_name(pod)
        if node_name and self._tracker.node_names.get(name) != node_name:
            self._tracker.node_names[name] = node_name
            self._tasks.start(self._shared.node_informer.read_labels(node_name))

    def _report_removal(self, name: str, pod: Document) -> None:
        if name in self._tracker.noticed | self._tracker.released or self._closing:
            return
        detail = pod_conditions.disruption(pod)
        detail = detail or self._shared.node_informer.notice(pod_conditions.node_name(pod))
        if not detail and pod_conditions.is_terminating(pod):
            detail = "its pod is being deleted"
        if detail:
            self._tracker.noticed.add(name)
            self._on_notice(name, detail)

    def _report_end(self, name: str, detail: str) -> None:
        if name in self._tracker.ended:
            return
        self._tracker.ended.add(name)
        if not self._closing:
            log.info("%s: %s", name, detail, extra={"job": self._owner.key})
            self._on_node_gone(NodeGone(name, detail))

    def _check_startup(self) -> None:
        """Called after each change, and when a time limit of StartupTimeouts is due."""
        self._check_pending = False
        if self._closing:
            return
        now_s = asyncio.get_running_loop().time()
        before = set(self._startup.stuck_since)
        pods = {
            name: pod
            for name, pod in self._pods().items()
            if name not in self._tracker.ended and not self.queue.waits(pod)
        }
        if not self._startup.placement.pod_spec:
            self._startup.placement = self._placement()
        decision = self._startup.decide(
            now_s,
            pods,
            self._tracker.trained,
            provisioned=self._provisioned | provisioning.nominated(pods),
            known=self._shared.node_informer.known,
        )
        if self._unscheduled() and not self._looks_for_autoscaler:
            self._looks_for_autoscaler = True
            self._tasks.start(self._look_for_autoscaler())
        for name, why in decision.release.items():
            self._report_end(name, why)
        if decision.release:
            self._tasks.start(self._deletion.until_done(decision.release))
        if decision.hold_off:
            self._hold_off(self._startup_backoff.next_s(), decision.hold_off)
        if set(self._startup.stuck_since) != before:
            self._on_change()
        self._wake_at(decision.due_s, now_s)

    def _placement(self) -> Placement:
        """Constraints on where the pods may run; none if the template is not valid."""
        try:
            pod = pod_document(self._job, self._owner, self._shared.settings, self._owner.name)
        except UserError:
            return Placement()
        return Placement(pod["spec"])

    def _unscheduled(self) -> set[str]:
        """Pods that do not start because they have no Kubernetes node."""
        pods = self._pods()
        stuck = self._startup.stuck_since
        return {name for name in stuck if name in pods and not pod_conditions.node_name(pods[name])}

    async def _look_for_autoscaler(self) -> None:
        """Runs while there are such pods."""
        try:
            while pods := self._unscheduled():
                provisioned = await provisioning.provisioned_for(
                    self._cluster, self._owner.namespace, pods
                )
                if provisioned != self._provisioned:
                    self._provisioned = provisioned
                    self._check_startup()
                await asyncio.sleep(self._timing.provisioning_check_s)
        finally:
            self._looks_for_autoscaler = False

    def _wake_at(self, due_s: float | None, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s:
            delay_s = max(0.05, due_s - now_s)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._check_startup)

    # -- the end of the job --------------------------------------------------------------------
    async def _end_all(self) -> None:
        """Delete the pods whose agents do not end by themselves. Raises ApiError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timing.agents_end_s):
                while any(map(pod_conditions.is_running, self._pods().values())):
                    self._pods_changed.clear()
                    await self._pods_changed.wait()
        await asyncio.gather(*starmap(self._patch, self.queue.last_patches(self._pods()).items()))
        left = [name for name, pod in self._pods().items() if not pod_conditions.is_over(pod)]
        await self._deletion.once({*left, *self._tracker.creating})

    async def _patch(self, name: str, body: Document) -> None:
        async with self._slots:
            await self._cluster.patch(PODS, self._owner.namespace, name, body)
