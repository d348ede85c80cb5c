"""One job on a Ray cluster, inside its controller actor: what is Ray's around its Assembly.

Owns: the port that its agents dial, its journal and record in the cluster's store, its logs. Must
not: decide anything about the job. service.py is the same for a job of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.ray import cluster, names
from holdfast.orchestrator.backends.ray.backend import RayBackend
from holdfast.orchestrator.backends.ray.kv import ENDED, JobKeyValueStore
from holdfast.orchestrator.core.events import PreemptionNoticed
from holdfast.orchestrator.core.journal import JournalError
from holdfast.orchestrator.core.nodes import num_missing
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol import tls
from holdfast.orchestrator.protocol.certificate import TlsKeyPair as Secrets
from holdfast.orchestrator.runtime.agent_server import AgentServer
from holdfast.orchestrator.runtime.checkpoint_store.async_store import ThreadedCheckpointStore
from holdfast.orchestrator.runtime.checkpoint_store.job_environment import (
    job_environment,
    storage_place,
)
from holdfast.orchestrator.runtime.checkpoint_store.serial_executor import SerialExecutor
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from holdfast.orchestrator.runtime.control_api import WATCH_INTERVAL_S, view_body
from holdfast.orchestrator.runtime.job_runtime import JobRuntime
from holdfast.orchestrator.runtime.observe.prometheus import METRICS
from holdfast.orchestrator.runtime.observe.view import JobView

from .actor import ControllerOrder
from .gcs_journal import open_journal
from .metrics import RayMetrics

METRICS_INTERVAL_S = 5.0
"""Ray itself exports every 10 s unless told otherwise."""
TRIM_INTERVAL_S = 1.0
"""Events come in bursts, and hardly any of them changes what is wanted."""
TRIM_PAUSE_S = 2.0
"""Until a head that did not answer is asked again."""
PROGRESS_INTERVAL_S = 2.0
"""Between two answers to a watcher while nothing happens but steps. A call and its answer wake many
threads of Ray's in two processes; locally it is one message, and the interval is shorter."""
WATCH_S = 30.0
"""Nothing may change for days, and whoever watches may have gone without a word: Ray would keep the
call, and answers no more than so many at once. Shorter than calls.ANSWER_S."""

log = logging.getLogger("holdfast")


