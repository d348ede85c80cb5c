"""Force-deletes pods that are being deleted and whose Kubernetes node is gone, for all jobs.

Kubernetes removes such pods itself, but only 40 to 80 s after their node has gone (the orphan
quarantine and the period of its pod garbage collector), and never while the node is only NotReady.
A pod whose kubelet may still confirm its end is not touched.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import PODS, ApiError
from holdfast.orchestrator.kube.informer import Backoff, Change, Key, key_of

from . import pod_conditions
from .node_informer import NodeInformer

CHECK_MIN_S = 2.0
CHECK_MAX_S = 30.0
"""One request per check for each node with pods that are being deleted; none without such pods."""

log = logging.getLogger("holdfast.kubernetes")


class TerminatingPod(NamedTuple):
    pod: Key
    job: str


class OrphanPods:
    """`on_pod_change` is called for every change of a pod of any job."""

    def __init__(
        self, cluster: KubeClient, nodes: NodeInformer, check_min_s: float = CHECK_MIN_S
    ) -> None:
        self._cluster, self._nodes, self._check_min_s = cluster, nodes, check_min_s
        self._terminating: dict[str, dict[str, TerminatingPod]] = {}
        """Kubernetes node -> uid -> pod."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def on_pod_change(self, change: Change, pod: Document) -> None:
        node, uid = pod_conditions.node_name(pod), str(pod["metadata"]["uid"])
        if change == "DELETED":
            self._forget(node, uid)
        elif node and pod_conditions.is_terminating(pod):
            terminating = TerminatingPod(key_of(pod), pod_conditions.job(pod))
            self._terminating.setdefault(node, {})[uid] = terminating
            if node not in self._tasks:
                self._tasks[node] = asyncio.get_running_loop().create_task(self._watch(node))

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, node: str, uid: str) -> None:
        pods = self._terminating.get(node, {})
        pods.pop(uid, None)
        if node in self._terminating and not pods:
            del self._terminating[node]
            self._tasks.pop(node).cancel()

    async def _watch(self, node: str) -> None:
        """Run until the node has no such pods; `_forget` cancels this task then."""
        backoff = Backoff(self._check_min_s, CHECK_MAX_S)
        while True:
            await asyncio.sleep(backoff.next_s())
            if not await self._nodes.is_gone(node):
                continue
            for uid, ((namespace, name), job) in list(self._terminating[node].items()):
                extra = {"job": job}
                log.info("%s: deleted by force, its Kubernetes node is gone", name, extra=extra)
                try:
                    await self._cluster.delete(PODS, namespace, name, grace_s=0, uid=uid)
                except ApiError as error:
                    log.warning("%s: not deleted yet: %s", name, error, extra=extra)
