"""The agent's side of its forkserver and of its workers' wires.

Owns: which process holds which seat, standbys, and the order of news about a worker: everything it
said comes before its end. Must not: decide; it turns packets into facts and commands into packets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.orchestrator.protocol import python_command
from holdfast.workers import worker_protocol

from ..linux import cgroup, processes
from ..machine import inputs as f
from . import fork_protocol, preload

COMPANY_S = 2.0

Seat = tuple[int, int]
"""(generation, rank)."""


@dataclass
class WorkerProcess:
    """One worker process, from the request to fork it until it is reaped."""

    number: int
    link: socket.socket
    stack_fd: int
    pid: int = 0
    pidfd: int = -1
    seat: Seat | None = None
    """None: a standby."""
    reading: bool = False


class WorkerPool:
    """All worker processes of a node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Callable[[f.Input], None]) -> None:
        self._loop = loop
        self._tell = tell
        self._server: socket.socket | None = None
        self._job: fork_protocol.ConfigureForkserver | None = None
        self._processes: dict[int, WorkerProcess] = {}
        self._seats: dict[Seat, WorkerProcess] = {}
        self._next = 0
        self._memory = cgroup.find("memory")
        self._memory_kills = cgroup.memory_kills(self._memory)
        """Kills that are accounted for."""
        self._cold: subprocess.Popen[bytes] | None = None
        self._mourning: asyncio.Task[None] | None = None

    def attach(self, server: socket.socket) -> None:
        server.setblocking(False)
        self._server = server
        self._loop.add_reader(server, self._from_server)

    def configure(self, spec: dict[str, Any], directory: str) -> None:
        self._job = fork_protocol.ConfigureForkserver(spec=spec, directory=directory)
        self._request(self._job)

    # -- commands -----------------------------------------------------------------------------
    def refill(self, count: int) -> None:
        """Have `count` standbys."""
        standing = sum(process.seat is None for process in self._processes.values())
        for _ in range(count - standing):
            self._fork()

    def seat(self, assign: worker_protocol.Assign, output: int | None) -> None:
        """Give a seat to a standby, or to a worker forked for it; `output` goes along."""
        seat = (assign.membership.generation, assign.seat.rank)
        standing = (p for p in self._processes.values() if p.seat is None)
        # Those that were forked already first: they may be warm.
        process = min(standing, key=lambda p: (p.pid == 0, p.number), default=None) or self._fork()
        process.seat = seat
        self._seats[seat] = process
        self._send(process, assign, output)
        if process.pid:
            self._tell(f.WorkerForked(*seat, process.pid))

    def kill(self, generation: int, rank: int, number: int) -> None:
        process = self._seats.get((generation, rank))
        if process is not None:
            self._request(fork_protocol.SignalWorker(worker=process.number, signal=number))

    def send(
        self, generation: int, rank: int, message: worker_protocol.ToWorker, fd: int | None
    ) -> None:
        process = self._seats.get((generation, rank))
        if process is not None:
            self._send(process, message, fd)

    def where(self, generation: int, rank: int) -> tuple[int, int] | None:
        """(pid, stack file) of a live worker."""
        process = self._seats.get((generation, rank))
        return (process.pid, process.stack_fd) if process is not None and process.pid else None

    def stopped_ranks(self) -> tuple[int, ...]:
        """Ranks whose process is stopped (state T), from the kernel."""
        return tuple(
            sorted(
                seat[1]
                for seat, process in self._seats.items()
                if process.pid and processes.state_of(process.pid) in ("T", "t")
            )
        )

    # -- the forkserver -----------------------------------------------------------------------
    def _fork(self) -> WorkerProcess:
        self._next += 1
        ours, theirs = worker_protocol.pair()
        ours.setblocking(False)
        stack_fd = os.memfd_create(f"holdfast-stack-{self._next}", os.MFD_CLOEXEC)
        process = WorkerProcess(self._next, ours, stack_fd)
        self._processes[process.number] = process
        self._request(fork_protocol.ForkWorker(worker=process.number), (theirs.fileno(), stack_fd))
        theirs.close()
        self._loop.add_reader(ours, self._from_worker, process)
        process.reading = True
        return process

    def _request(self, message: fork_protocol.ForkMessage, fds: tuple[int, ...] = ()) -> None:
        if self._server is None:
            return  # it has died; every worker's end is on its way
        try:
            fork_protocol.send(self._server, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            self._loop.call_soon(self._server_died)

    def _from_server(self) -> None:
        while self._server is not None:
            try:
                message, _ = fork_protocol.receive(self._server)
            except BlockingIOError:
                return
            except ConnectionResetError:
                message = None
            match message:
                case None:
                    self._server_died()
                case fork_protocol.Forked():
                    self._forked(message)
                case fork_protocol.NotForked():
                    process = self._processes.pop(message.worker)
                    self._close(process)
                    if process.seat is not None:
                        self._tell(f.ForkFailed(*process.seat, message.detail))
                case fork_protocol.ProcessEnded():
                    self._ended(self._processes[message.worker], message.code, message.signal)
                case _:
                    raise AssertionError(f"the forkserver sent {type(message).__name__}")

    def _forked(self, message: fork_protocol.Forked) -> None:
        process = self._processes[message.worker]
        process.pid = message.pid
        try:
            process.pidfd = os.pidfd_open(message.pid)
        except ProcessLookupError:
            return  # it has ended and been reaped; Ended is the next message
        if process.seat is not None:
            self._tell(f.WorkerForked(*process.seat, process.pid))

    def _ended(self, process: WorkerProcess, code: int | None, number: int | None) -> None:
        self._drain(process)  # what it said before it ended must be heard before its end
        del self._processes[process.number]
        self._close(process)
        if process.seat is None:
            return
        del self._seats[process.seat]
        out_of_memory = False
        if number == signal.SIGKILL and cgroup.memory_kills(self._memory) > self._memory_kills:
            out_of_memory = True
            # The kernel may have killed neighbours too, whose ends come next; but what else it
            # killed must not be taken for the end of a worker much later.
            self._memory_kills += 1
            self._loop.call_later(COMPANY_S, self._forget_memory_kills)
        ended = f.WorkerEnded(*process.seat, code, number, out_of_memory, time.time_ns())
        self._tell(ended)

    def _server_died(self) -> None:
        """Its workers die with it (PDEATHSIG), and nobody can tell us their status any more. A new
        server starts cold; what is asked of it meanwhile waits in its socket."""
        if self._server is None:
            return
        self._loop.remove_reader(self._server)
        self._server.close()
        self._server = None
        lost = list(self._processes.values())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = theirs.fileno()
        self._cold = subprocess.Popen(
            [
                *python_command.start_alike("holdfast.workers.agent.pool.forkserver"),
                str(fd),
                str(os.getpid()),
            ],
            pass_fds=(fd,),
            env={**os.environ, **preload.SINGLE_THREADED},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.attach(ours)
        if self._job is not None:
            self._request(self._job)
        self._mourning = self._loop.create_task(self._mourn(lost))

    async def _mourn(self, lost: list[WorkerProcess]) -> None:
        for process in lost:
            if process.pidfd >= 0:
                await _until_readable(self._loop, process.pidfd)
            self._ended(process, None, signal.SIGKILL)
        self._tell(f.ForkserverDied("it ended; a new one imports torch again"))
        # The dead are our children now (we are their subreaper): do not keep them as zombies.
        with contextlib.suppress(ChildProcessError):
            while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                os.waitpid(-1, os.WNOHANG)

    def _forget_memory_kills(self) -> None:
        self._memory_kills = cgroup.memory_kills(self._memory)

    # -- the wires ----------------------------------------------------------------------------
    def _from_worker(self, process: WorkerProcess) -> None:
        if not self._drain(process) and process.reading:
            self._loop.remove_reader(process.link)
            process.reading = False

    def _drain(self, process: WorkerProcess) -> bool:
        """Hear all that waits; False when the worker has closed its end."""
        while True:
            try:
                message, fd = worker_protocol.receive(process.link)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                # It ended without reading all we sent. The kernel says so once, and first: what it
                # had said before comes after this.
                continue
            except msgspec.MsgspecError as error:
                print(f"worker {process.seat}: {error}", file=sys.stderr)
                continue
            if fd is not None:
                os.close(fd)
            if message is None:
                return False
            if process.seat is not None and isinstance(message, worker_protocol.FromWorker):
                self._tell(f.FromRank(*process.seat, message))

    def _send(
        self, process: WorkerProcess, message: worker_protocol.ToWorker, fd: int | None
    ) -> None:
        try:
            worker_protocol.send(process.link, message, fd)
        except (BrokenPipeError, ConnectionResetError):
            return  # it has ended; the forkserver tells
        except BlockingIOError:
            # Hundreds of unread messages: a stopped process. It will be killed as hung.
            print(f"worker {process.seat} does not read; dropped {message}", file=sys.stderr)

    def _close(self, process: WorkerProcess) -> None:
        if process.reading:
            self._loop.remove_reader(process.link)
            process.reading = False
        process.link.close()
        os.close(process.stack_fd)
        if process.pidfd >= 0:
            os.close(process.pidfd)


async def _until_readable(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
