"""The reconciler of one TrainingJob object: validates it, runs its controller (a JobRuntime), and
deletes it when its time to live is over.

There is no finalizer. Pods, Secret and journal are owned by the object and are deleted with it;
checkpoints outside of the cluster must stay. A finalizer would block the deletion of objects and
namespaces whenever no operator runs. Deleting the object therefore takes no final checkpoint:
suspend or cancel first if you need one.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.orchestrator import tasks
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.backends import Kubernetes
from holdfast.orchestrator.api.v1alpha1.remarks import remarks
from holdfast.orchestrator.backends.kubernetes.backend import KubernetesBackend, OperatorContext
from holdfast.orchestrator.backends.kubernetes.job_secret import TlsKeyPair, ensure_keys
from holdfast.orchestrator.backends.kubernetes.pods import LOGS, checkpoint_path, pod_document
from holdfast.orchestrator.backends.kubernetes.queues.admission import Admission
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.events import FromNode
from holdfast.orchestrator.core.journal import Journal
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError, SpecError, UserError
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal
from holdfast.orchestrator.journal.configmap_store import COMPACT_AT_BYTES, ConfigMapStore
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import JOBS, PODS, ApiError, Invalid
from holdfast.orchestrator.kube.event_recorder import EventRecorder, Severity
from holdfast.orchestrator.kube.informer import Backoff
from holdfast.orchestrator.kube.names import new_node_name, tls_name
from holdfast.orchestrator.planner.gpus import is_auto, with_gpus
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.tls import server_context_from_pem
from holdfast.orchestrator.runtime.agent_server import AgentServer
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.job_runtime import JobRuntime
from holdfast.orchestrator.runtime.observe import incident_traces, notifications
from holdfast.orchestrator.runtime.observe.view import JobPhase, JobView

from . import storage_access, webhooks
from .code_store import ClusterCodeStore
from .gpus import GpuFinder
from .job_storage import JobStorage
from .prior import PriorStatus, began_as
from .spec import owner_of, read_job
from .spec_sync import SpecSync, suspended_before_start
from .status import (
    ACCEPTED,
    ConditionState,
    StatusContext,
    state_of,
    status_of,
    status_without_controller,
)
from .status_writer import StatusWriter, new_events
from .storage_access import with_secret

SECRET_RESTORED = (
    "SecretRestored",
    "the job's Secret was deleted and has been created again with the same keys",
)

log = logging.getLogger("holdfast.operator")


@dataclass(frozen=True)
class ReconcilerTiming:
    """Pauses and bounds of a reconciler."""

    retry_min_s: float = 1.0
    retry_max_s: float = 60.0
    status_interval_s: float = 5.0
    """Seconds between two writes of a status whose conditions have not changed."""
    storage_notice_s: float = 30.0
    """Seconds after which the status reports that the job waits for its storage. A takeover waits
    less long (job_runtime.py)."""
    storage_timeout_s: float = 600.0
    """Longer than storage drivers retry: their errors say best why there is no answer."""


@dataclass
class ReconcilerContext:
    """Objects that all reconcilers of an operator share."""

    shared: OperatorContext
    agent_server: AgentServer
    timing: ReconcilerTiming = field(default_factory=ReconcilerTiming)
    journal_compact_at_bytes: int = COMPACT_AT_BYTES
    starting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(32))
    """Bounds how many jobs are set up at once, so that the restart of an operator with a thousand
    jobs does not flood the API server."""
    gpus: GpuFinder = field(init=False)

    def __post_init__(self) -> None:
        self.gpus = GpuFinder(self.shared.cluster, self.shared.settings)

    @property
    def cluster(self) -> KubeClient:
        return self.shared.cluster


class JobReconciler:
    """`run()` until the job has ended; `update()` for every change of the object."""

    def __init__(self, document: Document, context: ReconcilerContext) -> None:
        self.owner = owner_of(document)
        self._document, self._context = document, context
        self._changed = asyncio.Event()
        self._clock = Clock()
        self._prior = PriorStatus(document)
        self._runtime: JobRuntime | None = None
        self._backend: KubernetesBackend | None = None
        self._spec_sync: SpecSync | None = None
        self._keys: TlsKeyPair | None = None
        self._storage = JobStorage(self.owner, context.shared.settings, self._report)
        self._code = ClusterCodeStore(context.cluster, self.owner)
        self._checked_kubernetes: Kubernetes | None = None
        """The part of the spec that the API server has accepted, or with which the job was
        started."""
        self._secret_checked = False
        self._num_gpus = 0
        """GPUs of a worker: what `auto` means for this job since it was submitted."""
        self._reported_view: JobView | None = None
        self._final_view: JobView | None = None
        self._labelled_generation = 0
        self._deleted = self._leaving = False
        self._last_progress: tuple[Any, ...] = ()
        self._condition = ACCEPTED
        self._secret_problem: tuple[str, str] | None = None
        self.events = EventRecorder(context.cluster, self.owner)
        self._status_writer = StatusWriter(
            context.cluster,
            self.owner,
            document.get("status") or {},
            self._status,
            lambda text: self.events.record("Warning", "StatusNotWritten", text),
            context.timing.status_interval_s,
        )

    @property
    def view(self) -> JobView | None:
        """None: no controller runs."""
        return self._located(self._runtime.view()) if self._runtime is not None else None

    def _located(self, view: JobView) -> JobView:
        """The view with the machines of the nodes that caused incidents."""
        machines = dict(self._prior.machines)
        if self._backend is not None:
            machines |= self._backend.machines
        for incident in view.incidents:
            incident.culprit_machine = machines.get(incident.culprit_node, "")
        return view

    @property
    def state(self) -> JobPhase:
        """The phase, also of a job without a controller."""
        view = self.view or self._final_view
        return view.state if view is not None else state_of(self._document, self._condition)

    def update(self, document: Document) -> None:
        old, self._document = self._document, document
        self._status_writer.observe(document)
        # Each status that we write comes back as a change, too.
        if _spec_version(old) != _spec_version(document):
            self._changed.set()

    def deleted(self) -> None:
        """The object is gone and its pods are being deleted, so agents shut down without handing
        anything over. `run` is cancelled next."""
        self._deleted = True

    async def leave(self) -> None:
        """This operator ends: without another one, nothing would ever correct the status."""
        self._leaving = True
        if self._runtime is not None:
            with contextlib.suppress(ApiError):
                await self._status_writer.write()

    # -- life cycle ----------------------------------------------------------------------------
    async def run(self) -> None:
        """Run until nothing is left to do for the job. Cancelling it leaves training alone."""
        if not is_finished(self._document):
            await self._run_until_finished()
        ended = ended_s(self._document, self._final_view, self._clock.now_ns())
        await self._delete_after_ttl(ended)

    async def _run_until_finished(self) -> None:
        """Run until the job has ended and its last status is written."""
        writing = asyncio.create_task(self._status_writer.run())
        pauses = self._retries()
        try:
            while not await self._attempt(pauses):
                await asyncio.sleep(pauses.next_s())
            await self._write_final_status()
        finally:
            await tasks.end([writing])

    def _retries(self) -> Backoff:
        return Backoff(self._context.timing.retry_min_s, self._context.timing.retry_max_s)

    async def _attempt(self, pauses: Backoff) -> bool:
        """Returns whether the job has ended. Errors become conditions."""
        try:
            return await self._host_controller(pauses)
        except SpecError as error:
            refused = ConditionState("pending", "InvalidSpec", _lines(error), accepted=False)
            await self._wait_for_change(refused)
            pauses.reset()
        except (Invalid, UserError) as error:
            # The user has to change something that may lie outside of this object.
            self._report(ConditionState("pending", "Refused", str(error), accepted=False))
        except HoldfastError as error:
            self._report(ConditionState("pending", "OperatorWaits", f"{error}; trying again"))
        except Exception as error:
            log.exception("job %s: internal error", self.owner.key, extra={"job": self.owner.key})
            text = f"{type(error).__name__}: {error}; training continues; trying again"
            self._report(ConditionState("pending", "OperatorError", text))
        return False

    def _report(self, condition: ConditionState) -> None:
        self._condition = condition
        self.events.record("Warning", condition.reason, condition.message)
        self._status_writer.mark_dirty(urgent=True)

    async def _wait_for_change(self, condition: ConditionState) -> None:
        """Wait until a user edits the object."""
        if condition != self._condition:
            self._condition = condition
            severity: Severity = "Normal" if condition.accepted else "Warning"
            self.events.record(severity, condition.reason, condition.message)
        self._status_writer.mark_dirty(urgent=True)
        await self._changed.wait()

    async def _host_controller(self, pauses: Backoff) -> bool:
        """Start or take over the job's controller and run it. Returns whether the job has ended."""
        self._changed.clear()  # before the object is read, so that a later edit is not missed
        job = await self._read_job()
        if job.spec.suspend and not await self._prior.look_up(self._context.cluster, self.owner):
            await self._wait_for_change(suspended_before_start(self._document))
            return False
        async with self._context.starting:
            new = not self._prior.started and self._keys is None
            job, fresh, journal, first_path = await self._open_journal(job, new)
            settings = self._context.shared.settings
            path = checkpoint_path(job, settings, first_path or self._prior.checkpoint_path)
            self._check_path(job, path)
            store_job = await with_secret(job, self.owner, self._context.cluster)
            self._check_path(store_job, path)  # the Secret may name an endpoint
            cluster, hosts = self._context.cluster, self._context.shared.settings.notify_hosts
            webhook_urls = await webhooks.addresses(job, self.owner, cluster, hosts, self._note)
            runtime = self._create_runtime(job, store_job, path, webhook_urls)
        try:
            # The backend needs the pods; waiting here keeps the storage from being blamed for it.
            await self._context.shared.pod_informer.synced()
            # Outside of `starting`: storage that does not answer must not hold up other jobs.
            if fresh and job.spec.code is not None:
                await self._code.uploaded(job.spec.code)
            timing = self._context.timing
            await self._storage.prepare(
                runtime, path, fresh=fresh,
                notice_s=timing.storage_notice_s, timeout_s=timing.storage_timeout_s,
            )  # fmt: skip
            await runtime.begin(journal)
        except BaseException:
            await runtime.close()
            raise
        self._prior.started, self._prior.checkpoint_path = True, path
        self._runtime = runtime
        pauses.reset()
        try:
            await self._run_controller(runtime)
        finally:
            self._runtime, self._spec_sync = None, None
            if self._deleted:
                for link in runtime.links.values():
                    link.send(wire.Shutdown(detail="the job was deleted"))
            await runtime.close()
        state = runtime.state
        self._final_view = self._located(runtime.view(live=False)) if state.terminal else None
        return state.terminal

    async def _read_job(self) -> TrainingJob:
        """The job of the object or, where the object has become invalid since the job started, the
        job of the journal: training continues with it and spec_sync.py reports the problem."""
        try:
            return self._valid_job()
        except SpecError:
            started = await self._prior.look_up(self._context.cluster, self.owner)
            store = ConfigMapStore(self._context.cluster, self.owner)
            if started and (job := began_as(await ChunkJournal.open(store))[0]) is not None:
                return job
            raise

    def _check_path(self, job: TrainingJob, path: str) -> None:
        """Check a path, also one that a journal names, which users may edit. Raises SpecError."""
        if problems := storage_access.problems(job, self._context.shared.settings, path):
            raise SpecError(problems)

    def _valid_job(self) -> TrainingJob:
        settings = self._context.shared.settings
        return read_job(self._document, settings, self._prior.checkpoint_path)

    async def _open_journal(
        self, job: TrainingJob, new: bool
    ) -> tuple[TrainingJob, bool, Journal, str]:
        """The Secret and the journal of the job, made where they are missing. Returns the job with
        its number of GPUs, whether it has never run, the journal, and where its checkpoints have
        been from the start. `new`: most likely there are none yet."""
        cluster = self._context.cluster
        keys, secret = await ensure_keys(cluster, self.owner, self._keys, fresh=new)
        self._secret_checked = True
        compact_at_bytes = self._context.journal_compact_at_bytes
        journal = await ChunkJournal.open(
            ConfigMapStore(cluster, self.owner, fresh=new, compact_at_bytes=compact_at_bytes)
        )
        fresh = not journal.records and journal.snapshot is None
        earlier, first_path = began_as(journal)
        if earlier is not None:
            job = with_gpus(job, earlier.spec.resources.num_gpus)
        elif is_auto(job):
            job, why = await self._context.gpus.resolve(job, self.owner)
            self.events.record("Normal", "GpusDecided", why)
        for text in remarks(job) if earlier is None else ():
            self.events.record("Warning", "Remark", text)
        self._num_gpus = job.spec.resources.num_gpus
        if fresh:
            await self._check_pod(job)
        elif secret == "restored":
            self.events.record("Warning", *SECRET_RESTORED)
        elif secret == "new":
            self._secret_problem = (
                "SecretReplaced",
                "the job's Secret was missing and a new one was created; agents that still run "
                "cannot connect with the old one and are replaced",
            )
            self.events.record("Warning", *self._secret_problem)
        self._keys = keys
        return job, fresh, journal, first_path

    async def _run_controller(self, runtime: JobRuntime) -> None:
        """Run until the controller ends; meanwhile edits of the object become requests to it."""
        self._spec_sync = SpecSync(
            self.owner, self._context.cluster, runtime, self.events, self._code
        )
        running = asyncio.create_task(runtime.run())
        syncing = asyncio.create_task(self._follow_spec(self._spec_sync))
        try:
            await asyncio.wait([running, syncing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await tasks.end([syncing, running])  # a cancelled reconciler must end without delay
        if not syncing.cancelled() and syncing.exception() is not None:
            raise syncing.exception() or AssertionError
        running.result()

    async def _follow_spec(self, sync: SpecSync) -> None:
        while True:
            self._changed.clear()
            try:
                job = with_gpus(self._valid_job(), self._num_gpus)
                if job.spec.kubernetes != self._checked_kubernetes:
                    await self._check_pod(job)
                    self._checked_kubernetes = job.spec.kubernetes
                if self._backend is not None:
                    await self._backend.follow(job)
                await sync.apply(self._document, job)
            except SpecError as error:
                sync.reject(self._document, _lines(error))
            except (Invalid, UserError) as error:
                sync.reject(self._document, str(error))
            except ApiError as error:
                log.warning("the spec is applied later: %s", error, extra={"job": self.owner.key})
                await asyncio.sleep(self._context.timing.retry_min_s)
                continue
            self._status_writer.mark_dirty(urgent=True)  # desired nodes, refusals
            await self._changed.wait()

    def _note(self, text: str) -> None:
        self.events.record("Warning", "Note", text)

    def _create_runtime(
        self, job: TrainingJob, store_job: TrainingJob, path: str, webhook_urls: Sequence[str]
    ) -> JobRuntime:
        """`store_job`: with the credentials of its store. `webhook_urls`: for spec.notify."""
        assert self._keys is not None
        self._checked_kubernetes = job.spec.kubernetes
        self._backend = KubernetesBackend(
            job, self.owner, self._context.shared,
            created=str(self._document["metadata"].get("creationTimestamp", "")),
            checkpoint_path=path, on_notice=self._on_preemption_notice,
            on_change=lambda: self._status_writer.mark_dirty(urgent=True),
            ensure_secret=self._ensure_secret,
        )  # fmt: skip
        return JobRuntime(
            job, key=self.owner.key, job_id=self.owner.uid, token=self._keys.token,
            spec_directory="", checkpoint_path=path, log_directory=LOGS,
            backend=self._backend, endpoint=self._context.agent_server,
            storage=self._storage.store(store_job, path),
            tls_name=tls_name(self.owner.uid),
            tls_context=server_context_from_pem(self._keys.certificate, self._keys.key),
            controller_absence_s=None,  # another operator takes over
            clock=self._clock, on_change=self._on_change,
            on_note=self._note, traces=incident_traces.of_environment(self.owner.key),
            notifications=notifications.for_job(
                job, self._note, f"--kubernetes -n {self.owner.namespace}", webhook_urls
            ),
            code=self._code,
        )  # fmt: skip

    async def _check_pod(self, job: TrainingJob) -> None:
        """Try a pod and its gang with the API server, to find mistakes in the pod template and
        gangs that the cluster does not support. Raises Invalid, UserError."""
        node = new_node_name(self.owner.name)
        queue = Admission(job, self.owner, self._context.cluster)
        pod = pod_document(job, self.owner, self._context.shared.settings, node)
        pod = queue.decorate(pod, {})
        try:
            await self._context.cluster.create(PODS, self.owner.namespace, pod, dry_run=True)
        except Invalid as error:
            raise Invalid(f"spec.kubernetes.podTemplate: {error}", status=error.status) from None
        except ApiError as error:
            # A quota may have room later; the backend reports it when it creates the pods.
            log.info("the dry run of a pod failed: %s", error, extra={"job": self.owner.key})
        await queue.ensure({})

    async def _ensure_secret(self) -> None:
        """Called before pods are created. The first call is skipped: the Secret was just read."""
        if self._secret_checked:
            self._secret_checked = False
            return
        _keys, secret = await ensure_keys(self._context.cluster, self.owner, self._keys)
        if secret != "found":
            self.events.record("Warning", *SECRET_RESTORED)

    def _on_preemption_notice(self, node: str, detail: str) -> None:
        if self._runtime is not None:
            self._runtime.submit(FromNode(node, wire.PreemptionNoticed(detail=detail)))

    # -- status and Events ---------------------------------------------------------------------
    def _on_change(self) -> None:
        """Called for every heartbeat. Only changes that users wait for are written at once."""
        if self._runtime is None:
            return
        state = self._runtime.state
        progress = (state.phase, state.generation, state.num_incidents, len(state.nodes))
        urgent = progress != self._last_progress
        self._last_progress = progress
        if urgent:
            self._publish(self._located(self._runtime.view()))
        self._status_writer.mark_dirty(urgent=urgent)

    def _publish(self, view: JobView) -> None:
        """Record Events, and label the pods of a new generation."""
        for event in new_events(self._reported_view, view):
            self.events.record(event.severity, event.reason, event.message, event.annotations)
        self._reported_view = view
        new_generation = view.generation != self._labelled_generation
        if new_generation and view.state == "running" and self._backend:
            self._labelled_generation = view.generation
            ranks = {
                node.name: min(worker.rank for worker in node.workers)
                for node in view.nodes
                if node.state == "member" and node.workers
            }
            self._backend.label(view.generation, ranks)

    def _status(self, before: Sequence[Document]) -> Document:
        view, context = self.view or self._final_view, self._status_context()
        if view is None:
            return status_without_controller(self._condition, context, before, self._prior.fields)
        self._publish(view)
        status = status_of(view, context, before)
        self._prior.remember(status)
        return status

    def _status_context(self) -> StatusContext:
        problems = [*(self._backend.problems() if self._backend is not None else ())]
        codes = [(problem.code, problem.text) for problem in problems]
        if self._spec_sync is not None and self._spec_sync.refusal:
            codes.append(("Refused", self._spec_sync.refusal))
        if self._secret_problem is not None:
            codes.append(self._secret_problem)
        spec = self._document.get("spec", {})
        return StatusContext(
            name=self.owner.name,
            generation=int(self._document["metadata"]["generation"]),
            desired=int(spec.get("nodes", {}).get("max", 1)),
            now_ns=self._clock.now_ns(),
            problems=tuple(codes),
            request=self._spec_sync.answer if self._spec_sync is not None else None,
            leaving=self._leaving,
        )

    async def _write_final_status(self) -> None:
        """Retries until the API server accepts it."""
        pauses = Backoff(0.5, 30.0)
        while True:
            try:
                await self._status_writer.write()
                await self.events.flush()
                return
            except ApiError as error:
                key = self.owner.key
                log.warning("the final status is not written: %s", error, extra={"job": key})
                await asyncio.sleep(pauses.next_s())

    # -- time to live --------------------------------------------------------------------------
    async def _delete_after_ttl(self, ended: float) -> None:
        """Delete the object, and with it everything that it owns, ttlSecondsAfterFinished after
        `ended` (Unix time). The field may be set, changed or removed until then."""
        pauses, problem = self._retries(), ""
        while True:
            self._changed.clear()
            ttl_s = self._document.get("spec", {}).get("ttlSecondsAfterFinished")
            now_s = self._clock.now_ns() / SECOND_NS
            wait_s = None if ttl_s is None else ended + float(ttl_s) - now_s
            if wait_s is None or wait_s > 0:
                await tasks.within(wait_s, self._changed.wait())
                continue
            owner = self.owner
            try:
                await self._context.cluster.delete(JOBS, owner.namespace, owner.name, uid=owner.uid)
                log.info("deleted %g s after the job ended", ttl_s, extra={"job": owner.key})
                return
            except ApiError as error:
                if str(error) != problem:
                    problem = str(error)
                    text = f"the job has expired and cannot be deleted: {error}; trying again"
                    self.events.record("Warning", "NotDeleted", text)
                await asyncio.sleep(pauses.next_s())


def _spec_version(document: Document) -> tuple[Any, Any]:
    """Changes with the spec and the annotations, but not with the status."""
    metadata = document["metadata"]
    return metadata["generation"], metadata.get("annotations")


def _lines(error: SpecError) -> str:
    return "; ".join(str(problem) for problem in error.problems)


def is_finished(document: Document) -> bool:
    """True by the object's status, which only an operator writes."""
    status = document.get("status") or {}
    return status.get("state") in TERMINAL and bool(status.get("completionTime"))


def ended_s(document: Document, final: JobView | None, now_ns: int) -> float:
    """Unix time of the job's end; now, where it is unknown."""
    if final is not None and final.finished_ns is not None:
        return final.finished_ns / SECOND_NS
    text = (document.get("status") or {}).get("completionTime")
    return datetime.datetime.fromisoformat(text).timestamp() if text else now_ns / SECOND_NS
