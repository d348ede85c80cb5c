"""One job's controller, wherever the job lives: the parts that every job needs, put together.

Owns: driver, executor, relay, control, the way to storage and the job's place at the endpoint; the
order in which they begin and end; the events that every incarnation starts with. Must not: touch
files of its own, signals or this process' environment, or open ports: a process may host a thousand
of these in one event loop, and one that has nothing to do costs no thread and no timer but its
core's next deadline.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec

from ..api.v1alpha1 import TrainingJob, job_to_mapping
from ..backends.base import Backend
from ..core.actions import AnyAction
from ..core.events import ActionUnknown, AnyEvent, ControllerStarted, JobSubmitted
from ..core.journal import Journal
from ..errors import HoldfastError, Problem, UserError
from ..protocol import messages as wire
from ..protocol.facts import ShardFile
from ..protocol.manifest import Manifest
from .agent_gateway import AgentGateway
from .agent_server import AgentConnection, AgentServer
from .checkpoint_store.async_store import AsyncCheckpointStore
from .checkpoint_store.job_environment import CHECKPOINT_FIELD
from .clock import Clock
from .control_api import ControlApi
from .driver import Driver
from .evidence_budget import EvidenceBudget
from .executor import Executor
from .notifier import ChangeNotifier
from .observe.view import JobView

LOOK_S = 15.0
"""How long a controller that takes over waits for storage to say what it holds: a driver may try
for minutes, and meanwhile nobody would look after the nodes."""


class JobLog(logging.LoggerAdapter[logging.Logger]):
    """Says of every line which job it is about: `record.job`, for formatters that print it."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": {**(kwargs.get("extra") or {}), **(self.extra or {})}}


