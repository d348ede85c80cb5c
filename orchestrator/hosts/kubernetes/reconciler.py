"""One TrainingJob object, as long as this operator looks after it.

Owns: the order of its life: valid? held? then Secret, journal, controller (an Assembly) and pods;
its wishes (wishes.py) and what is written into it (reporting.py); its end. Must not: decide
anything about the training; the core does.

There is no finalizer: pods, Secret and journal are owned by the object and go with it, and what
lies outside the cluster, its checkpoints, must stay. A finalizer would keep objects and namespaces
from going away whenever no operator runs. Who wants a last checkpoint suspends or cancels first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.backends.kubernetes.backend import KubernetesBackend, OperatorContext
from holdfast.orchestrator.backends.kubernetes.job_secret import TlsKeyPair, ensure_keys
from holdfast.orchestrator.backends.kubernetes.pods import LOGS, pod_document
from holdfast.orchestrator.backends.kubernetes.queues.admission import Admission
from holdfast.orchestrator.core.events import PreemptionNoticed
from holdfast.orchestrator.errors import HoldfastError, SpecError, UserError
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import PODS, ApiError, Invalid
from holdfast.orchestrator.kube.event_recorder import EventRecorder
from holdfast.orchestrator.kube.informer import Backoff
from holdfast.orchestrator.kube.names import new_node_name, tls_name
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.tls import server_context_from_pem
from holdfast.orchestrator.runtime.agent_server import AgentServer
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.job_runtime import JobRuntime
from holdfast.orchestrator.runtime.observe.view import JobPhase, JobView

from .configmap_journal import open_journal
from .event_diff import new_events
from .prior_status import PriorStatus, job_in, place_in
from .spec import checkpoint_path, owner_of, read_job
from .spec_sync import SpecSync, held
from .status import TAKING_UP, About, ConditionState, state_of, status_of, status_without_controller
from .status_writer import StatusWriter
from .storage_access import JobStorage
from .ttl import ended_s, expire, is_finished

Document = dict[str, Any]
RETRY_MIN_S = 1.0
RETRY_MAX_S = 60.0

log = logging.getLogger("holdfast.operator")


@dataclass
class ReconcilerContext:
    """What all jobs of an operator share."""

    shared: OperatorContext
    endpoint: AgentServer
    starting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(32))
    """So many jobs are taken up at once: a restart with a thousand of them is no storm."""

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
        self._past = PriorStatus(document)
        self._assembly: JobRuntime | None = None
        self._backend: KubernetesBackend | None = None
        self._wishes: SpecSync | None = None
        self._keys: TlsKeyPair | None = None
        self._store = JobStorage(self.owner, self._say)
        self._secret_seen = False
        self._told: JobView | None = None
        self._final: JobView | None = None
        self._labelled = 0
        self._deleted = False
        self._seen: tuple[Any, ...] = ()
        self._verdict = TAKING_UP
        self._remark: tuple[str, str] | None = None
        self.events = EventRecorder(context.cluster, self.owner)
        before = document.get("status") or {}
        self.reporter = StatusWriter(
            context.cluster,
            self.owner,
            before,
            self._status,
            lambda text: self.events.record("Warning", "StatusNotWritten", text),
        )

    @property
    def view(self) -> JobView | None:
        """None: no controller runs."""
        return self._assembly.view() if self._assembly is not None else None

    @property
    def state(self) -> JobPhase:
        """Also where no controller runs."""
        view = self.view or self._final
        return view.state if view is not None else state_of(self._document, self._verdict)

    def update(self, document: Document) -> None:
        old, self._document = self._document, document
        self.reporter.seen(document)
        # Each status that we write comes back as a change, too.
        if _wishes_of(old) != _wishes_of(document):
            self._changed.set()

    def deleted(self) -> None:
        """Its object is gone, and its pods are going: agents need not hand anything over. `run` is
        cancelled next."""
        self._deleted = True

    # -- its life ------------------------------------------------------------------------------
    async def run(self) -> None:
        """Until nothing is left to do for it. Being cancelled, it lets go: training goes on."""
        if not is_finished(self._document):
            await self._train()
        over_s = ended_s(self._document, self._final, self._clock.now_ns())
        await expire(
            self._context.cluster, self.owner, lambda: self._document, self._changed, over_s,
            self._clock, lambda text: self.events.record("Warning", "NotDeleted", text),
        )  # fmt: skip

    async def _train(self) -> None:
        """Until it has ended, and its last status is written."""
        reporting = asyncio.create_task(self.reporter.run())
        pauses = Backoff(RETRY_MIN_S, RETRY_MAX_S)
        try:
            while not await self._attempt(pauses):
                await asyncio.sleep(pauses.next_s())
            await self._last_words()
        finally:
            reporting.cancel()
            await asyncio.wait([reporting])

    async def _attempt(self, pauses: Backoff) -> bool:
        """Whether the job has ended. What went wrong is said in its conditions."""
        try:
            return await self._live(pauses)
        except SpecError as error:
            lines = "; ".join(str(problem) for problem in error.problems)
            await self._wait_for_change(ConditionState("failed", "InvalidSpec", lines))
            pauses.reset()
        except (Invalid, UserError) as error:
            # What the user has to change, and cannot without a new object or another place.
            self._say(ConditionState("failed", "Refused", str(error)))
        except HoldfastError as error:
            self._say(ConditionState("pending", "OperatorWaits", f"{error}; trying again"))
        except Exception as error:
            log.exception("job %s: an error of ours", self.owner.key, extra={"job": self.owner.key})
            text = f"{type(error).__name__}: {error}; training goes on; trying again"
            self._say(ConditionState("pending", "OperatorError", text))
        return False

    def _say(self, verdict: ConditionState) -> None:
        self._verdict = verdict
        self.events.record("Warning", verdict.reason, verdict.message)
        self.reporter.dirty(urgent=True)

    async def _wait_for_change(self, verdict: ConditionState) -> None:
        """Nothing can be done until somebody edits the object."""
        if verdict != self._verdict:
            self._verdict = verdict
            bad = verdict.state == "failed"
            self.events.record("Warning" if bad else "Normal", verdict.reason, verdict.message)
        self.reporter.dirty(urgent=True)
        await self._changed.wait()

    async def _live(self, pauses: Backoff) -> bool:
        """Take the job up, wherever it is; True when it has ended."""
        cluster, past, pods = self._context.cluster, self._past, self._context.shared.settings
        self._changed.clear()  # before the object is read: what is edited from here on is another
        try:
            job = read_job(self._document, pods, past.place)
        except SpecError:
            # One that trains goes on as it was; wishes.py says what is wrong now.
            begun = await past.look(cluster, self.owner)
            old = await open_journal(cluster, self.owner) if begun else None
            was = job_in(old) if old is not None else None
            if was is None:
                raise
            job = was
        if job.spec.suspend and not await past.look(cluster, self.owner):
            await self._wait_for_change(held(self._document))
            return False
        async with self._context.starting:
            new = not past.begun and self._keys is None
            keys, made = await ensure_keys(cluster, self.owner, self._keys, fresh=new)
            self._secret_seen = True
            journal = await open_journal(cluster, self.owner, fresh=new)
            fresh = not journal.records and journal.snapshot is None
            if fresh:
                await self._check_pod(job)
            elif made and self._keys is None:
                self._remark = (
                    "SecretReplaced",
                    "its Secret was gone and a new one was made: agents that still run cannot be "
                    "spoken to any more and are replaced",
                )
                self.events.record("Warning", *self._remark)
            self._keys = keys
            path = checkpoint_path(job, pods, place_in(journal) or past.place)
            assembly = self._assemble(job, keys, path)
        try:
            await (
                self._context.shared.pod_informer.synced()
            )  # the backend needs it, and no store is to blame
            # Not among those that are starting: one store that does not answer is nobody else's.
            await self._store.prepare(assembly, path, fresh=fresh)
            await assembly.begin(journal)
        except BaseException:
            await assembly.close()
            raise
        past.begun, past.place = True, path
        self._assembly = assembly
        pauses.reset()
        try:
            await self._attend(assembly)
        finally:
            self._assembly, self._wishes = None, None
            if self._deleted:
                for link in assembly.links.values():
                    link.send(wire.Shutdown(detail="the job was deleted"))
            await assembly.close()
        state = assembly.driver.controller.state
        self._final = assembly.view(live=False) if state.terminal else None
        return state.terminal

    async def _attend(self, assembly: JobRuntime) -> None:
        """While it runs: carry wishes to it."""
        self._wishes = SpecSync(self.owner, self._context.cluster, assembly, self.events)
        running = asyncio.create_task(assembly.run())
        wishing = asyncio.create_task(self._follow(self._wishes))
        try:
            await asyncio.wait([running, wishing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()  # when we are told to let go, nothing may hold us up
            wishing.cancel()
            await asyncio.wait([wishing, running])
        if not wishing.cancelled() and wishing.exception() is not None:
            raise wishing.exception() or AssertionError
        running.result()

    async def _follow(self, wishes: SpecSync) -> None:
        while True:
            self._changed.clear()
            try:
                job = read_job(self._document, self._context.shared.settings, self._past.place)
                if self._backend is not None:
                    await self._backend.follow(job)
                await wishes.follow(self._document, job)
            except SpecError as error:
                # It was valid when it started; the job goes on as it was.
                lines = "; ".join(str(problem) for problem in error.problems)
                wishes.refuse(self._document, lines)
            except ApiError as error:
                log.warning("a wish has to wait: %s", error, extra={"job": self.owner.key})
                await asyncio.sleep(RETRY_MIN_S)
                continue
            self.reporter.dirty(urgent=True)  # of what is wanted, and of what was refused
            await self._changed.wait()

    def _assemble(self, job: TrainingJob, keys: TlsKeyPair, path: str) -> JobRuntime:
        self._backend = KubernetesBackend(
            job,
            self.owner,
            self._context.shared,
            created=str(self._document["metadata"].get("creationTimestamp", "")),
            on_notice=self._noticed,
            on_change=lambda: self.reporter.dirty(urgent=True),
            ensure_secret=self._ensure_secret,
        )
        return JobRuntime(
            job,
            key=self.owner.key,
            job_id=self.owner.uid,
            spec_directory="",
            checkpoint_path=path,
            log_directory=LOGS,
            token=keys.token,
            backend=self._backend,
            endpoint=self._context.endpoint,
            storage=self._store.tier(job, path),
            tls_name=tls_name(self.owner.uid),
            tls_context=server_context_from_pem(keys.certificate, keys.key),
            clock=self._clock,
            on_change=self._on_change,
            on_note=lambda text: self.events.record("Warning", "Note", text),
        )

    async def _check_pod(self, job: TrainingJob) -> None:
        """A pod that the API server would refuse is a mistake in the template, and a gang that the
        cluster knows nothing of one in the spec. Raises Invalid, UserError."""
        node = new_node_name(self.owner.name)
        queue = Admission(job, self.owner, self._context.cluster)
        pod = pod_document(job, self.owner, self._context.shared.settings, node)
        pod = queue.decorate(pod, {})
        try:
            await self._context.cluster.create(PODS, self.owner.namespace, pod, dry_run=True)
        except Invalid as error:
            raise Invalid(f"spec.kubernetes.podTemplate: {error}", status=error.status) from None
        except ApiError as error:
            # A quota may have room later; the backend says so when it asks in earnest.
            log.info("a pod could not be tried: %s", error, extra={"job": self.owner.key})
        await queue.ensure(pod, {})

    async def _ensure_secret(self) -> None:
        """Before pods are made; for the first ones it was just seen."""
        if self._secret_seen:
            self._secret_seen = False
            return
        _keys, made = await ensure_keys(self._context.cluster, self.owner, self._keys)
        if made:
            self.events.record("Warning", "SecretRestored", "its Secret was deleted; made again")

    def _noticed(self, node: str, detail: str) -> None:
        if self._assembly is not None:
            self._assembly.submit(PreemptionNoticed(node=node, detail=detail))

    # -- what is to be seen --------------------------------------------------------------------
    def _on_change(self) -> None:
        """Called for every heartbeat: only what people wait for is worth a look at once."""
        if self._assembly is None:
            return
        state = self._assembly.driver.controller.state
        seen = (state.phase, state.generation, state.num_incidents, len(state.nodes))
        urgent = seen != self._seen
        self._seen = seen
        if urgent:
            self._tell(self._assembly.view())
        self.reporter.dirty(urgent=urgent)

    def _tell(self, view: JobView) -> None:
        for one in new_events(self._told, view):
            self.events.record(*one)
        self._told = view
        if view.generation != self._labelled and view.state == "running" and self._backend:
            self._labelled = view.generation
            ranks = {
                node.name: min(worker.rank for worker in node.workers)
                for node in view.nodes
                if node.state == "member" and node.workers
            }
            self._backend.label(view.generation, ranks)

    def _status(self, before: Sequence[Document]) -> Document:
        view = self.view or self._final
        if view is None:
            return status_without_controller(self._verdict, self._about(), before, self._past.told)
        self._tell(view)
        status = status_of(view, self._about(), before)
        self._past.tell(status)
        return status

    def _about(self) -> About:
        troubles = [*(self._backend.problems() if self._backend is not None else ())]
        found = [(one.code, one.text) for one in troubles]
        if self._wishes is not None and self._wishes.refusal:
            found.append(("Refused", self._wishes.refusal))
        if self._remark is not None:
            found.append(self._remark)
        spec = self._document.get("spec", {})
        return About(
            name=self.owner.name,
            generation=int(self._document["metadata"]["generation"]),
            desired=int(spec.get("nodes", {}).get("max", 1)),
            now_ns=self._clock.now_ns(),
            troubles=tuple(found),
        )

    # -- its end -------------------------------------------------------------------------------
    async def _last_words(self) -> None:
        """The final status is written, however long the API server takes."""
        pauses = Backoff(0.5, 30.0)
        while True:
            try:
                await self.reporter.write()
                await self.events.flush()
                return
            except ApiError as error:
                log.warning("the final status: %s", error, extra={"job": self.owner.key})
                await asyncio.sleep(pauses.next_s())


def _wishes_of(document: Document) -> tuple[Any, Any]:
    metadata = document["metadata"]
    return metadata["generation"], metadata.get("annotations")
