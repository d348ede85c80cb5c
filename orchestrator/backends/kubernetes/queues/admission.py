"""Admission of one job's pods by its gang scheduler or queue: what the pods look like, which may be
created now, and which objects have to exist first.

Gated pods are not nodes of the job yet. The core gets them as nodes when they are admitted. Before,
it would wait for them or release them, and they would lose their position in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from dataclasses import dataclass

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import Forbidden, Invalid, NotFound, Resource
from holdfast.orchestrator.kube.names import Document, Owner

from .. import pod_conditions
from . import kueue
from .base import PodGang, gang_of
from .selection import integration_of

UNSCHEDULABLE = "Unschedulable"
"""A scheduler's reason. Members of an incomplete gang may have none."""
MAX_NAMED = 5
"""Queues that an error message lists."""


@dataclass(frozen=True)
class AdmissionPlan:
    """The answer to a request for nodes."""

    ready: tuple[str, ...] = ()
    """Nodes that were requested earlier and are admitted now; nothing is created then."""
    create: int = 0
    held: str = ""
    """Reason why created pods are gated; empty: they are nodes at once."""


class Admission:
    """The admission of one job's pods."""

    def __init__(self, job: TrainingJob, owner: Owner, cluster: KubeClient) -> None:
        self._cluster = cluster
        self._gang = gang_of(job, owner)
        self._integration = integration_of(job)
        self._kueue = isinstance(self._integration, kueue.Kueue)
        self._granted: set[str] = set()
        """Nodes that the core has received."""
        self._gang_outdated = False
        """The gang's size cannot follow the job's: further nodes are scheduled individually."""
        self._max_nodes = 0
        """Nodes that the job may have, gated ones included."""
        self._stopped = False
        self.changed = asyncio.Event()
        """Set when the plan may have changed; replaced by a new event then."""
        self.follow(job)

    @property
    def gang(self) -> PodGang:
        return self._gang

    def follow(self, job: TrainingJob) -> None:
        """The spec has changed: size, suspension or, without pods, the gang scheduler."""
        nodes = job.spec.nodes
        self._gang = gang_of(job, self._gang.owner)
        self._integration = integration_of(job)
        self._kueue = isinstance(self._integration, kueue.Kueue)
        self._max_nodes = 0 if job.spec.suspend else nodes.max + nodes.spares
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def stop(self) -> None:
        """Plan no further pods."""
        self._stopped = True

    # -- pods ----------------------------------------------------------------------------------
    def opened(self, pods: Mapping[str, Document]) -> None:
        """`pods`: those that exist at a takeover."""
        self._granted = {name for name, pod in pods.items() if not self.is_held(pod)}

    def decorate(self, pod: Document, pods: Mapping[str, Document], index: int = 0) -> Document:
        """`pods`: all of the job; `index`: of this pod within its request."""
        if self._integration is None or self._gang_outdated:
            return pod
        member = not self._kueue or index < kueue.members_wanted(pods, self._gang)
        return self._integration.pod(pod, self._gang, member=member)

    def plan(
        self, count: int, pods: Mapping[str, Document], creating: Set[str] = frozenset()
    ) -> AdmissionPlan:
        """`count`: nodes that the core requests; `creating`: pods that may not be in `pods` yet."""
        if not self._kueue:
            return AdmissionPlan(create=count)
        waiting = AdmissionPlan(held=self.why_held)
        if self._stopped or creating - pods.keys():
            return waiting
        admitted = [
            name
            for name, pod in pods.items()
            if name not in self._granted and pod_conditions.is_active(pod) and not self.is_held(pod)
        ]
        if admitted:
            self._granted.update(admitted)
            return AdmissionPlan(ready=tuple(sorted(admitted)))
        if not self._max_nodes:
            return waiting
        missing = kueue.members_wanted(pods, self._gang)
        if missing:
            return AdmissionPlan(create=missing, held=self.why_held)
        held = [pod for pod in pods.values() if self.is_held(pod)]
        if any(kueue.is_member(pod) for pod in held) or any(map(kueue.is_ending, pods.values())):
            return waiting
        return AdmissionPlan(create=max(0, count - len(held)), held=self.why_held)

    def succeeded_members(self, pods: Mapping[str, Document]) -> list[str]:
        """Ended nodes that have to be deleted before they can be replaced."""
        return kueue.succeeded_members(pods) if self._kueue and not self._stopped else []

    def surplus(self, pods: Mapping[str, Document]) -> list[str]:
        """Gated nodes in excess of what the job may have; the gang only as a whole."""
        held = [name for name, pod in pods.items() if self.is_held(pod)]
        if not self._max_nodes:
            return held
        alive = sum(map(pod_conditions.is_active, pods.values()))
        single = [name for name in held if not kueue.is_member(pods[name])]
        return single[: max(0, alive - self._max_nodes)]

    @property
    def why_held(self) -> str:
        return (
            f"queued: Kueue's queue {self._gang.queue} has not admitted the pods yet "
            f"(kubectl get workloads -n {self._gang.owner.namespace} shows why)"
        )

    def is_held(self, pod: Document) -> bool:
        """A queue has not admitted it: it is not a node yet and takes up no capacity."""
        return self._kueue and kueue.is_held(pod)

    def waits(self, pod: Document) -> bool:
        """True if the pod is unscheduled and its gang scheduler or queue decides when it runs. Pods
        that Kueue has admitted are treated like any other pod."""
        if self._kueue:
            return self.is_held(pod)
        if (
            self._integration is None
            or pod_conditions.node_name(pod)
            or pod_conditions.is_terminating(pod)
        ):
            return False
        fault = pod_conditions.problem(pod)
        return not pod_conditions.is_over(pod) and (fault is None or fault.code == UNSCHEDULABLE)

    def problem(self, pod: Document) -> pod_conditions.PodProblem | None:
        """Reason why the pod does not start, if its queue or gang scheduler is the reason."""
        if self._integration is None or pod_conditions.is_over(pod) or not self.waits(pod):
            return None
        if self._kueue:
            return pod_conditions.PodProblem("Queued", self.why_held)
        fault = pod_conditions.problem(pod)
        text = f"queued: {self._integration.title} schedules {self._gang.size} nodes together"
        return pod_conditions.PodProblem("Queued", f"{text}; {fault.text}" if fault else text)

    def last_patches(self, pods: Mapping[str, Document]) -> dict[str, Document]:
        """Pod -> patch, for a job that has ended."""
        if not self._kueue:
            return {}
        return {name: kueue.NO_REPLACEMENT for name, pod in pods.items() if kueue.is_member(pod)}

    # -- objects that have to exist before the pods ----------------------------------------------
    async def ensure(self, pods: Mapping[str, Document]) -> None:
        """Create or update the PodGroup. `pods`: those that exist. Raises ApiError, and UserError
        if the cluster lacks the chosen system."""
        integration = self._integration
        if integration is None:
            return
        if self._kueue:
            await self._check_local_queue()
            return
        for api in integration.apis:
            document = integration.pod_group(self._gang, api)
            assert document is not None, "only Kueue needs no object"
            try:
                await self._apply(
                    api, document, any(not pod_conditions.is_over(pod) for pod in pods.values())
                )
                return
            except NotFound:
                continue
        raise self._lacking()

    async def _apply(self, api: Resource, document: Document, running: bool) -> None:
        namespace, name = self._gang.owner.namespace, self._gang.name
        self._gang_outdated = False
        try:
            await self._cluster.patch(api, namespace, name, document, apply=True)
        except Invalid as error:
            if "immutable" not in error.message:
                raise
            if running:
                # Its members are scheduled already, and it cannot be deleted while they exist.
                self._gang_outdated = True
                return
            await self._cluster.delete(api, namespace, name)
            await self._cluster.patch(api, namespace, name, document, apply=True)

    async def _check_local_queue(self) -> None:
        for api in kueue.LOCAL_QUEUES:
            try:
                local, _version = await self._cluster.list_all(api, self._gang.owner.namespace)
            except Forbidden:
                # Without the right to look, gated pods wait, and Kueue reports a missing queue.
                return
            except NotFound:
                continue
            queues = sorted(queue["metadata"]["name"] for queue in local)
            if self._gang.queue not in queues:
                named = ", ".join(queues[:MAX_NAMED]) or "none"
                raise UserError(
                    f"spec.queue: got {self._gang.queue}; expected a LocalQueue of namespace "
                    f"{self._gang.owner.namespace} (existing: {named}); create it, or name another"
                )
            return
        raise self._lacking()

    def _lacking(self) -> UserError:
        integration = self._integration
        assert integration is not None
        api = integration.apis[0]
        return UserError(
            f"spec.kubernetes.gang: {integration.title} was chosen, but the cluster does not serve "
            f"{api.plural}.{api.group}; {integration.remedy}"
        )
