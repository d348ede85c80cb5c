"""Runs one job on a Ray cluster, inside its controller actor: the port that its agents connect to,
its journal and end record in the cluster's store, and its logs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from holdfast.orchestrator import limits, tasks
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.ray import drains, names, ray_nodes
from holdfast.orchestrator.backends.ray.backend import RayBackend
from holdfast.orchestrator.backends.ray.kv import ENDED, JobKeyValueStore
from holdfast.orchestrator.backends.ray.placement import GroupApi
from holdfast.orchestrator.core.events import FromNode
from holdfast.orchestrator.core.journal import JournalError
from holdfast.orchestrator.core.provisioning import num_missing
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal
from holdfast.orchestrator.journal.gcs_store import GcsStore
from holdfast.orchestrator.protocol import tls
from holdfast.orchestrator.protocol.certificate import TlsKeyPair
from holdfast.orchestrator.protocol.messages import PreemptionNoticed
from holdfast.orchestrator.runtime.agent_server import AgentServer
from holdfast.orchestrator.runtime.checkpoint_store.async_store import (
    SerialExecutor,
    ThreadedCheckpointStore,
)
from holdfast.orchestrator.runtime.checkpoint_store.options import (
    job_environment,
    storage_place,
)
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from holdfast.orchestrator.runtime.control_api import WATCH_INTERVAL_S, view_body
from holdfast.orchestrator.runtime.job_runtime import JobRuntime
from holdfast.orchestrator.runtime.observe import incident_traces, notifications
from holdfast.orchestrator.runtime.observe.view import JobView

from .actor import ControllerOrder
from .code_store import KeyValueCodeStore
from .metrics import RayMetrics
from .view_file import ViewFile

log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class RayHostTiming:
    metrics_s: float = 5.0
    """Seconds between two exports; Ray itself exports every 10 s by default."""
    trim_s: float = 1.0
    """Events come in bursts, and hardly any of them changes how many nodes are wanted."""
    trim_retry_s: float = 2.0
    """Seconds until another try after the head did not answer."""
    progress_s: float = 2.0
    """Seconds between two answers to a watcher while only steps happen. A call and its answer wake
    many of Ray's threads in two processes; the local backend sends one message, and more often."""
    view_file_s: float = 2.0
    """Seconds between two writes of the view for commands over http://."""
    view_refresh_s: float = 20.0
    """The view is written although nothing has changed: an old one is not shown."""
    watch_s: float = 30.0
    """Longest wait of a watch call. The view may not change for days, and the watcher may have
    disconnected: Ray would keep the call, and runs a limited number. Below actors.ANSWER_S."""