class RayHost:
    """Implements backends.ray.controller.Host."""

    def __init__(self, order: ControllerOrder) -> None:
        self._order = order
        self._keys = JobKeyValueStore(order.job)
        self.job = job = job_from_mapping(order.document, f"job {order.job}")
        secrets = Secrets(order.token, order.certificate, order.key)
        self._backend = RayBackend(job, order.job_id, self._keys, secrets, on_notice=self._noticed)
        self._endpoint = AgentServer()
        self._logs = cluster.log_directory(job.name, order.job_id)
        path = checkpoint_path(order, job.spec.checkpoint.path)
        storage = CheckpointStore(path, job.name)
        self.assembly = JobRuntime(
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
        )
        self._life = os.urandom(8).hex()
        """Whoever has watched an earlier controller of the job counts from 0 again."""
        self._serving = asyncio.Event()
        self._refusal = ""
        self._fresh = False
        """Nothing of the job has ever been started: what is wrong now ends it."""

    async def run(self) -> None:
        self._log_to_file()
        if await asyncio.to_thread(self._keys.exists, ENDED):
            return  # cancelled before this controller was there
        with job_environment(self.job):
            try:
                await self._run()
            except HoldfastError as error:
                # A journal that cannot be written is tried again, by another process.
                if not self._fresh or isinstance(error, JournalError):
                    raise
                log.error("%s", error)
                self._refusal = str(error)
                self._serving.set()
                await self._finish(refused(self.assembly.view(live=False), str(error)), error)

    async def _run(self) -> None:
        journal = await open_journal(self._keys, self.job.name)
        self._fresh = not journal.records and journal.snapshot is None
        try:
            await self.assembly.prepare(fresh=self._fresh)
            await self._endpoint.open("0.0.0.0", tls=True)
            address = cluster.here()["address"]
            self._backend.set_endpoint(address, self._endpoint.port)
            await self.assembly.begin(journal)
            self._fresh = False
            log.info("agents dial %s:%d", address, self._endpoint.port)
            self._serving.set()
            loop = asyncio.get_running_loop()
            beside = [loop.create_task(self._tell_metrics()), loop.create_task(self._trim())]
            try:
                await self.assembly.run()
            finally:
                for task in beside:
                    task.cancel()
        finally:
            await self.assembly.close()
            await self._endpoint.close()
        await self._finish(self.assembly.view(live=False))

    async def _finish(self, view: JobView, refusal: HoldfastError | None = None) -> None:
        """What is known of the job from now on, and that there is no controller any more."""
        record = {
            "view": view_body(view),
            "refusal": "" if refusal is None else str(refusal),
            "exit_code": 0 if refusal is None else refusal.exit_code,
        }
        await asyncio.to_thread(self._keys.put, ENDED, json.dumps(record).encode())

    async def perform(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        await self._serving.wait()
        if self._refusal:
            return {"ok": False, "detail": self._refusal, "body": {}}
        try:
            reply = await self.assembly.control.perform(verb, arguments)
        except HoldfastError as error:
            return {"ok": False, "detail": str(error), "body": {}}
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # it is this call that is given up
            detail = "this controller ended before it was written down; ask the next one"
            return {"ok": False, "detail": detail, "body": {}}
        return {"ok": reply.ok, "detail": reply.detail, "body": reply.body}

    def _noticed(self, node: str, detail: str, grace_s: float) -> None:
        if self._serving.is_set():  # it is told again when the node joins
            event = PreemptionNoticed(node=node, detail=detail, grace_s=grace_s)
            self.assembly.submit(event)

    async def watch(self, seen: Any) -> dict[str, Any]:
        await self._serving.wait()
        changes, events = self.assembly.changes, self.assembly.events
        known = isinstance(seen, tuple) and seen[0] == self._life
        changes_seen, events_seen = seen[1:] if known else (-1, -1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                await changes.after(changes_seen)
        await asyncio.sleep(WATCH_INTERVAL_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROGRESS_INTERVAL_S - WATCH_INTERVAL_S):
                await events.after(events_seen)
        seen = self._life, changes.count, events.count
        return {"seen": seen, "view": view_body(self.assembly.view())}

    async def _trim(self) -> None:
        """A suspended or smaller job demands nothing of the cluster that it would not use."""
        seen = -1
        while True:
            await self.assembly.events.after(seen)
            seen = self.assembly.events.count
            try:
                await self._backend.trim(lambda: num_missing(self.assembly.driver.controller.state))
            except Exception as error:  # Ray's own RpcError or a plain RuntimeError
                log.warning("what is not wanted any more stays demanded for now: %s", error)
                await asyncio.sleep(TRIM_PAUSE_S)
                seen = -1
            await asyncio.sleep(TRIM_INTERVAL_S)

    async def _tell_metrics(self) -> None:
        """What /metrics of a job of one machine says, to Ray's exporter."""
        metrics, seen = RayMetrics(), -1
        while True:
            await self.assembly.changes.after(seen)
            seen = self.assembly.changes.count
            export(metrics, self.job.name, self.assembly.view())
            await asyncio.sleep(METRICS_INTERVAL_S)

    def _log_to_file(self) -> None:
        """Beside the workers' logs, where the dashboard shows it; the actor's own output too."""
        self._logs.mkdir(parents=True, exist_ok=True)
        form = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        log.setLevel(logging.INFO)
        log.propagate = False
        for handler in (
            logging.FileHandler(self._logs / "controller.log"),
            logging.StreamHandler(),
        ):
            handler.setFormatter(form)
            log.addHandler(handler)


def refused(view: JobView, why: str) -> JobView:
    """Of a job that never began, for whoever did not see that."""
    view.state, view.reason = "failed", why
    view.submitted_ns, view.finished_ns = view.submitted_ns or view.now_ns, view.now_ns
    return view


def export(metrics: RayMetrics, job: str, view: JobView) -> None:
    """Every metric that is not per rank. A summary becomes two gauges: Ray would add _total to the
    name of a counter, and they are called _sum and _count everywhere else."""
    for spec in METRICS:
        if spec.per_rank:
            continue
        for labels, value in spec.samples(view):
            given = {"job": job, **{name: labels[name] for name in spec.labels}}
            if spec.kind == "counter":
                metrics.counter(spec.name, spec.help, given, value)
            else:
                name = f"{spec.name}_{labels['']}" if spec.kind == "summary" else spec.name
                metrics.gauge(name, spec.help, given, value)


def checkpoint_path(order: ControllerOrder, path: str | None) -> str:
    """Where checkpoints are. Without a path of its own: in the home of whoever runs Ray, which is
    shared by all nodes of the cluster or holds them for one machine only."""
    if path is None:
        home = Path.home() / ".holdfast" / "ray"
        return str(home / f"{order.job}-{order.job_id}" / "checkpoints")
    return storage_place(path, order.spec_directory)
