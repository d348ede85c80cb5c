"""Runs one reconciler per TrainingJob while this replica leads, and what all of them share: the
informers of TrainingJobs, pods and nodes, and the server that agents connect to."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from holdfast.orchestrator.backends.kubernetes.backend import OperatorContext
from holdfast.orchestrator.backends.kubernetes.gang_arbiter import GangArbiter
from holdfast.orchestrator.backends.kubernetes.node_informer import NodeInformer
from holdfast.orchestrator.backends.kubernetes.orphan_pods import OrphanPods
from holdfast.orchestrator.backends.kubernetes.pod_informer import PodInformer
from holdfast.orchestrator.backends.kubernetes.pod_lifecycle import PodTiming
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings
from holdfast.orchestrator.backends.kubernetes.queues import selection
from holdfast.orchestrator.backends.kubernetes.queues.finalizers import Finalizers
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import JOBS
from holdfast.orchestrator.kube.informer import Change, Informer, Key, key_of
from holdfast.orchestrator.runtime.agent_server import AgentServer

from .reconciler import JobReconciler, ReconcilerContext, ReconcilerTiming

CANCEL_AGAIN_S = 30.0
"""A replica that stands down cannot lead again before all its reconcilers have ended. A task whose
cancellation was swallowed by a library is cancelled again."""

LEAVE_S = 3.0
"""Seconds for the last statuses of an operator that ends: the next one waits for its lease."""

log = logging.getLogger("holdfast.operator")


@dataclass(frozen=True)
class Options:
    """Command-line options of the operator."""

    pods: PodSettings
    namespaces: tuple[str, ...] = ()
    """Empty: all."""
    listen_address: str = ""
    """Empty: all addresses of this pod, IPv4 and IPv6."""
    listen_port: int = 7077
    timing: ReconcilerTiming = field(default_factory=ReconcilerTiming)
    pod_timing: PodTiming = field(default_factory=PodTiming)


class Manager:
    """Manages jobs during one term as leader. `run()` until cancelled; training then goes on
    without controllers."""

    def __init__(self, cluster: KubeClient, options: Options) -> None:
        self._options = options
        namespaces = options.namespaces or ("",)
        self._agent_server = AgentServer()
        self._pod_informer = PodInformer(cluster, namespaces)
        nodes = self._node_informer = NodeInformer(cluster)
        self._finalizers = Finalizers(cluster)
        self._orphan_pods = OrphanPods(cluster, nodes)
        self._pod_informer.handlers += [
            self._finalizers.on_pod_change,
            self._orphan_pods.on_pod_change,
        ]
        self._context = ReconcilerContext(
            OperatorContext(
                cluster, self._pod_informer, nodes, GangArbiter(), options.pods, options.pod_timing
            ),
            self._agent_server,
            options.timing,
        )
        self._informers = [
            Informer(cluster, JOBS, self._changed, namespace=namespace, trim=_trim)
            for namespace in namespaces
        ]
        self.jobs: dict[Key, JobReconciler] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._ending: dict[Key, asyncio.Task[None]] = {}
        """Reconcilers of deleted jobs that have not ended yet."""

    @property
    def not_ready(self) -> str:
        """Reason why the operator is not ready; empty: it is."""
        for informer in (*self._informers, *self._pod_informer.informers):
            if informer.problem:
                return informer.problem
            if not informer.synced.is_set():
                return "the informers have not synced yet"
        return ""

    async def run(self) -> None:
        """Raises UserError when the port for agents cannot be opened."""
        await self._agent_server.open(
            self._options.listen_address, self._options.listen_port, tls=True
        )
        log.info("listening for agents at port %d", self._agent_server.port)
        try:
            async with asyncio.TaskGroup() as group:
                pods = self._pod_informer
                group.create_task(pods.run())
                group.create_task(self._node_informer.watch_notices(pods.machines, pods.look_again))
                for informer in self._informers:
                    group.create_task(informer.run())
        finally:
            await self._close()

    async def leave(self) -> None:
        """This operator ends on a signal while it leads."""
        if jobs := [asyncio.create_task(job.leave()) for job in self.jobs.values()]:
            _done, late = await asyncio.wait(jobs, timeout=LEAVE_S)
            for task in late:
                task.cancel()

    async def _close(self) -> None:
        self._finalizers.close()
        self._orphan_pods.close()
        tasks = {*self._tasks.values(), *self._ending.values()}
        while tasks:
            for task in tasks:
                task.cancel()
            _done, tasks = await asyncio.wait(tasks, timeout=CANCEL_AGAIN_S)
            if tasks:
                log.error("%d reconcilers have not ended; cancelling them again", len(tasks))
        await self._agent_server.close()

    # -- jobs ----------------------------------------------------------------------------------
    def _changed(self, change: Change, document: Document) -> None:
        key = key_of(document)
        if change == "DELETED":
            self._end(key)
        elif document["metadata"].get("deletionTimestamp"):
            # Another controller's finalizer delays the deletion; for us the job is gone.
            self._end(key)
        elif selection.has_other_manager(document):
            return
        elif key in self.jobs:
            self.jobs[key].update(document)
        else:
            job = self.jobs[key] = JobReconciler(document, self._context)
            running = self._reconcile(key, job, self._ending.get(key))
            self._tasks[key] = asyncio.get_running_loop().create_task(running)

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

    async def _reconcile(
        self, key: Key, job: JobReconciler, predecessor: asyncio.Task[None] | None
    ) -> None:
        """`predecessor`: the reconciler of a deleted job of the same name; it has to end first."""
        if predecessor is not None:
            await asyncio.wait([predecessor])
        try:
            await job.run()
        except Exception:
            log.exception("job %s/%s: internal error", *key, extra={"job": "/".join(key)})


def _trim(document: Document) -> Document:
    metadata = {k: v for k, v in document["metadata"].items() if k != "managedFields"}
    return {**document, "metadata": metadata}