class RayHost:
    """Runs one job, from the actor's start to the job's end."""

    def __init__(
        self,
        order: ControllerOrder,
        *,
        store: JobKeyValueStore | None = None,
        logs: Path | None = None,
        groups: GroupApi | None = None,
        drain_source: Callable[[], dict[str, int]] = drains.draining,
        timing: RayHostTiming | None = None,
    ) -> None:
        """`store`, `logs`, `groups` and `drain_source` are the cluster's own by default."""
        self._order, self._timing = order, timing or RayHostTiming()
        self._store = store or JobKeyValueStore(order.job)
        self.job = job = job_from_mapping(order.document, f"job {order.job}")
        keys = TlsKeyPair(order.token, order.certificate, order.key)
        self._backend = RayBackend(
            job, order.job_id, self._store, keys, on_notice=self._on_preemption, groups=groups,
            drain_source=drain_source,
        )  # fmt: skip
        self._endpoint = AgentServer()
        self._logs = logs or ray_nodes.log_directory(job.name, order.job_id)
        path = checkpoint_path(order, job.spec.checkpoint.path)
        storage = CheckpointStore(path, job.name)
        self.runtime = JobRuntime(
            job,
            key=job.name,
            job_id=order.job_id,
            spec_directory=order.spec_directory,
            checkpoint_path=path,
            log_directory=str(self._logs),
            token=order.token,
            backend=self._backend,
            endpoint=self._endpoint,
            storage=ThreadedCheckpointStore(lambda: storage, SerialExecutor()),
            tls_name=names.tls(order.job_id),
            tls_context=tls.server_context_from_pem(order.certificate, order.key),
            on_note=log.warning,
            traces=incident_traces.of_environment(job.name),
            notifications=notifications.for_job(job, log.warning, "--ray"),
            code=KeyValueCodeStore(self._store),
        )
        self._view_file = ViewFile(self._logs.parent, job.name, self._timing.view_file_s)
        self._id = os.urandom(8).hex()
        """A watcher of an earlier controller of the job must count from 0 again."""
        self._serving = asyncio.Event()
        self._refusal = ""
        self._fresh = False
        """Nothing of the job has ever been started: an error now ends it."""

    async def run(self) -> None:
        self._log_to_file()
        if await asyncio.to_thread(self._store.exists, ENDED):
            return  # cancelled before this controller started
        with job_environment(self.job):
            try:
                await self._run()
            except HoldfastError as error:
                # A journal that cannot be written is retried by another process.
                if not self._fresh or isinstance(error, JournalError):
                    raise
                log.error("%s", error)
                self._refusal = str(error)
                self._serving.set()
                await self._finish(refused(self.runtime.view(live=False), str(error)), error)

    async def _run(self) -> None:
        journal = await ChunkJournal.open(GcsStore(self._store, self.job.name))
        self._fresh = not journal.records and journal.snapshot is None
        try:
            await self.runtime.prepare(fresh=self._fresh)
            address = ray_nodes.own_node()["address"]
            await self._endpoint.open(address, tls=True)
            self._backend.set_endpoint(address, self._endpoint.port)
            await self.runtime.begin(journal)
            self._fresh = False
            log.info("agents connect to %s:%d", address, self._endpoint.port)
            self._serving.set()
            loop = asyncio.get_running_loop()
            work = (self._export(), self._trim(), self._publish())
            background = [loop.create_task(coroutine) for coroutine in work]
            try:
                await self.runtime.run()
            finally:
                for task in background:
                    task.cancel()
        finally:
            await self.runtime.close()
            await self._endpoint.close()
        await self._finish(self.runtime.view(live=False))

    async def _finish(self, view: JobView, refusal: HoldfastError | None = None) -> None:
        """Write the end record, which replaces the controller for commands."""
        record = {
            "view": view_body(view),
            "refusal": "" if refusal is None else str(refusal),
            "exit_code": 0 if refusal is None else refusal.exit_code,
        }
        await asyncio.to_thread(self._store.put, ENDED, json.dumps(record).encode())
        self._view_file.remove()

    async def perform(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        await self._serving.wait()
        if self._refusal:
            return {"ok": False, "detail": self._refusal, "body": {}}
        try:
            reply = await self.runtime.control.perform(verb, arguments)
        except HoldfastError as error:
            return {"ok": False, "detail": str(error), "body": {}}
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # this call itself is cancelled
            detail = "this controller ended before it recorded the request; send it again"
            return {"ok": False, "detail": detail, "body": {}}
        return {"ok": reply.ok, "detail": reply.detail, "body": reply.body}

    def _on_preemption(self, node: str, detail: str, grace_s: float) -> None:
        if self._serving.is_set():  # the backend reports it again when the node joins
            self.runtime.submit(FromNode(node, PreemptionNoticed(detail=detail, grace_s=grace_s)))

    async def watch(self, seen: Any) -> dict[str, Any]:
        await self._serving.wait()
        changes, events = self.runtime.changes, self.runtime.events
        is_current = isinstance(seen, tuple) and seen[0] == self._id
        changes_seen, events_seen = seen[1:] if is_current else (-1, -1)
        await tasks.within(self._timing.watch_s, changes.after(changes_seen))
        await asyncio.sleep(WATCH_INTERVAL_S)
        await tasks.within(self._timing.progress_s - WATCH_INTERVAL_S, events.after(events_seen))
        seen = self._id, changes.count, events.count
        return {"seen": seen, "view": view_body(self.runtime.view())}

    async def _trim(self) -> None:
        """Keep a suspended or smaller job from requesting nodes that it would not use."""
        seen = -1
        while True:
            await self.runtime.events.after(seen)
            seen = self.runtime.events.count
            try:
                await self._backend.trim(lambda: num_missing(self.runtime.state))
            except Exception as error:  # Ray's own RpcError or a plain RuntimeError
                log.warning("unwanted nodes stay requested for now: %s", error)
                await asyncio.sleep(self._timing.trim_retry_s)
                seen = -1
            await asyncio.sleep(self._timing.trim_s)

    async def _publish(self) -> None:
        """Publish the view for commands over http://, which read files of this machine's logs."""
        seen = -1
        while True:
            await tasks.within(self._timing.view_refresh_s, self.runtime.changes.after(seen))
            seen, view = self.runtime.changes.count, self.runtime.view()
            await asyncio.sleep(await asyncio.to_thread(self._view_file.write, view))

    async def _export(self) -> None:
        """The metrics that a local job serves at /metrics, to Ray's exporter. Also while nothing
        changes: ages grow, and a Ray node that restarts its exporter knows none."""
        metrics = RayMetrics()
        while True:
            metrics.export(self.job.name, self.runtime.view())
            await asyncio.sleep(self._timing.metrics_s)

    def _log_to_file(self) -> None:
        """Log to a file beside the workers' logs, which the dashboard shows, and to the actor's
        output."""
        self._logs.mkdir(parents=True, exist_ok=True)
        form = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        log.setLevel(logging.INFO)
        log.propagate = False
        for handler in (
            RotatingFileHandler(
                self._logs / "controller.log", maxBytes=limits.LOG_BYTES, backupCount=1
            ),
            logging.StreamHandler(),
        ):
            handler.setFormatter(form)
            log.addHandler(handler)


def refused(view: JobView, why: str) -> JobView:
    """The last view of a job that never began."""
    view.state, view.reason = "failed", why
    view.submitted_ns, view.finished_ns = view.submitted_ns or view.now_ns, view.now_ns
    return view


def checkpoint_path(order: ControllerOrder, path: str | None) -> str:
    """Place of checkpoints. Without a path in the spec: in the home directory of the user that
    runs Ray, which either all nodes share, or holds checkpoints of one machine only."""
    if path is None:
        home = Path.home() / ".holdfast" / "ray"
        return str(home / f"{order.job}-{order.job_id}" / "checkpoints")
    return storage_place(path, order.spec_directory)
