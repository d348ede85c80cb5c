"""Which TrainingJobs there are, and that each is looked after while we lead.

Owns: the watch on TrainingJobs, one task per job, and what all jobs share: the watch on pods, the
agents' endpoint. Must not: know what happens within a job.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from holdfast.orchestrator.backends.kubernetes.backend import OperatorContext
from holdfast.orchestrator.backends.kubernetes.gang_arbiter import GangArbiter
from holdfast.orchestrator.backends.kubernetes.node_informer import NodeInformer
from holdfast.orchestrator.backends.kubernetes.orphan_pods import OrphanPods
from holdfast.orchestrator.backends.kubernetes.pod_informer import PodInformer
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings
from holdfast.orchestrator.backends.kubernetes.queues import selection
from holdfast.orchestrator.backends.kubernetes.queues.finalizers import Finalizers
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS
from holdfast.orchestrator.kube.informer import Change, Informer, Key, key_of
from holdfast.orchestrator.runtime.agent_server import AgentServer

from .reconciler import JobReconciler, ReconcilerContext

LET_GO_S = 30.0
"""A replica that stands down has to be rid of its jobs, or it never leads again: where a library
has swallowed the cancellation, it is said again."""

Document = dict[str, Any]
log = logging.getLogger("holdfast.operator")


@dataclass(frozen=True)
class Options:
    """What a person tells the operator."""

    pods: PodSettings
    namespaces: tuple[str, ...] = ()
    """Whose jobs; empty: all."""
    listen_address: str = ""
    """Empty: all addresses of this pod, IPv4 and IPv6."""
    listen_port: int = 7077


class Manager:
    """While we lead. `run()` until cancelled; then every job is let go, and trains on."""

    def __init__(self, cluster: KubeClient, options: Options) -> None:
        self._options = options
        namespaces = options.namespaces or ("",)
        self.endpoint = AgentServer()
        self.pod_informer = PodInformer(cluster, namespaces)
        places = NodeInformer(cluster)
        self._finalizers = Finalizers(cluster)
        self._abandoned = OrphanPods(cluster, places)
        self.pod_informer.handlers += [
            self._finalizers.on_pod_change,
            self._abandoned.on_pod_change,
        ]
        self.context = ReconcilerContext(
            OperatorContext(cluster, self.pod_informer, places, GangArbiter(), options.pods),
            self.endpoint,
        )
        self.mirrors = [
            Informer(cluster, JOBS, self._changed, namespace=namespace, trim=_trim)
            for namespace in namespaces
        ]
        self.jobs: dict[Key, JobReconciler] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._ending: dict[Key, asyncio.Task[None]] = {}
        """Jobs that were deleted and still let go of things."""

    @property
    def ready(self) -> str:
        """Why not; empty: it is."""
        for mirror in (*self.mirrors, *self.pod_informer.informers):
            if mirror.problem:
                return mirror.problem
            if not mirror.synced.is_set():
                return "the first lists are not there yet"
        return ""

    async def run(self) -> None:
        """Raises UserError when the agents' port cannot be had."""
        await self.endpoint.open(self._options.listen_address, self._options.listen_port, tls=True)
        log.info("agents dial in at port %d", self.endpoint.port)
        work = [self.pod_informer.run(), *(mirror.run() for mirror in self.mirrors)]
        try:
            async with asyncio.TaskGroup() as group:
                for one in work:
                    group.create_task(one)
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        self._finalizers.close()
        self._abandoned.close()
        tasks = {*self._tasks.values(), *self._ending.values()}
        while tasks:
            for task in tasks:
                task.cancel()
            _done, tasks = await asyncio.wait(tasks, timeout=LET_GO_S)
            if tasks:
                log.error("%d jobs have not been let go; telling them again", len(tasks))
        await self.endpoint.close()

    # -- the jobs ------------------------------------------------------------------------------
    def _changed(self, change: Change, document: Document) -> None:
        key = key_of(document)
        if change == "DELETED":
            self._end(key)
        elif document["metadata"].get("deletionTimestamp"):
            # A finalizer of somebody else holds it: for us it is over.
            self._end(key)
        elif selection.has_other_manager(document):
            return
        elif key in self.jobs:
            self.jobs[key].update(document)
        else:
            job = self.jobs[key] = JobReconciler(document, self.context)
            attending = self._attend(key, job, self._ending.get(key))
            self._tasks[key] = asyncio.get_running_loop().create_task(attending)

    def _end(self, key: Key) -> None:
        job = self.jobs.pop(key, None)
        if job is not None:
            job.deleted()
        task = self._tasks.pop(key, None)
        if task is None:
            return
        log.info("job %s/%s was deleted", *key, extra={"job": "/".join(key)})
        task.cancel()
        self._ending[key] = task
        task.add_done_callback(lambda ended: self._ended(key, ended))

    def _ended(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._ending.get(key) is task:
            del self._ending[key]

    async def _attend(
        self, key: Key, job: JobReconciler, before: asyncio.Task[None] | None
    ) -> None:
        """`before`: one of the same name that was deleted; it goes first."""
        if before is not None:
            await asyncio.wait([before])
        try:
            await job.run()
        except Exception:
            log.exception("job %s/%s", *key, extra={"job": "/".join(key)})


def _trim(document: Document) -> Document:
    metadata = {k: v for k, v in document["metadata"].items() if k != "managedFields"}
    return {**document, "metadata": metadata}
