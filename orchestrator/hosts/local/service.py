"""One job of this machine from its directory to its end: `holdfast run`, attached to it or anew.

Owns: what is local about a job around its Assembly: its files, its journal's file, the port that
agents dial, /metrics, the log file, the display, the signals of the terminal. Must not: decide
anything about the job.

When this process is killed, the job goes on without it: machine host and agents are sessions of
their own, agents look for the next controller, and everything that was decided is in the journal.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.backends.base import Backend
from holdfast.orchestrator.backends.local import LocalBackend, LocalPaths
from holdfast.orchestrator.core.events import CancelRequested
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.runtime.agent_server import AgentServer
from holdfast.orchestrator.runtime.checkpoint_store.async_store import ThreadedCheckpointStore
from holdfast.orchestrator.runtime.checkpoint_store.job_environment import job_environment
from holdfast.orchestrator.runtime.checkpoint_store.options import own_options
from holdfast.orchestrator.runtime.checkpoint_store.serial_executor import SerialExecutor
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from holdfast.orchestrator.runtime.driver import Driver
from holdfast.orchestrator.runtime.job_runtime import JobRuntime
from holdfast.orchestrator.runtime.observe.prometheus import MetricsServer
from holdfast.orchestrator.runtime.observe.view import JobView

from .file_journal import FileJournal
from .job_directory import Home, JobDirectory
from .job_records import create_job

VIEW_INTERVAL_S = 0.25
FORCED_END_S = 10.0
METRICS_TIMEOUT_S = 5.0
T = TypeVar("T")

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
        with directory.locked(), _surroundings(directory):
            service = LocalJobHost(directory, on_view, note)
            return asyncio.run(service.run())
    directory = create_job(where, job, spec_directory)
    try:
        with directory.locked(), _surroundings(directory):
            return asyncio.run(LocalJobHost(directory, on_view, note).run())
    except BaseException:
        # If it never began, the name is free again and nothing runs.
        if not directory.journal.exists():
            with suppress(HoldfastError):
                directory.remove()
        raise


def local_backend(job: TrainingJob, directory: JobDirectory) -> LocalBackend:
    paths = LocalPaths(
        directory=directory.path,
        nodes_file=directory.nodes_file,
        socket=directory.host_socket,
        token_file=directory.token_file,
        endpoint_file=directory.controller_file,
        logs=directory.logs,
    )
    return LocalBackend(job, paths)


def _surroundings(directory: JobDirectory) -> AbstractContextManager[None]:
    """spec.env in this process' environment, where the driver of the job's store looks for more
    than can be told to it."""
    job = directory.job()
    if own_options(job, directory.checkpoint_path(job)) is None:
        return job_environment(job)
    return nullcontext()


def _unheard(say: Callable[[T], None]) -> Callable[[T], None]:
    """The same, but nobody has to listen: `holdfast run FILE | head` still trains to the end, and
    Ctrl-C still cancels it."""

    def attempt(what: T) -> None:
        try:
            say(what)
        except OSError as error:
            log.debug("not shown: %s", error)

    return attempt


class LocalJobHost:
    """One job of this machine. The directory's lock is held by the caller."""

    def __init__(
        self,
        directory: JobDirectory,
        on_view: Callable[[JobView], None] | None = None,
        on_note: Callable[[str], None] = lambda text: None,
        make_backend: Callable[[TrainingJob, JobDirectory], Backend] = local_backend,
        open_journal: Callable[[Path], FileJournal] = FileJournal,
    ) -> None:
        self._directory, self._open_journal = directory, open_journal
        self._on_view, self._on_note = _unheard(on_view or (lambda view: None)), _unheard(on_note)
        self.job = job = directory.job()
        self.metrics_port = 0
        self._interrupts = 0
        self._dirty = asyncio.Event()
        self.endpoint = AgentServer()
        path = directory.checkpoint_path(job)
        storage = CheckpointStore(path, job.name, own_options(job, path))
        self.assembly = JobRuntime(
            job,
            key=job.name,
            job_id=directory.job_id,
            spec_directory=directory.spec_directory,
            checkpoint_path=path,
            log_directory=str(directory.logs),
            token=directory.token(),
            backend=make_backend(job, directory),
            endpoint=self.endpoint,
            storage=ThreadedCheckpointStore(lambda: storage, SerialExecutor()),
            on_change=self._dirty.set,
            on_note=on_note,
        )

    @property
    def driver(self) -> Driver:
        return self.assembly.driver

    def view(self, *, live: bool = True) -> JobView:
        return self.assembly.view(live=live, metrics_port=self.metrics_port)

    async def run(self) -> JobView:
        """Until the job has ended. Raises UserError, leaving nothing running, when it cannot begin;
        JournalError, leaving the job running, when its journal cannot be written any more."""
        async with AsyncExitStack() as stack:
            self._log_to_file(stack)
            try:
                await self._open(stack)
            except BaseException:
                # A mistake of the user, or Ctrl-C before anything was written down: leave nothing.
                await self.assembly.close(release=not self._directory.journal.exists())
                raise
            stack.push_async_callback(self.assembly.close)
            # First of all, so that nobody who dials again is told that there is no such job.
            stack.push_async_callback(self.endpoint.close)
            self._handle_signals(stack)
            self._background(stack, self._show())
            await self.assembly.run()
        view = self.view(live=False)
        self._on_view(view)
        return view

    async def _open(self, stack: AsyncExitStack) -> None:
        self._directory.remove_controller()  # of a controller that was killed
        metrics = MetricsServer(self.job, self._metrics_view)
        self.metrics_port = metrics.open(self.job.spec.metrics.port)
        stack.callback(metrics.close)
        await self.assembly.prepare(fresh=not self._directory.journal.exists())
        await self.endpoint.open()
        stack.push_async_callback(self.endpoint.close)
        journal = self._open_journal(self._directory.journal)
        stack.callback(journal.close)
        if journal.cut_bytes:
            log.warning("the journal ended in %d bytes of half a record", journal.cut_bytes)
        await self.assembly.begin(journal)
        # From here on agents find us.
        stack.callback(self._directory.remove_controller)
        self._directory.write_controller(
            self.endpoint.address, self.endpoint.port, self.metrics_port
        )

    # -- showing -------------------------------------------------------------------------------
    async def _show(self) -> None:
        """Views for the display; no more often than an eye can follow."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
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
        path = self._directory.logs / "controller.log"
        try:
            path.parent.mkdir(exist_ok=True)
            handler = logging.FileHandler(path)
        except OSError as error:
            raise HoldfastError(f"{path}: cannot be written ({error.strerror})") from None
        # A full disk is told once, by who writes the journal; not as a traceback for every line.
        handler.handleError = lambda record: None  # type: ignore[method-assign]
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
        backend = self.assembly.backend
        for node in await backend.list_nodes():
            await backend.release_node(node)
        await asyncio.sleep(FORCED_END_S)
        # The core should have ended the job long ago. Whatever it waits for, end everything.
        try:
            await backend.close(release=True)
        except HoldfastError as error:
            self._on_note(str(error))
        finally:
            self.assembly.stop()
