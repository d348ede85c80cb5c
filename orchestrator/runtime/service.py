"""One job from its directory to its end: what `holdfast run` and `holdfast run --attach` do.

Owns: putting the parts together, in order, and taking them apart; the signals of the terminal.
Must not: decide anything about the job.

When this process is killed, the job goes on without it: machine host and agents are sessions of
their own, agents look for the next controller, and everything that was decided is in the journal.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ..backends.base import Backend
from ..backends.local import LocalBackend, LocalPaths
from ..core.actions import AnyAction
from ..core.events import ActionUnknown, CancelRequested, ControllerStarted, JobSubmitted
from ..protocol import messages as wire
from ..protocol.errors import HoldfastError, Problem, UserError
from ..protocol.facts import ShardFile
from ..protocol.manifest import Manifest
from ..protocol.spec import TrainingJob, job_to_mapping
from .changes import Changes
from .clock import Clock
from .control import Control
from .driver import Driver
from .endpoint import AgentLink, Endpoint
from .executor import Executor
from .home import Home, JobDirectory
from .journal import Journal
from .metrics import MetricsServer
from .record import create_job
from .relay import Relay
from .storage import Storage
from .surroundings import job_environment
from .view import JobView

VIEW_INTERVAL_S = 0.25
FORCED_END_S = 10.0
METRICS_TIMEOUT_S = 5.0

log = logging.getLogger("holdfast")


def run_job(
    job: TrainingJob,
    home: Home | Path | str | None,
    spec_directory: str | Path,
    on_view: Callable[[JobView], None] | None = None,
    attach: bool = False,
    on_note: Callable[[str], None] | None = None,
) -> JobView:
    """Run a job to its end and return its last view.

    With `attach`, take over the existing job of this name; its own document counts, not `job`.
    `on_view` is called from this thread whenever something has changed, a few times a second;
    `on_note` gets one sentence for a person (what Ctrl-C has done). Raises UserError when the job
    cannot be started as asked; then nothing is left behind.
    """
    where = home if isinstance(home, Home) else Home(home)
    note = on_note or (lambda text: print(text, file=sys.stderr))
    if attach:
        directory = where.find(job.name)
        with directory.locked(), job_environment(directory.job()):
            service = Service(directory, on_view, note)
            return asyncio.run(service.run())
    directory = create_job(where, job, spec_directory)
    try:
        with directory.locked(), job_environment(job):
            return asyncio.run(Service(directory, on_view, note).run())
    except BaseException:
        # If it never began, the name is free again and nothing runs.
        if not directory.journal.exists():
            shutil.rmtree(directory.path, ignore_errors=True)
        raise


def local_backend(job: TrainingJob, directory: JobDirectory) -> LocalBackend:
    paths = LocalPaths(
        directory=directory.path,
        socket=directory.host_socket,
        token_file=directory.token_file,
        endpoint_file=directory.controller_file,
        logs=directory.logs,
    )
    return LocalBackend(job, paths)


class Service:
    """The parts of one job. The directory's lock is held by the caller."""

    def __init__(
        self,
        directory: JobDirectory,
        on_view: Callable[[JobView], None] | None = None,
        on_note: Callable[[str], None] = lambda text: None,
        make_backend: Callable[[TrainingJob, JobDirectory], Backend] = local_backend,
    ) -> None:
        self._directory = directory
        self._on_view, self._on_note = on_view, on_note
        self.job = directory.job()
        self._checkpoint_path = directory.checkpoint_path(self.job)
        self.backend = make_backend(self.job, directory)
        self._clock = Clock()
        self.metrics_port = 0
        self._interrupts = 0

    def view(self, *, live: bool = True) -> JobView:
        return self.driver.story.view(
            self._clock.now_ns(),
            live=live,
            checkpoint_path=self._checkpoint_path,
            metrics_port=self.metrics_port,
        )

    async def run(self) -> JobView:
        """Until the job has ended. Raises UserError, leaving nothing running, when it cannot begin;
        JournalError, leaving the job running, when its journal cannot be written any more."""
        self._changes = Changes()
        self._dirty = asyncio.Event()
        storage = Storage(self._checkpoint_path, self.job.name)
        self._assemble(storage)
        async with AsyncExitStack() as stack:
            self._log_to_file(stack)
            try:
                await self._open(stack, storage)
            except BaseException:
                # A mistake of the user, or Ctrl-C before anything was written down: leave nothing.
                await self.backend.close(release=not self._directory.journal.exists())
                raise
            stack.push_async_callback(self.backend.close, release=False)
            self._handle_signals(stack)
            self._background(stack, self._show())
            await self.driver.run()
        view = self.view(live=False)
        if self._on_view is not None:
            self._on_view(view)
        return view

    # -- opening, in order ---------------------------------------------------------------------
    def _assemble(self, storage: Storage) -> None:
        links: dict[str, AgentLink] = {}
        self.driver = Driver(
            self.job,
            self._clock,
            lambda action: self._executor.carry_out(action),
            self._on_change,
        )
        self._executor = Executor(self.backend, storage, links, self.driver.submit)
        self._relay = Relay(
            self.backend,
            self._executor,
            lambda: self.driver.controller.state,
            self.driver.submit,
        )
        self._control = Control(self.driver, self.backend, links, self.view, self._changes)
        self.endpoint = Endpoint(
            job_name=self.job.name,
            token=self._directory.token(),
            welcome=wire.Welcome(
                spec=job_to_mapping(self.job),
                spec_directory=self._directory.spec_directory,
                checkpoint_path=self._checkpoint_path,
                log_directory=str(self._directory.logs),
                heartbeat_interval_s=self.job.spec.recovery.heartbeat_interval_s,
            ),
            links=links,
            sink=self._relay,
            handler=self._control.handle,
        )

    async def _open(self, stack: AsyncExitStack, storage: Storage) -> None:
        loop = asyncio.get_running_loop()
        fresh = not self._directory.journal.exists()
        metrics = MetricsServer(self.job, self._metrics_view)
        self.metrics_port = metrics.open(self.job.spec.metrics.port)
        stack.callback(metrics.close)
        if fresh:
            # First, because the machine host takes the longest to come up.
            await self.backend.open(self._relay.node_gone)
        try:
            await loop.run_in_executor(None, storage.prepare)
            manifests = await loop.run_in_executor(None, storage.manifests)
        except HoldfastError as error:
            # A job that trains needs its controller more than its storage: what the journal knows
            # of checkpoints has to do until the next commit.
            if fresh:
                raise
            log.warning("taking over without looking into storage: %s", error)
            self._on_note(f"storage does not answer; taking over all the same ({error})")
            manifests = []
        self._refuse_foreign(manifests)
        await self.endpoint.open()
        stack.push_async_callback(self.endpoint.close)
        stack.push_async_callback(self._executor.close)
        journal = Journal(self._directory.journal)
        stack.callback(journal.close)
        if journal.cut_bytes:
            log.warning("the journal ended in %d bytes of half a record", journal.cut_bytes)
        replayed = self.driver.open(journal)
        existing: tuple[str, ...] | None = None
        if not fresh:
            await self.backend.open(self._relay.node_gone)
            existing = await self.backend.list_nodes()
        self._begin(replayed, tuple(file for one in manifests for file in one.files), existing)
        # From here on agents find us.
        stack.callback(self._directory.remove_controller)
        self._directory.write_controller(
            self.endpoint.address, self.endpoint.port, self.metrics_port
        )

    def _refuse_foreign(self, manifests: list[Manifest]) -> None:
        """Two jobs that share a place would write into each other's directories."""
        others = sorted({one.job for one in manifests} - {self.job.name})
        if others:
            problem = Problem(
                "spec.checkpoint.path",
                f"{self._checkpoint_path}, which holds checkpoints of job {', '.join(others)}",
                "a place of its own",
                "choose another directory or URL",
            )
            raise UserError(str(problem))

    def _begin(
        self, replayed: int, committed: tuple[ShardFile, ...], nodes: tuple[str, ...] | None
    ) -> None:
        """The events that every incarnation starts with, and the results that it will not get."""
        inflight: dict[int, AnyAction] = {}
        incarnation = 1
        if replayed:
            state = self.driver.controller.state
            inflight = dict(state.inflight)
            incarnation = state.incarnation + 1
        else:
            self.driver.submit(
                JobSubmitted(
                    job_id=self._directory.job_id,
                    spec=job_to_mapping(self.job),
                    spec_directory=self._directory.spec_directory,
                )
            )
        log.info("controller %d starts, %d events replayed", incarnation, replayed)
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

    # -- showing -------------------------------------------------------------------------------
    def _on_change(self) -> None:
        self._dirty.set()

    async def _show(self) -> None:
        """Views for the display and for those who watch; no more often than an eye can follow."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self._changes.tell()
            if self._on_view is not None:
                self._on_view(self.view())
            await asyncio.sleep(VIEW_INTERVAL_S)

    def _metrics_view(self) -> JobView:
        """For the thread of the metrics server."""

        async def build() -> JobView:
            return self.view()

        return asyncio.run_coroutine_threadsafe(build(), self._loop).result(METRICS_TIMEOUT_S)

    def _background(self, stack: AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        stack.push_async_callback(end)

    def _log_to_file(self, stack: AsyncExitStack) -> None:
        self._loop = asyncio.get_running_loop()
        handler = logging.FileHandler(self._directory.logs / "controller.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        for name in ("holdfast", "asyncio"):
            logger = logging.getLogger(name)
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        stack.callback(handler.close)

    # -- signals -------------------------------------------------------------------------------
    def _handle_signals(self, stack: AsyncExitStack) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted, signal.Signals(number).name)
            stack.callback(loop.remove_signal_handler, number)

    def _interrupted(self, name: str) -> None:
        self._interrupts += 1
        by = "Ctrl-C" if name == "SIGINT" else name
        if self._interrupts == 1:
            self._on_note(f"{by}: cancelling the job cleanly; once more kills everything at once")
            self.driver.submit(CancelRequested(by=by))
        elif self._interrupts == 2:
            self._on_note(f"{by}: killing all nodes")
            self._forced = asyncio.get_running_loop().create_task(self._force())

    async def _force(self) -> None:
        """End every node, so that the core has nothing left to wait for."""
        for node in await self.backend.list_nodes():
            await self.backend.release_node(node)
        await asyncio.sleep(FORCED_END_S)
        # The core should have ended the job long ago. Whatever it waits for, end everything.
        await self.backend.close(release=True)
        self.driver.stop()
