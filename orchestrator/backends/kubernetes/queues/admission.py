"""What the backend of one job asks: what its pods look like, which may be asked for now, what has
to be there before them.

Owns: the requests for PodGroups, and which nodes wait behind Kueue's gate. Must not: create or
delete pods; the backend does.

Nodes behind a gate are no nodes of the job yet: the core is told of them when they are admitted, so
that it neither waits for them nor gives them back, which would lose their place in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from dataclasses import dataclass

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import Forbidden, Invalid, NotFound, Resource
from holdfast.orchestrator.kube.names import Owner

from .. import pod_conditions
from . import kueue
from .base import Document, PodGang, group_of
from .selection import integration_of

UNSCHEDULABLE = "Unschedulable"
"""What a scheduler says of a pod; of members of a gang that is not complete it may say nothing."""
MAX_NAMED = 5
"""Queues that a complaint lists."""


@dataclass(frozen=True)
class AdmissionPlan:
    """What comes of a request for nodes."""

    ready: tuple[str, ...] = ()
    """Nodes that were asked for before and are admitted now; nothing is to be made then."""
    create: int = 0
    held: str = ""
    """Those that are made are behind a gate, and why; empty: they are nodes at once."""


class Admission:
    """Of one job."""

    def __init__(self, job: TrainingJob, owner: Owner, cluster: KubeClient) -> None:
        self._cluster = cluster
        self._group = group_of(job, owner)
        self._integration = integration_of(job)
        self._kueue = isinstance(self._integration, kueue.Kueue)
        self._granted: set[str] = set()
        """Nodes that the core knows."""
        self._loose = False
        """The gang is fixed at a size that it no longer has: further nodes go by themselves."""

        self._most = 0
        """Nodes that the job may have; those behind a gate count."""
        self._stopped = False
        self.changed = asyncio.Event()
        """Set when a plan may be another one; then there is a new event."""
        self.follow(job)

    @property
    def group(self) -> PodGang:
        return self._group

    def follow(self, job: TrainingJob) -> None:
        """The spec has changed: its size, or that it is held."""
        nodes = job.spec.nodes
        self._group = group_of(job, self._group.owner)
        self._most = 0 if job.spec.suspend else nodes.max + nodes.spares
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def stop(self) -> None:
        """Nothing is to be made any more."""
        self._stopped = True

    # -- pods ----------------------------------------------------------------------------------
    def opened(self, pods: Mapping[str, Document]) -> None:
        """`pods`: those that there are when we take the job up."""
        self._granted = {name for name, pod in pods.items() if not self.is_held(pod)}

    def decorate(self, pod: Document, pods: Mapping[str, Document], index: int = 0) -> Document:
        """`pods`: all of the job; `index`: of this pod among those that are made together."""
        if self._integration is None or self._loose:
            return pod
        member = not self._kueue or index < kueue.members_wanted(pods, self._group)
        return self._integration.pod(pod, self._group, member=member)

    def plan(
        self, count: int, pods: Mapping[str, Document], coming: Set[str] = frozenset()
    ) -> AdmissionPlan:
        """`count`: what the core asks for; `coming`: pods that are asked for and may not be among
        `pods` yet."""
        if not self._kueue:
            return AdmissionPlan(create=count)
        waiting = AdmissionPlan(held=self.why_held)
        if self._stopped or coming - pods.keys():
            return waiting
        admitted = [
            name
            for name, pod in pods.items()
            if name not in self._granted
            and not (
                self.is_held(pod) or pod_conditions.is_over(pod) or pod_conditions.is_leaving(pod)
            )
        ]
        if admitted:
            self._granted.update(admitted)
            return AdmissionPlan(ready=tuple(sorted(admitted)))
        if not self._most:
            return waiting
        missing = kueue.members_wanted(pods, self._group)
        if missing:
            return AdmissionPlan(create=missing, held=self.why_held)
        held = [pod for pod in pods.values() if self.is_held(pod)]
        if any(kueue.is_member(pod) for pod in held) or any(map(kueue.is_ending, pods.values())):
            return waiting
        return AdmissionPlan(create=max(0, count - len(held)), held=self.why_held)

    def spent(self, pods: Mapping[str, Document]) -> list[str]:
        """Ended nodes that stand in the way of new ones as long as their pods are there."""
        return kueue.spent(pods) if self._kueue and not self._stopped else []

    def unwanted(self, pods: Mapping[str, Document]) -> list[str]:
        """Nodes behind the gate beyond what the job may have. The gang goes as a whole."""
        held = [name for name, pod in pods.items() if self.is_held(pod)]
        if not self._most:
            return held
        alive = sum(
            not (pod_conditions.is_over(p) or pod_conditions.is_leaving(p)) for p in pods.values()
        )
        single = [name for name in held if not kueue.is_member(pods[name])]
        return single[: max(0, alive - self._most)]

    @property
    def why_held(self) -> str:
        return (
            f"queued: Kueue's queue {self._group.queue} has not admitted them yet "
            f"(kubectl get workloads -n {self._group.owner.namespace} says why)"
        )

    def is_held(self, pod: Document) -> bool:
        """A queue holds it back: it is no node yet, and takes no room."""
        return self._kueue and kueue.is_held(pod)

    def waits(self, pod: Document) -> bool:
        """It is not placed, and how long that takes is the business of whoever places gangs. What
        Kueue has admitted goes the way of any pod."""
        if self._kueue:
            return self.is_held(pod)
        if self._integration is None or pod_conditions.place(pod) or pod_conditions.is_leaving(pod):
            return False
        found = pod_conditions.trouble(pod)
        return not pod_conditions.is_over(pod) and (found is None or found.code == UNSCHEDULABLE)

    def trouble(self, pod: Document) -> pod_conditions.PodProblem | None:
        """Why it does not start, as far as it is the queue's doing, or that of the scheduler."""
        if self._integration is None or pod_conditions.is_over(pod) or not self.waits(pod):
            return None
        if self._kueue:
            return pod_conditions.PodProblem("Queued", self.why_held)
        found = pod_conditions.trouble(pod)
        where = f" (queue {self._group.queue})" if self._group.queue else ""
        text = f"queued: {self._integration.title} places {self._group.size} nodes together{where}"
        return pod_conditions.PodProblem("Queued", f"{text}; {found.text}" if found else text)

    def last_patches(self, pods: Mapping[str, Document]) -> dict[str, Document]:
        """Pod -> patch, when the job has ended."""
        if not self._kueue:
            return {}
        return {name: kueue.NO_REPLACEMENT for name, pod in pods.items() if kueue.is_member(pod)}

    # -- what has to be there before the pods ----------------------------------------------------
    async def ensure(self, pod: Document, pods: Mapping[str, Document]) -> None:
        """`pod`: what the pods of the job look like; `pods`: those that there are. Raises UserError
        when the cluster lacks what the spec chooses, and ApiError."""
        integration = self._integration
        if integration is None:
            return
        if self._kueue:
            await self._check_local_queue()
            return
        for api in integration.apis:
            document = integration.extra(self._group, api, pod)
            assert document is not None, "only Kueue needs no object"
            try:
                await self._apply(
                    api, document, any(not pod_conditions.is_over(one) for one in pods.values())
                )
                return
            except NotFound:
                continue
        raise self._lacking()

    async def _apply(self, api: Resource, document: Document, running: bool) -> None:
        namespace, name = self._group.owner.namespace, self._group.name
        self._loose = False
        try:
            await self._cluster.apply(api, namespace, name, document)
        except Invalid as error:
            if "immutable" not in error.message:
                raise
            if running:
                # Its members are placed already, and it may not go while they are there.
                self._loose = True
                return
            await self._cluster.delete(api, namespace, name)
            await self._cluster.apply(api, namespace, name, document)

    async def _check_local_queue(self) -> None:
        for api in kueue.LOCAL_QUEUES:
            try:
                found, _version = await self._cluster.list_all(api, self._group.owner.namespace)
            except Forbidden:
                # Whether the queue exists is Kueue's to say then: the pods wait behind their gate.
                return
            except NotFound:
                continue
            there = sorted(one["metadata"]["name"] for one in found)
            if self._group.queue not in there:
                named = ", ".join(there[:MAX_NAMED]) or "none"
                raise UserError(
                    f"spec.queue: got {self._group.queue}; expected a LocalQueue of namespace "
                    f"{self._group.owner.namespace} (there: {named}); make it, or name another"
                )
            return
        raise self._lacking()

    def _lacking(self) -> UserError:
        integration = self._integration
        assert integration is not None
        api = integration.apis[0]
        return UserError(
            f"spec.kubernetes.gang: {integration.title} was chosen, and the cluster does not serve "
            f"{api.plural}.{api.group}; {integration.remedy}"
        )
