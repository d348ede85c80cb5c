"""The pods of all jobs from one watch per namespace, indexed by job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import PODS
from holdfast.orchestrator.kube.informer import Change, Informer, Key

from . import pod_conditions

Handler = Callable[[Change, Document], None]
FIELDS = {
    "metadata": "name namespace uid resourceVersion labels annotations ownerReferences "
    "creationTimestamp deletionTimestamp deletionGracePeriodSeconds finalizers",
    "spec": "nodeName schedulingGates priority",
    "status": "phase reason message conditions containerStatuses initContainerStatuses "
    "nominatedNodeName",
}
"""Fields that pod_conditions.py, the queues and the backend read."""


class PodInformer:
    """`run()` until cancelled; backends wait for `synced` and subscribe."""

    def __init__(self, cluster: KubeClient, namespaces: Sequence[str] = ("",)) -> None:
        """An empty namespace stands for all."""
        self.handlers: list[Handler] = []
        """Called for every change of any pod."""
        self._by_job: dict[Key, dict[str, Document]] = {}
        self._job_handlers: dict[Key, Handler] = {}
        self.informers = [
            Informer(
                cluster,
                PODS,
                self._on_change,
                namespace=namespace,
                selector=names.ALL_NODES,
                trim=trim,
            )
            for namespace in namespaces
        ]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for informer in self.informers:
                group.create_task(informer.run())

    async def synced(self) -> None:
        for informer in self.informers:
            await informer.synced.wait()

    def pods(self, job: Key) -> dict[str, Document]:
        """Name -> pod."""
        return self._by_job.get(job, {})

    def machines(self) -> set[str]:
        """Kubernetes nodes with pods that run."""
        all_pods = (pod for pods in self._by_job.values() for pod in pods.values())
        return {pod_conditions.node_name(pod) for pod in all_pods if pod_conditions.is_running(pod)}

    def look_again(self, machine: str) -> None:
        """Something about this Kubernetes node has changed: tell the jobs that have pods there."""
        for job, handler in list(self._job_handlers.items()):
            for pod in list(self.pods(job).values()):
                if pod_conditions.node_name(pod) == machine:
                    handler("MODIFIED", pod)

    def subscribe(self, job: Key, handler: Handler) -> None:
        """`handler` is called from the event loop for every further change."""
        assert job not in self._job_handlers, f"{job} is watched twice"
        self._job_handlers[job] = handler

    def unsubscribe(self, job: Key) -> None:
        self._job_handlers.pop(job, None)

    def _on_change(self, change: Change, pod: Document) -> None:
        metadata = pod["metadata"]
        job = (metadata["namespace"], metadata["labels"][names.LABEL_JOB])
        pods = self._by_job.setdefault(job, {})
        if change == "DELETED":
            pods.pop(metadata["name"], None)
            if not pods:
                del self._by_job[job]
        else:
            pods[metadata["name"]] = pod
        for handler in self.handlers:
            handler(change, pod)
        if job in self._job_handlers:
            self._job_handlers[job](change, pod)


def trim(pod: Document) -> Document:
    """One or two of the 10 kB of a pod."""
    return {
        part: {name: pod[part][name] for name in kept.split() if name in pod.get(part, {})}
        for part, kept in FIELDS.items()
    }
