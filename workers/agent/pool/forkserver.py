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
from typing import NoReturn

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.protocol import python_command

from ..linux import output, processes
from . import fork_protocol, preload, user_modules, worker_main


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

    def __init__(self, link: socket.socket, configured: bytes = b"") -> None:
        """`configured`: of the forkserver that this one replaces, see _start_again."""
        self._link = link
        self._configured = configured
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, int] = {}
        """Worker number -> pid."""
        self._job: TrainingJob | None = None
        self._directory = "."

    def serve(self) -> NoReturn:
        os.setpgid(0, 0)  # Ctrl-C in the terminal is for the command line only
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        processes.adopt_orphans()
        self._selector.register(self._link, selectors.EVENT_READ, None)
        if self._configured:
            self._configure(fork_protocol.decode_configure(self._configured))
        while True:
            for event, _mask in self._selector.select():
                if event.data is None:
                    self._on_request()
                else:
                    self._reap(*event.data)

    # -- requests -----------------------------------------------------------------------------
    def _on_request(self) -> None:
        message, fds = fork_protocol.receive(self._link)
        match message:
            case None:
                self._end()
            case fork_protocol.ConfigureForkserver():
                first = self._job is None
                job = self._configure(message)
                if first and (problem := user_modules.import_before_fork(job)):
                    self._start_again(message, problem)
            case fork_protocol.ForkWorker():
                self._fork(message, *fds)
            case fork_protocol.SignalWorker():
                pid = self._workers.get(message.worker)
                if pid is not None:
                    _signal_group(pid, message.signal)
            case _:
                raise AssertionError(f"the agent sent {type(message).__name__}")

    def _configure(self, message: fork_protocol.ConfigureForkserver) -> TrainingJob:
        job = self._job = job_from_mapping(message.spec)
        self._directory = message.directory
        return job

    def _start_again(self, message: fork_protocol.ConfigureForkserver, problem: str) -> NoReturn:
        """Become a forkserver that can fork; requests wait in the socket."""
        assert not self._workers, "the job comes before the first fork"
        print(
            f"spec.preload: {problem}, and such a process must not fork; each standby imports the "
            "modules itself",
            file=sys.stderr,
        )
        output.flush()
        kept = os.memfd_create("holdfast-configure", 0)
        os.write(kept, fork_protocol.encode(message))
        self._link.set_inheritable(True)
        command = python_command.start_alike("holdfast.workers.agent.pool.forkserver")
        arguments = [str(self._link.fileno()), str(os.getppid()), str(kept)]
        environment = {**os.environ, **preload.SINGLE_THREADED}
        os.execve(command[0], [*command, *arguments], environment)

    def _fork(
        self, request: fork_protocol.ForkWorker, wire_fd: int, stack_fd: int, asked_fd: int
    ) -> None:
        worker = request.worker
        assert self._job is not None, "Configure comes before the first fork"
        assert preload.num_threads() == 1, "a library has started a thread in the forkserver"
        output.flush()  # after the fork both processes would write what is buffered
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            for fd in (wire_fd, stack_fd, asked_fd):
                os.close(fd)
            detail = f"fork: {error.strerror}"
            fork_protocol.send(self._link, fork_protocol.NotForked(worker=worker, detail=detail))
            return
        if pid == 0:
            try:
                processes.die_with(server)
                processes.name_process("standby")
                os.setsid()
                _close_all_but(wire_fd, stack_fd, asked_fd)
                worker_main.run(
                    wire_fd, stack_fd, asked_fd, self._job, self._directory, request.local_rank
                )
            finally:
                os._exit(1)
        for fd in (wire_fd, stack_fd, asked_fd):
            os.close(fd)
        self._workers[worker] = pid
        self._watch(pid, worker)
        fork_protocol.send(self._link, fork_protocol.Forked(worker=worker, pid=pid))

    # -- exits --------------------------------------------------------------------------------
    def _watch(self, pid: int, worker: int) -> None:
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, (pid, worker, pidfd))

    def _reap(self, pid: int, worker: int, pidfd: int) -> None:
        # The group first: while its leader is a zombie, its number cannot be reused.
        _signal_group(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if worker < 0:
            return
        del self._workers[worker]
        self._end_orphans()
        code = os.waitstatus_to_exitcode(status)
        ended = fork_protocol.ProcessEnded(
            worker=worker, code=code if code >= 0 else None, signal=-code if code < 0 else None
        )
        fork_protocol.send(self._link, ended)

    def _end_orphans(self) -> None:
        """Kill processes that a worker left in other process groups: they are our children now."""
        known = set(self._workers.values())
        known |= {key.data[0] for key in self._selector.get_map().values() if key.data}
        for pid in processes.children():
            if pid not in known:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self._watch(pid, -1)

    def _end(self) -> NoReturn:
        """The agent has closed the socket: end all workers."""
        for pid in self._workers.values():
            _signal_group(pid, signal.SIGKILL)
        for pid in self._workers.values():
            os.waitpid(pid, 0)
        self._workers.clear()
        for pid in processes.children():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        os._exit(0)


def _signal_group(pid: int, number: int) -> None:
    """Signal a worker and its children. A new worker may not have its process group yet."""
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
    """Start a new forkserver after one was killed, or could not fork any more:
    `python -m ... FD PARENT_PID [FD_OF_CONFIGURE]`."""
    link = socket.socket(fileno=int(arguments[0]))
    configured = b""
    if len(arguments) > 2:
        kept = int(arguments[2])
        configured = os.pread(kept, os.fstat(kept).st_size, 0)
        os.close(kept)
    output.never_fail()
    processes.die_with(int(arguments[1]))
    preload.preload()
    Forkserver(link, configured).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
