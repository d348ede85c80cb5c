"""Runs the controller of one local job in the `holdfast run` process.

It provides what is local about a job: files, journal, port for agents, /metrics, log file, display
and terminal signals. When this process is killed, training continues: the node launcher and the
agents run in sessions of their own, agents wait for the next controller, and the journal holds
every decision.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import NamedTuple, TypeVar

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.backends.base import Backend
from holdfast.orchestrator.backends.local import LocalBackend, LocalPaths
from holdfast.orchestrator.core.events import CancelRequested
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal
from holdfast.orchestrator.journal.file_store import FileStore
from holdfast.orchestrator.protocol.strangers import raise_descriptor_limit
from holdfast.orchestrator.runtime.agent_server import AgentServer
from holdfast.orchestrator.runtime.checkpoint_store.async_store import (
    SerialExecutor,
    ThreadedCheckpointStore,
)
from holdfast.orchestrator.runtime.checkpoint_store.options import job_environment, own_options
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from holdfast.orchestrator.runtime.job_directory import JobDirectory
from holdfast.orchestrator.runtime.job_runtime import JobRuntime
from holdfast.orchestrator.runtime.observe import incident_traces, notifications
from holdfast.orchestrator.runtime.observe.prometheus import MetricsServer
from holdfast.orchestrator.runtime.observe.view import JobView

from .job_records import measurements

T = TypeVar("T")

log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class LocalHostTiming:
    view_interval_s: float = 0.25
    """Seconds between two views for the display, at least."""
    second_ctrl_c_s: float = 1.0
    """A Ctrl-C this long after the first signal forces the end. systemd, `timeout` and `uv run`
    deliver one request to end twice, within milliseconds."""
    forced_end_s: float = 10.0
    """Seconds after a second Ctrl-C, from killing all nodes to ending the controller itself."""
    metrics_timeout_s: float = 5.0
    """A scrape waits this long for the event loop."""


class FinishedRun(NamedTuple):
    view: JobView
    interrupted: bool
    """The user pressed Ctrl-C."""


def run_job(
    directory: JobDirectory,
    on_view: Callable[[JobView], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    *,
    is_new: bool = False,
) -> FinishedRun:
    """Run a job to its end that was just created, was set aside, or lost its controller.

    `on_view` is called from this thread a few times a second while the job changes; `on_note` gets
    single sentences for the user. Raises UserError when the job cannot be started; nothing is left
    of a new one then.
    """
    try:
        with directory.locked():
            return _run(directory, directory.job(), on_view, on_note)
    except BaseException:
        # If the job never started, delete it: its name is free again and nothing runs.
        if is_new and not directory.journal.exists():
            with suppress(HoldfastError):
                directory.remove()
        raise


def _run(
    directory: JobDirectory,
    job: TrainingJob,
    on_view: Callable[[JobView], None] | None,
    on_note: Callable[[str], None] | None,
) -> FinishedRun:
    raise_descriptor_limit()
    # The storage driver may read more variables of spec.env than it has options for.
    needs_environment = own_options(job, directory.checkpoint_path(job)) is None
    with job_environment(job) if needs_environment else nullcontext():
        host = LocalJobHost(
            directory, job, on_view, on_note or (lambda text: print(text, file=sys.stderr))
        )
        return FinishedRun(asyncio.run(host.run()), host.interrupted)


def local_backend(job: TrainingJob, directory: JobDirectory) -> LocalBackend:
    paths = LocalPaths(
        directory=directory.path,
        nodes_file=directory.nodes_file,
        socket=directory.host_socket,
        token_file=directory.token_file,
        endpoint_file=directory.controller_file,
        logs=directory.logs,
        cache=directory.home_cache,
    )
    return LocalBackend(job, paths)


def _ignoring_closed_output(write: Callable[[T], None]) -> Callable[[T], None]:
    """The same function without OSError: `holdfast run FILE | head` still trains to the end, and
    Ctrl-C still cancels the job."""

    def attempt(what: T) -> None:
        try:
            write(what)
        except OSError as error:
            log.debug("not shown: %s", error)

    return attempt


class LocalJobHost:
    """The controller of one local job. The caller holds the lock of the directory."""

    def __init__(
        self,
        directory: JobDirectory,
        job: TrainingJob,
        on_view: Callable[[JobView], None] | None = None,
        on_note: Callable[[str], None] = lambda text: None,
        make_backend: Callable[[TrainingJob, JobDirectory], Backend] = local_backend,
        open_store: Callable[[Path], FileStore] = FileStore,
        timing: LocalHostTiming = LocalHostTiming(),
    ) -> None:
        self.job = job
        self.metrics_port = 0
        self.interrupted = False
        """The user pressed Ctrl-C."""
        self._directory = directory
        self._open_store = open_store
        self._timing = timing
        self._on_view = _ignoring_closed_output(on_view or (lambda view: None))
        self._on_note = _ignoring_closed_output(on_note)
        self._signalled_s: float | None = None
        self._forced: asyncio.Task[None] | None = None
        self._dirty = asyncio.Event()
        self.endpoint = AgentServer()
        path = directory.checkpoint_path(job)
        storage = CheckpointStore(path, job.name, own_options(job, path))
        self.runtime = JobRuntime(
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
            on_note=self._on_note,
            measurements=measurements(directory),
            traces=incident_traces.of_environment(job.name),
            notifications=notifications.for_job(job, self._on_note),
        )

    def view(self, *, live: bool = True) -> JobView:
        return self.runtime.view(live=live, metrics_port=self.metrics_port)

    async def run(self) -> JobView:
        """Returns when the job has ended. Raises UserError when the job cannot start (then nothing
        is left running) and JournalError when its journal cannot be written (then the job keeps
        running)."""
        async with AsyncExitStack() as stack:
            self._log_to_file(stack)
            try:
                await self._open(stack)
            except BaseException:
                # A user error, or Ctrl-C before the journal exists: leave nothing running.
                await self.runtime.close(release=not self._directory.journal.exists())
                raise
            stack.push_async_callback(self.runtime.close)
            # Closed first: an agent that reconnects now must not learn that the job is unknown.
            stack.push_async_callback(self.endpoint.close)
            self._handle_signals(stack)
            stack.callback(asyncio.create_task(self._show_views()).cancel)
            await self.runtime.run()
            await self._report_unwritten()
        view = self.view(live=False)
        self._on_view(view)
        return view

    async def _open(self, stack: AsyncExitStack) -> None:
        self._directory.remove_controller()  # left by a controller that was killed
        metrics = MetricsServer(self.job, self._metrics_view)
        self.metrics_port = metrics.open(self.job.spec.metrics.port)
        stack.callback(metrics.close)
        await self.runtime.prepare(fresh=not self._directory.journal.exists())
        await self.endpoint.open()
        stack.push_async_callback(self.endpoint.close)
        journal = self._journal = await ChunkJournal.open(self._open_store(self._directory.journal))
        stack.callback(journal.close)
        await self.runtime.begin(journal)
        # From here on agents find this controller.
        stack.callback(self._directory.remove_controller)
        self._directory.write_controller(
            self.endpoint.address, self.endpoint.port, self.metrics_port
        )

    async def _report_unwritten(self) -> None:
        """The disk is full to the end: what this controller has only in memory goes with it."""
        await self._journal.commit()
        if number := self._journal.num_pending:
            self._on_note(
                f"{self._directory.journal}: the disk is full, so the last {number} records are "
                f"lost: `holdfast status` and `debug events` show the job as it was before them"
            )

    async def _show_views(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self._on_view(self.view())
            await asyncio.sleep(self._timing.view_interval_s)

    def _metrics_view(self) -> JobView:
        """Called in the thread of the metrics server."""

        async def build() -> JobView:
            return self.view()

        future = asyncio.run_coroutine_threadsafe(build(), self._loop)
        return future.result(self._timing.metrics_timeout_s)

    def _log_to_file(self, stack: AsyncExitStack) -> None:
        self._loop = asyncio.get_running_loop()
        path = self._directory.logs / "controller.log"
        try:
            path.parent.mkdir(exist_ok=True)
            handler = RotatingFileHandler(path, maxBytes=limits.LOG_BYTES, backupCount=1)
        except OSError as error:
            raise HoldfastError(f"{path}: cannot be written ({error.strerror})") from None
        # The journal reports a full disk once; do not print a traceback for every log line too.
        handler.handleError = lambda record: None  # type: ignore[method-assign]
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        for name in ("holdfast", "asyncio"):
            logger = logging.getLogger(name)
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        stack.callback(handler.close)

    def _handle_signals(self, stack: AsyncExitStack) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number))
            stack.callback(loop.remove_signal_handler, number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # a replacement has waited

    def _on_signal(self, number: signal.Signals) -> None:
        self.interrupted |= number == signal.SIGINT
        by = "Ctrl-C" if number == signal.SIGINT else number.name
        now_s = self._loop.time()
        if self._signalled_s is None:
            self._signalled_s = now_s
            more = "; press Ctrl-C again to kill all nodes at once"
            may_press = number == signal.SIGINT or bool(sys.stdin and sys.stdin.isatty())
            self._on_note(f"{by}: cancelling the job{more if may_press else ''}")
            self.runtime.submit(CancelRequested(by=by))
        elif (
            number == signal.SIGINT
            and self._forced is None
            and now_s - self._signalled_s >= self._timing.second_ctrl_c_s
        ):
            self._on_note(f"{by}: killing all nodes")
            self._forced = self._loop.create_task(self._force())

    async def _force(self) -> None:
        """Kill every node, so that the controller has nothing left to wait for."""
        backend = self.runtime.backend
        for node in await backend.list_nodes():
            await backend.release_node(node)
        await asyncio.sleep(self._timing.forced_end_s)
        # The job should have ended by now. End the controller, whatever it waits for.
        try:
            await backend.close(release=True)
        except HoldfastError as error:
            self._on_note(str(error))
        finally:
            self.runtime.stop()
