"""The controller of one job with everything that every host needs: loop, executor, gateway, control
API and storage, and the order in which they start and end.

A process may run a thousand of these in one event loop, so a JobRuntime opens no port, uses no
signal and no environment variable, and costs no thread and no timer while its job waits.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .. import limits
from ..api.v1alpha1 import TrainingJob, job_to_mapping
from ..backends.base import Backend, NodeGone
from ..core.context import recovery_of
from ..core.events import AnyEvent, JobSubmitted
from ..core.journal import Journal
from ..core.state import JobState
from ..errors import HoldfastError, Problem, UserError
from ..protocol import messages as wire
from ..protocol.facts import ShardFile, state_after
from ..protocol.manifest import Manifest
from .agent_gateway import AgentGateway
from .agent_server import AgentConnection, AgentServer
from .checkpoint_store.async_store import ThreadedCheckpointStore
from .checkpoint_store.options import CHECKPOINT_FIELD
from .checkpoint_store.store import CheckpointStore
from .clock import Clock
from .code_sender import CodeSender, CodeStore
from .control_api import ControlApi
from .driver import Driver
from .executor import Executor
from .inquiries import Inquiries
from .job_loop import JobLoop, Ready
from .notifier import ChangeNotifier
from .observe.incident_traces import IncidentTraces
from .observe.incidents import launch_incidents
from .observe.notifications import Notifications
from .observe.view import JobView


@dataclass(frozen=True)
class JobRuntimeTiming:
    """Bounds of a JobRuntime."""

    storage_listing_s: float = 15.0
    """Seconds that a takeover waits for storage to list its checkpoints. A driver may try for
    minutes, and meanwhile the nodes would have no controller."""
    storage_settle_s: float = 5.0
    """Seconds that the end of the job, or of its controller, waits for storage calls under way."""


class JobLogAdapter(logging.LoggerAdapter[logging.Logger]):
    """Adds the job to every record (`record.job`), for formatters that print it."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": {**(kwargs.get("extra") or {}), **(self.extra or {})}}


