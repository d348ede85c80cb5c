"""Removes pods that are being deleted and whose Kubernetes node will not come back.

Owns: that, for the pods of all jobs, also of those that are deleted. Must not: touch a pod that
nobody deleted, or one whose kubelet may still confirm its end.

Kubernetes removes such pods itself, but only 40 to 80 s after their node has gone (the orphan
quarantine and the period of its pod garbage collector), and never while the node is merely silent.
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
"""A request for each node that has pods of ours to give back, and none when there is no such."""

log = logging.getLogger("holdfast.kubernetes")


class LeavingPod(NamedTuple):
    """A pod that somebody has deleted."""

    pod: Key
    job: str


class OrphanPods:
    """`on_pod_change` is called for every change of a pod of ours."""

    def __init__(self, cluster: KubeClient, places: NodeInformer) -> None:
        self._cluster, self._places = cluster, places
        self._leaving: dict[str, dict[str, LeavingPod]] = {}
        """Place -> uid -> pod."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def on_pod_change(self, change: Change, pod: Document) -> None:
        place, uid = pod_conditions.place(pod), str(pod["metadata"]["uid"])
        if change == "DELETED":
            self._forget(place, uid)
        elif place and pod_conditions.is_leaving(pod):
            self._leaving.setdefault(place, {})[uid] = LeavingPod(
                key_of(pod), pod_conditions.job(pod)
            )
            if place not in self._tasks:
                self._tasks[place] = asyncio.get_running_loop().create_task(self._follow(place))

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, place: str, uid: str) -> None:
        pods = self._leaving.get(place, {})
        pods.pop(uid, None)
        if place in self._leaving and not pods:
            del self._leaving[place]
            self._tasks.pop(place).cancel()

    async def _follow(self, place: str) -> None:
        """Until none is left there, when `_forget` ends it."""
        pauses = Backoff(CHECK_MIN_S, CHECK_MAX_S)
        while True:
            await asyncio.sleep(pauses.next_s())
            if not await self._places.is_gone(place):
                continue
            for uid, ((namespace, name), job) in list(self._leaving[place].items()):
                extra = {"job": job}
                log.info("%s: removed by force, its Kubernetes node is gone", name, extra=extra)
                try:
                    await self._cluster.delete(PODS, namespace, name, grace_s=0, uid=uid)
                except ApiError as error:
                    log.warning("%s: not removed yet: %s", name, error, extra=extra)
