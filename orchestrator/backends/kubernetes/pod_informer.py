"""The pods of all jobs, from one watch, handed to the backend of each job.

Owns: the index by job, and what is kept of a pod. Must not: decide what a change means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import PODS
from holdfast.orchestrator.kube.informer import Change, Informer, Key

Listener = Callable[[Change, Document], None]


class PodInformer:
    """`run()` for ever; backends wait for `synced` and subscribe."""

    def __init__(self, cluster: KubeClient, namespaces: Sequence[str] = ("",)) -> None:
        """`namespaces`: an empty one: all."""
        self.handlers: list[Listener] = []
        """Called for every change of any pod."""
        self._listeners: dict[Key, Listener] = {}
        self._by_job: dict[Key, dict[str, Document]] = {}
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
        """Name -> pod, as of now."""
        return self._by_job.get(job, {})

    def subscribe(self, job: Key, listener: Listener) -> None:
        """`listener` is called from the event loop for every change from now on."""
        assert job not in self._listeners, f"{job} is watched twice"
        self._listeners[job] = listener

    def unsubscribe(self, job: Key) -> None:
        self._listeners.pop(job, None)

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
        listener = self._listeners.get(job)
        if listener is not None:
            listener(change, pod)


def trim(pod: Document) -> Document:
    """What words.py and the backend read; of 10 kB of a pod one or two."""
    metadata = pod["metadata"]
    kept = (
        "name", "namespace", "uid", "resourceVersion", "labels", "annotations", "ownerReferences",
        "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "finalizers",
    )  # fmt: skip
    kept_spec = ("nodeName", "schedulingGates")
    spec, status = pod.get("spec", {}), pod.get("status", {})
    kept_status = (
        "phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses",
    )  # fmt: skip
    return {
        "metadata": {key: metadata[key] for key in kept if key in metadata},
        "spec": {key: spec[key] for key in kept_spec if key in spec},
        "status": {key: status[key] for key in kept_status if key in status},
    }