class JobRuntime:
    """The controller of one job. All methods are called from the event loop.

    Its life, with a journal that the caller has opened and closes in the end:

        assembly = Assembly(job, key=..., ...)
        try:
            await assembly.prepare(fresh=not journal.records and journal.snapshot is None)
            await assembly.begin(journal)
            await assembly.run()
        finally:
            await assembly.close()

    `prepare` raises whatever a user can have got wrong, before anything is written. After `begin`
    agents are let in and the job is on its way. `run` returns when the job has ended and its last
    action, FinishJob, has been carried out; it raises JournalLost when another controller writes
    the journal and JournalError when nothing can be written: in both cases training goes on and
    nothing was done that is not written down. `close` can be called at any moment, also without
    `run` having ended: training goes on, and the next controller goes on from the journal.

    `key` names the job at the endpoint (Hello.job) and in manifests: its plain name on one machine,
    `namespace/name` in a cluster. `token`, and with TLS `tls_name` and `tls_context` (see
    protocol.tls), are what its agents must show. `storage` is its storage tier, `backend` its
    nodes. `on_change` is called whenever something may have changed that a view shows, after the
    change is durable; it must not block. `on_note` gets one sentence for a person.

    To look: `view()`, `driver.controller.state`, `links` (nodes that are connected). To ask:
    `control.perform(verb, arguments)`, the verbs of the command line. To tell a fact that a backend
    saw: `submit(event)`, for example PreemptionNoticed.
    """

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
        storage: AsyncCheckpointStore,
        tls_name: str = "",
        tls_context: ssl.SSLContext | None = None,
        clock: Clock | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.job, self.key, self.backend = job, key, backend
        self.links: dict[str, AgentConnection] = {}
        """Nodes that are connected."""
        self.changes, self.events = ChangeNotifier(), ChangeNotifier()
        """Of all that a view shows, heartbeats included; and of what is in the journal."""
        self._num_events = 0
        self._job_id, self._spec_directory = job_id, spec_directory
        self._checkpoint_path = checkpoint_path
        self._token, self._tls_name, self._tls_context = token, tls_name, tls_context
        self._endpoint, self._storage = endpoint, storage
        self._clock = clock or Clock()
        self._told, self._on_note = on_change, on_note
        self._manifests: list[Manifest] = []
        self._backend_open = False
        self.log = JobLog(logging.getLogger("holdfast"), {"job": key})
        self.driver = Driver(job, self._clock, self._carry_out, self._on_change)
        evidence = EvidenceBudget()
        self._executor = Executor(backend, storage, self.links, self.driver.submit, evidence)
        self._relay = AgentGateway(
            backend,
            self._executor,
            lambda: self.driver.controller.state,
            self.driver.submit,
            evidence,
            self.log,
        )
        first = wire.Welcome(
            spec=job_to_mapping(job),
            spec_directory=spec_directory,
            checkpoint_path=checkpoint_path,
            log_directory=log_directory,
            heartbeat_interval_s=job.spec.recovery.heartbeat_interval_s,
        )

        def welcome() -> wire.Welcome:
            recovery = self.driver.controller.state.job.spec.recovery  # it may be adjusted
            return msgspec.structs.replace(
                first, heartbeat_interval_s=recovery.heartbeat_interval_s
            )

        self._welcome = welcome
        self.control = ControlApi(
            self.driver, backend, self.links, self.view, self.changes, welcome
        )

    # -- its life ------------------------------------------------------------------------------
    async def prepare(self, *, fresh: bool) -> None:
        """Look at storage and, for a job that has never run (`fresh`), have the backend make ready.

        Raises UserError for what the user has to change, HoldfastError for a fresh job whose
        storage does not answer.
        """
        if fresh:
            # First, because it may take the longest.
            await self._open_backend()
        try:
            async with asyncio.timeout(None if fresh else LOOK_S):
                await self._storage.prepare()
                self._manifests = await self._storage.manifests()
        except (HoldfastError, TimeoutError) as problem:
            # A job that trains needs its controller more than its storage: what the journal knows
            # of checkpoints has to do until the next commit.
            if fresh:
                raise
            error = str(problem) or f"no answer within {LOOK_S:g} s"
            self.log.warning("taking over without looking into storage: %s", error)
            self._on_note(f"storage does not answer; taking over all the same ({error})")
        others = sorted({one.job for one in self._manifests} - {self.key})
        if not others:
            return
        if fresh:
            raise UserError(str(self._foreign(others)))
        # Both have begun before either had committed. Without a controller it would be worse.
        self.log.warning("taking over all the same: %s", self._foreign(others))
        self._on_note(f"taking over all the same: {self._foreign(others)}")

    async def begin(self, journal: Journal) -> None:
        """Go on where the journal ends, or submit the job; then let agents in.

        Raises JournalError and JournalLost, as `run` does.
        """
        replayed = self.driver.open(journal)
        existing: tuple[str, ...] | None = None
        if not self._backend_open:
            await self._open_backend()
            existing = await self.backend.list_nodes()
        files = tuple(file for one in self._manifests for file in one.files)
        self._submit_first(replayed, files, existing)
        self._manifests = []
        # Agents may only speak to a core that knows its job.
        await self.driver.turn()
        self._endpoint.register(
            self.key,
            token=self._token,
            welcome=self._welcome,
            links=self.links,
            sink=self._relay,
            handler=self.control.handle,
            tls_name=self._tls_name,
            context=self._tls_context,
        )

    async def run(self) -> None:
        """Until the job has ended, or `stop`."""
        await self.driver.run()

    def stop(self) -> None:
        """Have `run` return soon, whatever the job does; training goes on."""
        self.driver.stop()

    async def close(self, *, release: bool = False) -> None:
        """Let go: no more agents, nothing under way. With `release`, end all nodes first."""
        self._endpoint.unregister(self.key)
        await self._executor.close()
        await self.backend.close(release=release)

    async def _open_backend(self) -> None:
        await self.backend.open(self._relay.node_gone)
        self._backend_open = True

    def _foreign(self, others: list[str]) -> Problem:
        """Two jobs that share a place would write into each other's directories."""
        return Problem(
            CHECKPOINT_FIELD,
            f"{self._checkpoint_path}, which holds checkpoints of job {', '.join(others)}",
            "a place of its own",
            "choose another directory or URL; if that job has ended and this one is to go on from "
            f"there: holdfast checkpoint adopt {self._checkpoint_path} --job {self.key}",
        )

    def _submit_first(
        self, replayed: int, committed: tuple[ShardFile, ...], nodes: tuple[str, ...] | None
    ) -> None:
        """The events that every incarnation starts with, and the results that it will not get."""
        inflight: dict[int, AnyAction] = {}
        incarnation = 1
        if self.driver.controller.submitted:
            state = self.driver.controller.state
            inflight = dict(state.inflight)
            incarnation = state.incarnation + 1
        else:
            self.driver.submit(
                JobSubmitted(
                    job_id=self._job_id,
                    spec=job_to_mapping(self.job),
                    spec_directory=self._spec_directory,
                    checkpoint_path=self._checkpoint_path,
                )
            )
        self.log.info("controller %d starts, %d events replayed", incarnation, replayed)
        self.driver.submit(
            ControllerStarted(incarnation=incarnation, committed=committed, nodes=nodes)
        )
        for action_id, action in inflight.items():
            lost = ActionUnknown(
                action_id=action_id,
                generation=action.generation,
                detail="the controller ended before the result came",
            )
            self.driver.submit(lost)

    # -- looking and telling -------------------------------------------------------------------
    def view(self, *, live: bool = True, metrics_port: int = 0) -> JobView:
        """Everything there is to see. `live`: with what heartbeats said since the last event."""
        return self.driver.story.view(
            self._clock.now_ns(),
            live=live,
            checkpoint_path=self._checkpoint_path,
            metrics_port=metrics_port,
        )

    def submit(self, event: AnyEvent) -> None:
        """A fact that somebody outside has seen."""
        self.driver.submit(event)

    def _carry_out(self, action: AnyAction) -> None:
        self._executor.carry_out(action)

    def _on_change(self) -> None:
        self.changes.tell()
        if self.driver.num_events > self._num_events:
            self._num_events = self.driver.num_events
            self.events.tell()
        self._told()