class JobRuntime:
    """The controller of one job. All methods are called from the event loop.

    Life cycle, with a journal that the caller opens and closes:

        runtime = JobRuntime(job, key=..., ...)
        try:
            await runtime.prepare(fresh=not journal.records and journal.snapshot is None)
            await runtime.begin(journal)
            await runtime.run()
        finally:
            await runtime.close()

    `prepare` raises user errors before anything is written. After `begin` agents may connect.
    `run` returns when the job has ended and FinishJob has been carried out. It raises JournalLost
    when another controller writes the journal, and JournalError when nothing can be written: in
    both cases training continues, and nothing was done that is not in the journal. `close` may be
    called at any time; training continues, and the next controller continues from the journal.

    `key` names the job at the agent server (Hello.job) and in manifests: its plain name on one
    machine, `namespace/name` in a cluster. Agents must present `token` and, with TLS, the key of
    `tls_name` and `tls_context` (protocol/tls.py). `on_change` is called after a change that a view
    may show is durable; it must not block. `on_note` gets one sentence for people.

    Read: `view()`, `state`, `links` (connected nodes). Request: `control.perform(verb, arguments)`,
    the verbs of the CLI. Report what a backend has seen: `submit(event)`.
    """

    driver: Driver
    """Set by `begin`, as the next two."""
    control: ControlApi
    _executor: Executor

    def __init__(
        self,
        job: TrainingJob,
        *,
        key: str,
        job_id: str,
        spec_directory: str,
        checkpoint_path: str,
        log_directory: str,
        token: str,
        backend: Backend,
        endpoint: AgentServer,
        storage: ThreadedCheckpointStore,
        tls_name: str = "",
        tls_context: ssl.SSLContext | None = None,
        clock: Clock | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_note: Callable[[str], None] = lambda text: None,
        timing: JobRuntimeTiming | None = None,
        controller_absence_s: float | None = limits.CONTROLLER_ABSENCE_S,
        measurements: Sequence[Any] = (),
        traces: IncidentTraces | None = None,
        notifications: Notifications | None = None,
        code: CodeStore | None = None,
    ) -> None:
        """`controller_absence_s`: what recovery.controllerAbsenceSeconds auto means here; None:
        never. `measurements`: of `spec plan --calibrate`, for the predicted step time. `code`:
        where uploaded code is, on a host that has any."""
        self.job, self.key, self.backend = job, key, backend
        self.links: dict[str, AgentConnection] = {}
        """Connected nodes."""
        self.changes, self.events = ChangeNotifier(), ChangeNotifier()
        """Changes of everything that a view shows, heartbeats included; and of the journal's
        events."""
        self.log = JobLogAdapter(logging.getLogger("holdfast"), {"job": key})
        self._token, self._tls_name, self._tls_context = token, tls_name, tls_context
        self._endpoint, self._storage = endpoint, storage
        self._clock, self._timing = clock or Clock(), timing or JobRuntimeTiming()
        self._on_change, self._on_note = on_change, on_note
        self._measurements, self._traces = measurements, traces
        self._notifications = notifications
        self._manifests: list[Manifest] | None = None
        """None: storage has not answered."""
        self._backend_open = False
        self._gateway: AgentGateway | None = None
        self._code_sender = CodeSender(code, self.links, self.log)
        document = job_to_mapping(job)
        self._submission = JobSubmitted(
            job_id=job_id,
            spec=document,
            spec_directory=spec_directory,
            checkpoint_path=checkpoint_path,
        )
        self._auto_absence_s = controller_absence_s
        self._first_welcome = wire.Welcome(
            spec=document,
            spec_directory=spec_directory,
            checkpoint_path=checkpoint_path,
            log_directory=log_directory,
            heartbeat_interval_s=job.spec.recovery.heartbeat_interval_s,
        )

    # -- life cycle ----------------------------------------------------------------------------
    async def prepare(self, *, fresh: bool) -> None:
        """Check the storage tier and, for a job that has never run (`fresh`), open the backend.

        Raises UserError for what the user has to change, HoldfastError for a fresh job whose
        storage does not answer.
        """
        if fresh:
            # First, because it may take the longest.
            await self._open_backend()
        try:
            async with asyncio.timeout(None if fresh else self._timing.storage_listing_s):
                await self._storage.call(CheckpointStore.prepare)
                self._manifests = await self._storage.call(CheckpointStore.manifests)
                if fresh and not self._manifests:
                    self._expect_readable(await self._storage.call(CheckpointStore.damaged))
        except (HoldfastError, TimeoutError) as problem:
            # A job that trains needs its controller more than its storage: until the next commit
            # the checkpoints that the journal knows have to do.
            if fresh:
                raise
            error = str(problem) or f"no answer within {self._timing.storage_listing_s:g} s"
            self.log.warning("taking over without the list of checkpoints in storage: %s", error)
            self._on_note(f"storage does not answer; taking over all the same ({error})")
        others = sorted({manifest.job for manifest in self._manifests or ()} - {self.key})
        if not others:
            return
        if fresh:
            raise UserError(str(self._foreign(others)))
        # Both jobs started before either had committed. Ending this one would make it worse.
        self.log.warning("taking over all the same: %s", self._foreign(others))
        self._on_note(f"taking over all the same: {self._foreign(others)}")

    async def begin(self, journal: Journal) -> None:
        """Continue where the journal ends, or submit the job; then let agents connect.

        Raises JournalError and JournalLost, as `run` does.
        """
        num_records = len(journal.records)
        loop = JobLoop.restore(self.job, journal.snapshot, journal.records)
        loop.projection.use_measurements(self._measurements)
        if self._traces is not None and loop.controller.submitted:
            incidents = loop.view(self._clock.now_ns(), live=False).incidents
            self._traces.begin(loop.state, incidents)
        if self._notifications is not None and loop.controller.submitted:
            self._notifications.begin(loop.state)
        journal.snapshot = None
        journal.records.clear()
        self.driver = Driver(loop, journal, self._clock, self._changed, self._journal_problem)
        submit = self.driver.submit
        self._executor = Executor(
            self.backend, self._storage, self.links, submit, self._timing.storage_settle_s,
            lambda generation: launch_incidents(loop.state, generation),
            lambda: tuple(loop.state.own.written.values()),
        )  # fmt: skip
        inquiries, send_code = Inquiries(self.links), self._code_sender.requested
        self._gateway = AgentGateway(
            self.backend, self._executor, loop, submit, self.log, inquiries.answered, send_code
        )
        self.control = ControlApi(
            self.driver, self.backend, self.links, self.view, self.changes, self._welcome,
            self._list_checkpoints, inquiries,
        )  # fmt: skip
        existing: tuple[str, ...] | None = None
        if not self._backend_open:
            await self._open_backend()
            existing = await self.backend.list_nodes()
        adopted: list[Manifest] = []
        if loop.controller.submitted and not loop.state.keeping.doubts(loop.state.generation):
            adopted = await self._adopt_written(loop.state.generation)
        files = _files([*(self._manifests or []), *adopted])
        listed, self._manifests = self._manifests is not None, None
        now_ns = self._clock.now_ns()
        incarnation = loop.start(now_ns, self._submission, files, existing, listed=listed)
        self.log.info("controller %d starts, %d events replayed", incarnation, num_records)
        # Agents may only connect to a core that knows its job.
        await self.driver.turn(self._executor.carry_out)
        self._endpoint.register(
            self.key,
            token=self._token,
            welcome=self._welcome,
            links=self.links,
            sink=self._gateway,
            handler=self.control.handle,
            tls_name=self._tls_name,
            context=self._tls_context,
        )

    async def run(self) -> None:
        """Run until the job has ended, or `stop`."""
        await self.driver.run(self._executor.carry_out)

    def stop(self) -> None:
        """Have `run` return soon; training continues."""
        self.driver.stop()

    async def close(self, *, release: bool = False) -> None:
        """Disconnect all agents and end what is under way. With `release`, end all nodes first."""
        self._endpoint.unregister(self.key)
        self._code_sender.close()
        if self._gateway is not None:
            await self._executor.close()
        await self.backend.close(release=release)
        if self._notifications is not None:
            await self._notifications.close(ended=self.begun and self.state.terminal)

    async def _open_backend(self) -> None:
        await self.backend.open(self._node_gone)
        self._backend_open = True

    async def _list_checkpoints(self) -> tuple[ShardFile, ...]:
        """The files of the job's committed checkpoints. Raises HoldfastError when the store does
        not answer."""
        try:
            async with asyncio.timeout(self._timing.storage_listing_s):
                listing = await self._storage.call(CheckpointStore.manifests)
        except TimeoutError:
            limit_s = self._timing.storage_listing_s
            raise HoldfastError(f"storage: no answer within {limit_s:g} s") from None
        return _files([manifest for manifest in listing if manifest.job == self.key])

    def _node_gone(self, gone: NodeGone) -> None:
        if self._gateway is not None:  # before `begin` the core knows no node
            self._gateway.node_gone(gone)

    def _expect_readable(self, damaged: list[str]) -> None:
        """Raises UserError for a path where there were checkpoints and none can be read: a job does
        not begin at step 0 because of damage."""
        if damaged:
            path = self._submission.checkpoint_path
            got = f"{path}, where the manifest of {', '.join(damaged[:3])} is damaged"
            fix = (
                f"holdfast checkpoint repair {path} --job {self.key}; to begin at step 0 choose "
                f"another path"
            )
            raise UserError.of(CHECKPOINT_FIELD, got, "checkpoints that can be read, or none", fix)

    def _foreign(self, others: list[str]) -> Problem:
        """Two jobs with the same checkpoint path would write into each other's directories."""
        path = self._submission.checkpoint_path
        return Problem(
            CHECKPOINT_FIELD,
            f"{path}, which holds checkpoints of job {', '.join(others)}",
            "a path of its own",
            "choose another directory or URL; if that job has ended and this one is to continue "
            f"from there: holdfast checkpoint adopt {path} --job {self.key}",
        )

    def _welcome(self) -> wire.Welcome:
        recovery = recovery_of(self.state.job)  # it may have been adjusted
        return msgspec.structs.replace(
            self._first_welcome,
            heartbeat_interval_s=recovery.heartbeat_interval_s,
            controller_absence_s=self._absence_s(recovery.controller_absence_s),
            submitted_ns=self.state.submitted_ns,
            job_id=self.state.job_id,
            imports=self._gateway.imports if self._gateway is not None else (),
        )

    def _absence_s(self, chosen: float | str) -> float | None:
        if isinstance(chosen, str):
            return self._auto_absence_s if chosen == "auto" else None
        return chosen

    async def _adopt_written(self, generation: int) -> list[Manifest]:
        """Checkpoints that agents wrote while there was no controller. One of an older generation
        may be from processes that were fenced."""
        try:
            async with asyncio.timeout(self._timing.storage_listing_s):
                retention = self.state.job.spec.checkpoint.retention
                adopted = await self._storage.call(
                    CheckpointStore.adopt_written, generation, retention
                )
        except (HoldfastError, TimeoutError) as error:
            self.log.warning("what agents wrote without a controller is not read: %s", error)
            return []
        for manifest in adopted:
            text = (
                f"{state_after(manifest.step)}, written without a controller, is a checkpoint now"
            )
            self.log.info("%s", text)
            self._on_note(text)
        return adopted

    # -- reading and reporting -----------------------------------------------------------------
    @property
    def begun(self) -> bool:
        """The core knows its job."""
        return self._gateway is not None and self.driver.loop.controller.submitted

    @property
    def state(self) -> JobState:
        """Read-only. Only after `begin`."""
        return self.driver.state

    def view(self, *, live: bool = True, metrics_port: int = 0) -> JobView:
        """Everything that can be shown. `live`: with the heartbeats since the last event."""
        now_ns = self._clock.now_ns()
        if self._gateway is None:
            view = JobView(name=self.job.name, now_ns=now_ns)
        else:
            view = self.driver.loop.view(now_ns, live=live)
            view.journal_problem = self.driver.journal_problem
        view.checkpoint_path = self._submission.checkpoint_path
        view.metrics_port = metrics_port
        return view

    def submit(self, event: AnyEvent) -> None:
        """Report a fact that was seen outside of the runtime."""
        self.driver.submit(event)

    def _journal_problem(self, problem: str) -> None:
        text = problem or "the journal is written again; nothing is in memory only"
        self.log.warning("%s", text)
        self._on_note(text)

    def _changed(self, ready: Ready) -> None:
        self.changes.notify()
        if ready.records:
            self.events.notify()
            if self._traces is not None:
                self._traces.observe(self.state, lambda: self.view(live=False).incidents)
            if self._notifications is not None:
                self._notifications.observe(self.state, lambda: self.view(live=False))
        self._on_change()


def _files(manifests: list[Manifest]) -> tuple[ShardFile, ...]:
    return tuple(file for manifest in manifests for file in manifest.files)
