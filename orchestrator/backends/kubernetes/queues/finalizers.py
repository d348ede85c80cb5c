"""Removes Kueue's finalizer from deleted pods of gangs, for the pods of all jobs.

Kueue keeps a deleted member of a pod group until the group is over or has a replacement for it. A
job that is deleted or suspended while it is queued gets no replacement: its pods would never go.
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
    """`on_pod_change` is called for every change of a pod of any job."""

    def __init__(self, cluster: KubeClient) -> None:
        self._cluster = cluster
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def on_pod_change(self, change: Change, pod: Document) -> None:
        uid = str(pod["metadata"]["uid"])
        patch = None if change == "DELETED" else kueue.finalizer_patch(pod)
        if patch is None or uid in self._tasks:
            return
        task = asyncio.get_running_loop().create_task(self._remove(pod, patch))
        self._tasks[uid] = task
        task.add_done_callback(lambda _task: self._tasks.pop(uid, None))

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _remove(self, pod: Document, patch: Document) -> None:
        """Retry without limit: no other component removes it."""
        metadata, backoff = pod["metadata"], Backoff()
        while True:
            try:
                await self._cluster.patch(PODS, metadata["namespace"], metadata["name"], patch)
                return
            except NotFound:
                return
            except ApiError as error:
                log.warning(
                    "%s: Kueue's finalizer is not removed yet: %s",
                    metadata["name"],
                    error,
                    extra={"job": pod_conditions.job(pod)},
                )
                await asyncio.sleep(backoff.next_s())
