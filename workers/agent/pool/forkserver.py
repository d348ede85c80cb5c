"""Forks workers from a process that has imported torch, and reports their exits at once.

The forkserver must not start a thread or import lazily: a fork of a process with threads is unsafe.
It dies with its agent, and its workers die with it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping

from ..linux import output, processes
from ..linux.orphans import Orphans
from . import entrypoint, fork_protocol, preload, worker_main
from .import_template import ImportTemplate

IMPORT_TIME_S = 120.0
"""A template that imports longer is ended; each standby imports the modules itself then."""


def start() -> tuple[int, socket.socket]:
    """Fork the forkserver: (pid, our end of the socket). The caller must not have threads."""
    assert preload.num_threads() == 1, f"{preload.num_threads()} threads: a fork is not safe"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output.flush()  # after the fork both processes would write what is buffered
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            processes.die_with(parent)
            processes.name_process("forkserver")
            ours.close()
            Forkserver(theirs).serve()
        finally:
            os._exit(1)
    theirs.close()
    return pid, ours


class Forkserver:
    """The event loop. It waits on descriptors only."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._agent = os.getppid()
        self._selector = selectors.DefaultSelector()
        self._orphans = Orphans(self._spares)
        self._workers: dict[int, int] = {}
        """Worker number -> pid."""
        self._job: TrainingJob | None = None
        self._directory = "."
        self._inherited = frozenset(sys.modules)
        self._template: ImportTemplate | None = None
        self._template_due_s = self._ranks_due_s = 0.0
        self._left_out: frozenset[str] = frozenset()
        """Modules that no template imports."""
        self._templates_failed = False
        self._signals: dict[int, list[int]] = {}
        """Number of a worker that waits for the template -> the signals that it gets."""

    def serve(self) -> NoReturn:
        os.setpgid(0, 0)  # Ctrl-C in the terminal is for the command line only
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        processes.adopt_orphans()
        self._selector.register(self._link, selectors.EVENT_READ, None)
        self._selector.register(self._orphans.selector, selectors.EVENT_READ, None)
        while True:
            waits_s = (self._wait_s(), self._orphans.due_in_s())
            wait_s = min((each_s for each_s in waits_s if each_s is not None), default=None)
            for event, _mask in self._selector.select(wait_s):
                if event.fileobj is self._link:
                    self._on_request()
                elif event.fileobj is self._orphans.selector:
                    self._orphans.reap()
                elif event.data is not None:
                    self._reap(*event.data)
                elif self._template is not None and event.fileobj is self._template.link:
                    self._on_template(self._template)
            if self._wait_s() == 0:
                self._waited_long_enough()
            if self._orphans.due_in_s() == 0:
                self._orphans.reap()

    # -- requests -----------------------------------------------------------------------------
    def _on_request(self) -> None:
        message, fds = fork_protocol.receive(self._link)
        match message:
            case None:
                self._end()
            case fork_protocol.ConfigureForkserver():
                self._job, self._directory = job_from_mapping(message.spec), message.directory
            case fork_protocol.ForkWorker():
                self._on_fork(message, fds)
            case fork_protocol.SignalWorker():
                if message.worker in self._signals:
                    self._signal_later(message)
                elif (pid := self._workers.get(message.worker)) is not None:
                    _signal(pid, message.signal)
            case _:
                raise AssertionError(f"the agent sent {type(message).__name__}")

    def _on_fork(self, message: fork_protocol.ForkWorker, fds: list[int]) -> None:
        self._left_out |= set(message.left_out)
        template = self._template_for(message)
        if template is None:
            self._fork(message, fds)
        elif template.ready:
            self._fork_from(template, message, fds)
        else:
            self._signals[message.worker] = []
            if message.local_rank < 0 and not template.ranks_waiting():
                self._ranks_due_s = time.monotonic() + limits.IMPORT_WAIT_S
            template.waiting.append((message, fds))

    def _signal_later(self, message: fork_protocol.SignalWorker) -> None:
        """Note a signal to a worker that waits for the template. A worker with a rank need not be
        forked to end: a stop must not wait for an import."""
        template = self._template
        assert template is not None, "its worker waits for it"
        ends = message.signal in (signal.SIGKILL, signal.SIGTERM)
        ranks = [w for w in template.ranks_waiting() if w[0].worker == message.worker]
        if not ends or not ranks:
            self._signals[message.worker].append(message.signal)
            return
        ((request, fds),) = ranks
        template.waiting.remove((request, fds))
        for fd in fds:
            os.close(fd)
        detail = "it was stopped before it was forked"
        self._not_forked(fork_protocol.NotForked(worker=request.worker, detail=detail))

    def _fork(self, request: fork_protocol.ForkWorker, fds: Sequence[int]) -> None:
        assert self._job is not None, "Configure comes before the first fork"
        assert preload.num_threads() == 1, "a library has started a thread in the forkserver"
        output.flush()  # after the fork both processes would write what is buffered
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            for fd in fds:
                os.close(fd)
            detail = f"fork: {error.strerror}"
            self._not_forked(fork_protocol.NotForked(worker=request.worker, detail=detail))
            return
        if pid == 0:
            try:
                processes.die_with(server)
                self._run_worker(request, fds)
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        self._forked(fork_protocol.Forked(worker=request.worker, pid=pid))

    def _run_worker(self, request: fork_protocol.ForkWorker, fds: Sequence[int]) -> NoReturn:
        """Runs in the new process."""
        assert self._job is not None
        processes.name_process("standby")
        processes.allow_reading_by(self._agent)
        os.setsid()
        _close_all_but(*fds)
        worker_main.run(
            entrypoint.Descriptors(*fds), self._job, self._directory, request, self._inherited
        )

    def _forked(self, message: fork_protocol.Forked) -> None:
        self._workers[message.worker] = message.pid
        self._watch(message.pid, message.worker)
        fork_protocol.send(self._link, message)
        for number in self._signals.pop(message.worker, ()):
            _signal(message.pid, number)

    def _not_forked(self, message: fork_protocol.NotForked) -> None:
        self._signals.pop(message.worker, None)
        fork_protocol.send(self._link, message)

    # -- the template -------------------------------------------------------------------------
    def _template_for(self, request: fork_protocol.ForkWorker) -> ImportTemplate | None:
        if not request.modules or self._templates_failed:
            return None
        template, has_rank = self._template, request.local_rank < 0
        if template is not None and template.ready and has_rank:
            return template  # what it lacks is imported sooner than all of it
        if template is None or not template.serves(request.modules):
            template = self._start_template(request.modules)
        return template

    def _start_template(self, modules: Sequence[str]) -> ImportTemplate:
        assert self._job is not None, "Configure comes before the first fork"
        waiting = self._end_template()
        template = ImportTemplate(self._job, modules, self._left_out, self._run_worker)
        self._template, self._template_due_s = template, time.monotonic() + IMPORT_TIME_S
        self._selector.register(template.link, selectors.EVENT_READ, None)
        template.waiting = waiting
        return template

    def _end_template(self) -> list[tuple[fork_protocol.ForkWorker, list[int]]]:
        """The requests that waited for it."""
        template, self._template = self._template, None
        if template is None:
            return []
        self._selector.unregister(template.link)
        template.kill()
        self._orphans.watch(template.pid)
        return template.waiting

    def _fork_from(
        self, template: ImportTemplate, request: fork_protocol.ForkWorker, fds: list[int]
    ) -> None:
        try:
            answer = template.fork(request, fds)
        except OSError as error:
            template.waiting.insert(0, (request, fds))
            self._template_failed(str(error))
            return
        for fd in fds:
            os.close(fd)
        if isinstance(answer, fork_protocol.Forked):
            self._forked(answer)
        else:
            self._not_forked(answer)

    def _on_template(self, template: ImportTemplate) -> None:
        try:
            message, _fds = fork_protocol.receive(template.link)
        except ConnectionResetError:
            message = None
        match message:
            case fork_protocol.ImportsReady():
                template.ready = True
                template.waiting.sort(key=lambda one: one[0].local_rank >= 0)  # ranks first
                while template.waiting and template is self._template:
                    self._fork_from(template, *template.waiting.pop(0))
            case fork_protocol.ImportLeftOut():
                self._left_out |= set(message.modules)
                print(
                    f"the import of {message.modules[0]} {message.problem}, and such a process "
                    "must not fork; each standby imports it itself",
                    file=sys.stderr,
                )
                fork_protocol.send(self._link, message)
                self._fork_ranks(template)  # they have waited for one import
                if template.waiting:
                    self._start_template(template.modules)
                else:
                    self._end_template()
            case None:
                self._template_failed("it ended")
            case _:
                raise AssertionError(f"the template sent {type(message).__name__}")

    def _waited_long_enough(self) -> None:
        template = self._template
        assert template is not None
        if time.monotonic() >= self._template_due_s:
            self._template_failed(f"it imports for {IMPORT_TIME_S:g} s")
        else:
            self._fork_ranks(template)

    def _fork_ranks(self, template: ImportTemplate) -> None:
        """Workers with ranks wait no longer, and import by themselves."""
        for request, fds in template.ranks_waiting():
            template.waiting.remove((request, fds))
            self._fork(request, fds)

    def _template_failed(self, why: str) -> None:
        """Do without one; the standbys import by themselves."""
        print(f"the import template: {why}; each standby imports by itself", file=sys.stderr)
        self._templates_failed = True
        for request, fds in self._end_template():
            self._fork(request, fds)

    def _wait_s(self) -> float | None:
        """Seconds until workers have waited long enough for the template; None: no limit."""
        template, due_s = self._template, self._template_due_s
        if template is None or template.ready:
            return None
        if template.ranks_waiting():
            due_s = min(due_s, self._ranks_due_s)
        return max(0.0, due_s - time.monotonic())

    # -- exits --------------------------------------------------------------------------------
    def _watch(self, pid: int, worker: int) -> None:
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, (pid, worker, pidfd))

    def _reap(self, pid: int, worker: int, pidfd: int) -> None:
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        del self._workers[worker]
        killed = self._orphans.end()  # the worker's children are ours now
        code = os.waitstatus_to_exitcode(status)
        ended = fork_protocol.ProcessEnded(
            worker=worker,
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            killed=killed,
        )
        fork_protocol.send(self._link, ended)

    def _spares(self, child: int) -> bool:
        """Workers, the template, and what live workers have started in their sessions."""
        template = self._template.pid if self._template is not None else 0
        return (
            child == template
            or os.getsid(child) in self._workers.values()
            or (
                child in self._workers.values()  # it may not have its session yet
            )
        )

    def _end(self) -> NoReturn:
        """The agent has closed the socket: end all workers."""
        if self._template is not None:
            self._template.kill()
        for pid in self._workers.values():
            _signal(pid, signal.SIGKILL)
        for pid in self._workers.values():
            os.waitpid(pid, 0)
        self._workers.clear()
        self._template = None
        self._orphans.end()
        self._orphans.wait()
        os._exit(0)


def _signal(pid: int, number: int) -> None:
    """Signal a worker; with SIGTERM also its children. A new one may not have its group yet. What a
    killed worker has started is ended after it (orphans.py): some of it cleans up."""
    if number == signal.SIGTERM:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
            return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _close_all_but(*keep: int) -> None:
    """Close every descriptor but the standard ones and `keep`."""
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def main(arguments: list[str]) -> NoReturn:
    """Start a new forkserver after one was killed: `python -m ... FD PARENT_PID`."""
    link = socket.socket(fileno=int(arguments[0]))
    output.never_fail()
    processes.die_with(int(arguments[1]))
    preload.preload()
    Forkserver(link).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
