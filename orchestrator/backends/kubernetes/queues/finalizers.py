"""Takes Kueue's finalizer off pods of a gang that are over and deleted, whoever deleted them.

Owns: that, for the pods of all jobs, also of those that are gone. Must not: touch any other pod.

Kueue keeps a deleted member of a pod group until the group is over or a replacement is there. A job
that is deleted or held while it waits in the queue gets none, and its pods would stay for ever.
"""

from __future__ import annotations

import asyncio
import logging

from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import PODS, ApiError, NotFound
from holdfast.orchestrator.kube.informer import Backoff, Change

from .. import pod_conditions
from . import kueue

log = logging.getLogger("holdfast.kubernetes")


class Finalizers:
    """`on_pod_change` is called for every change of a pod of ours."""

    def __init__(self, cluster: KubeClient) -> None:
        self._cluster = cluster
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def on_pod_change(self, change: Change, pod: Document) -> None:
        uid = str(pod["metadata"]["uid"])
        patch = None if change == "DELETED" else kueue.given_back(pod)
        if patch is None or uid in self._under_way:
            return
        task = asyncio.get_running_loop().create_task(self._take_off(pod, patch))
        self._under_way[uid] = task
        task.add_done_callback(lambda _task: self._under_way.pop(uid, None))

    def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()

    async def _take_off(self, pod: Document, patch: Document) -> None:
        """Until it is done: nobody else will do it."""
        metadata, pauses = pod["metadata"], Backoff()
        while True:
            try:
                await self._cluster.patch(PODS, metadata["namespace"], metadata["name"], patch)
                return
            except NotFound:
                return
            except ApiError as error:
                log.warning(
                    "%s keeps Kueue's finalizer for now: %s",
                    metadata["name"],
                    error,
                    extra={"job": pod_conditions.job(pod)},
                )
                await asyncio.sleep(pauses.next_s())
