"""Value of `resources.gpu: auto` for a job of this cluster: whether Kubernetes nodes that its pods
may use have GPUs. Nodes are listed once a while for all jobs of an operator.

The right to list nodes is cluster-wide, and an operator of one namespace may lack it: then no GPUs
are taken, and the job's Event names the right and the field.
"""

from __future__ import annotations

import asyncio

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.backends.kubernetes.node_informer import known_node
from holdfast.orchestrator.backends.kubernetes.placement import KnownNode, Placement
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings, pod_document
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import NODES, Forbidden
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.planner.gpus import GpusFound, Resolved, TooFewGpus, resolve, with_gpus

FRESH_S = 30.0
"""An autoscaler adds nodes; many jobs may start within a second."""


class GpuFinder:
    def __init__(self, cluster: KubeClient, settings: PodSettings) -> None:
        self._cluster, self._settings = cluster, settings
        self._nodes: list[KnownNode] = []
        self._read_s: float | None = None
        self._reading = asyncio.Lock()

    async def resolve(self, job: TrainingJob, owner: Owner) -> Resolved:
        """Raises UserError where nodes have GPUs, but fewer than a pod has workers; SpecError,
        ApiError."""
        resource = job.spec.kubernetes.gpu_resource
        pod = pod_document(with_gpus(job, 0), owner, self._settings, "node")["spec"]
        try:
            return resolve(job, await self._found(pod, resource))
        except TooFewGpus as error:  # nodes may be added: the operator tries again
            raise UserError(str(error)) from None

    async def _found(self, pod: Document, resource: str) -> GpusFound:
        if _asks(pod, resource):
            return GpusFound(0, f"spec.kubernetes.podTemplate asks for {resource}", wanted=True)
        try:
            nodes = await self._list()
        except Forbidden:
            return GpusFound(
                0,
                "the operator may not list nodes (rules of its ClusterRole), so it does not know "
                "whether they have any; write gpu: 1 for GPUs",
            )
        # Clusters often keep other pods off these nodes, and let pods that ask for GPUs in.
        own = {"key": resource, "operator": "Exists"}
        place = Placement({**pod, "tolerations": [*(pod.get("tolerations") or ()), own]})
        usable = [node for node in nodes if place.allows(node)]
        most = max((_count(node, resource) for node in usable), default=0)
        has = f"{most} {resource}" if most else f"no {resource}"
        return GpusFound(
            most, f"of {len(usable)} nodes that its pods may use the largest has {has}"
        )

    async def _list(self) -> list[KnownNode]:
        async with self._reading:
            now = asyncio.get_running_loop().time()
            if self._read_s is None or now - self._read_s > FRESH_S:
                nodes: list[KnownNode] = []
                async for page, _version in self._cluster.pages(NODES):
                    nodes += [known_node(node["metadata"]["name"], node) for node in page]
                self._nodes, self._read_s = nodes, now
            return self._nodes


def _asks(pod: Document, resource: str) -> bool:
    """The pod template may name the resource, or tolerate the taint of nodes that have it."""
    for container in pod["containers"]:
        resources = container.get("resources") or {}
        amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        if container.get("name") == names.CONTAINER and resource in amounts:
            return True
    return any(toleration.get("key") == resource for toleration in pod.get("tolerations") or ())


def _count(node: KnownNode, resource: str) -> int:
    text = str(node.allocatable.get(resource, "0"))
    return int(text) if text.isdigit() else 0
