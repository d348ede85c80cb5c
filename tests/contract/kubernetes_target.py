"""The contract suite's Kubernetes cluster with one node; nodes of the job are pods.

No operator runs. The agent of a pod is a process of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.api.v1alpha1.crd import NAME
from holdfast.orchestrator.backends.base import Backend, NodeGone, Starts
from holdfast.orchestrator.backends.kubernetes.backend import KubernetesBackend, OperatorContext
from holdfast.orchestrator.backends.kubernetes.gang_arbiter import GangArbiter
from holdfast.orchestrator.backends.kubernetes.job_secret import ensure_keys
from holdfast.orchestrator.backends.kubernetes.node_informer import NodeInformer
from holdfast.orchestrator.backends.kubernetes.pod_informer import PodInformer
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings
from holdfast.orchestrator.kube.client import KubeClient as Api
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.kube.pod_schema import definition_text
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig import images
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.waiting import Waited, until

NAMESPACE = "default"
END_S = 60.0
"""A busy kubelet ends a pod some time after its deletion."""


def make_job() -> TrainingJob:
    """A job with a short grace, since the agents have no controller to hand over to."""
    return job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "contract", "namespace": NAMESPACE},
            "spec": {
                "entrypoint": {"script": "train.py"},
                "nodes": {"max": 4},
                "recovery": {"terminationGraceSeconds": 1},
            },
        }
    )


class ConnectedBackend:
    """A KubernetesBackend with its own client and informer, as in an operator."""

    def __init__(self, kubeconfig: Path, job: TrainingJob, owner: Owner) -> None:
        self._kubeconfig, self._job, self._owner = kubeconfig, job, owner
        self._inner: KubernetesBackend | None = None

    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        self._api = await Api.connect(kubeconfig=self._kubeconfig)
        pod_informer = PodInformer(self._api, (NAMESPACE,))
        self._watching = asyncio.create_task(pod_informer.run())
        settings = PodSettings(endpoint="127.0.0.1:1", image=images.image("worker"))
        shared = OperatorContext(
            self._api, pod_informer, NodeInformer(self._api), GangArbiter(), settings
        )

        async def ensure_secret() -> None:
            await ensure_keys(self._api, self._owner, None)

        self._inner = KubernetesBackend(self._job, self._owner, shared, ensure_secret=ensure_secret)
        await self._inner.open(on_node_gone)

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        return await self.inner.request_nodes(count, avoid)

    async def release_node(self, node: str) -> None:
        await self.inner.release_node(node)

    async def list_nodes(self) -> tuple[str, ...]:
        return await self.inner.list_nodes()

    def starts(self) -> Starts:
        return self.inner.starts()

    async def close(self, *, release: bool) -> None:
        await self.inner.close(release=release)
        self._watching.cancel()
        await asyncio.wait([self._watching])
        await self._api.close()

    def withhold(self, seconds: float) -> None:
        self.inner.withhold(seconds)

    @property
    def inner(self) -> KubernetesBackend:
        assert self._inner is not None
        return self._inner


class KubernetesContractTarget:
    def __init__(self, directory: Path) -> None:
        found = programs.locate()
        needed = programs.CONTROL_PLANE + programs.NODE
        if refusal := programs.machine_refusal() or found.refusal(needed):
            pytest.skip(refusal)
        self.job = make_job()
        self._run = Run()
        self._run.__enter__()
        try:
            self._cluster = Cluster(self._run, found)
            self._cluster.start(1)
            self._owner = self._make_owner()
        except BaseException:
            self.close()
            raise

    def _make_owner(self) -> Owner:
        """Kubernetes deletes pods whose owner does not exist."""
        kubectl = self._cluster.kubectl()
        kubectl.run("apply", "--server-side", "--filename=-", stdin=definition_text())
        kubectl.served(NAME)
        metadata = {"name": self.job.name, "namespace": NAMESPACE}
        made = kubectl.create(
            {
                "apiVersion": self.job.api_version,
                "kind": self.job.kind,
                "metadata": metadata,
                "spec": {"entrypoint": {"script": "train.py"}, "nodes": {"max": 4}},
            }
        )
        return Owner(NAMESPACE, self.job.name, made["metadata"]["uid"])

    def make(self) -> Backend:
        return ConnectedBackend(self._cluster.control_plane.kubeconfig, self.job, self._owner)

    def agent_pid(self, node: str) -> int | None:
        return self._agents().get(node)

    def _agents(self) -> dict[str, int]:
        """Node -> first process of its pod."""
        found: dict[str, int] = {}
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if process.info["status"] == psutil.STATUS_ZOMBIE or "--node" not in words:
                continue
            if f"{NAMESPACE}/{self.job.name}" in words:
                node = words[words.index("--node") + 1]
                found[node] = min(process.pid, found.get(node, process.pid))
        return found

    def leftovers(self) -> list[str]:
        """Agents that have not ended END_S after their pods were deleted."""
        try:
            until(lambda: not self._agents(), "all agents to end", timeout_s=END_S)
        except Waited:
            return [f"{node}: {self._describe(node, pid)}" for node, pid in self._agents().items()]
        return []

    def _describe(self, node: str, pid: int) -> str:
        """Shows whether the backend, Kubernetes or the agent is late."""
        process = psutil.Process(pid).as_dict(["pid", "ppid", "status", "cmdline"])
        pod = self._cluster.kubectl().inside(NAMESPACE).get("pod", node)
        return f"process {process}, pod {pod and {**pod['metadata'], **pod['status']}}"

    def close(self) -> None:
        self._run.__exit__(None, None, None)
