"""Maps worker processes to ranks, through the forkserver and a socket to each worker.

Invariant: all messages of a worker are delivered before its exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from holdfast.orchestrator.protocol import cgroup, python_command
from holdfast.orchestrator.protocol.facts import CRASH_SIGNALS, USAGE_CODE
from holdfast.workers import worker_protocol, worker_transport

from ..linux import processes
from ..machine import commands, inputs
from ..machine.inputs import Input
from . import fork_protocol, last_output, preload
from .learned_imports import LearnedImports
from .stack_activity import Inspection

MAX_COMMAND_CHARS = 200
"""Shown of a program's command line."""
OOM_KILLS_S = 2.0
"""Wait for the exits of other workers that the kernel killed for the same lack of memory."""

_CHILD_KILLED = re.compile("killed by signal: Killed|terminated abruptly")
"""Errors of torch's DataLoader and concurrent.futures about a killed process of theirs."""

Seat = tuple[int, int]
"""(generation, rank)."""


@dataclass
class WorkerProcess:
    """One worker process, from the request to fork it until it is reaped."""

    number: int
    link: socket.socket
    stack_fd: int
    asked: socket.socket
    """Our end of the inspection socket."""
    pid: int = 0
    pidfd: int = -1
    seat: Seat | None = None
    """None: a standby."""
    local_rank: int = -1
    """Local rank that a standby is prepared for."""
    imported: bool = False
    """True for a standby that has imported what the script imports."""
    signalled: bool = False
    was_ending: bool = False
    """True if the process was ending when our first signal was sent."""
    log_file: str = ""
    stack_text: str = ""
    """Text of its newest StackReport."""
    answer: asyncio.Future[Inspection] | None = None
    """Result of the inspection under way."""


Audited = worker_protocol.CheckpointWritten | worker_protocol.CheckpointOpened


class WorkerPool:
    """All worker processes of a node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, give: Callable[[Input], None]) -> None:
        self._loop = loop
        self._give = give
        self._server: socket.socket | None = None
        self._job: fork_protocol.ConfigureForkserver | None = None
        self._processes: dict[int, WorkerProcess] = {}
        self._seats: dict[Seat, WorkerProcess] = {}
        self._next = 0
        self._awaits_standbys = False
        self._memory = cgroup.find("memory")
        self._memory_kills = cgroup.memory_kills(self._memory)
        """Kills of the kernel that were attributed to workers."""
        self._cold: subprocess.Popen[bytes] | None = None
        self._collecting: asyncio.Task[None] | None = None
        self.imports = LearnedImports()
        self.printed: Callable[[int], str] = lambda rank: ""
        """The last output of a rank without a log file."""
        self.noted: Callable[[str], None] = lambda text: None
        """A worker's sentence for the job's events."""
        self.audited: Callable[[Seat, Audited], None] = lambda seat, message: None
        """A worker writes or reads a checkpoint of the script's own."""

    def attach(self, server: socket.socket) -> None:
        server.setblocking(False)
        self._server = server
        self._loop.add_reader(server, self._from_server)

    def configure(self, spec: dict[str, Any], directory: str) -> None:
        self._job = fork_protocol.ConfigureForkserver(spec=spec, directory=directory)
        self._request(self._job)

    # -- commands -----------------------------------------------------------------------------
    def refill(self, count: int) -> None:
        """Fork standbys until there are `count`."""
        standbys = [process for process in self._processes.values() if process.seat is None]
        prepared = {process.local_rank for process in standbys}
        lacking = [local_rank for local_rank in range(count) if local_rank not in prepared]
        for local_rank in lacking[: max(0, count - len(standbys))]:
            self._fork(local_rank)
        self._awaits_standbys = True
        self._check_standbys()

    def _check_standbys(self) -> None:
        """Report once, after a refill, that all of them are ready."""
        waiting = any(p.seat is None and not p.imported for p in self._processes.values())
        if self._awaits_standbys and not waiting:
            self._awaits_standbys = False
            self._give(inputs.StandbysReady())

    def assign(
        self, assign: worker_protocol.Assign, output: int | None, kept: Seat | None = None
    ) -> None:
        """Send Assign and `output` to the worker that was kept in the seat `kept`, else to a
        standby, or to a new worker."""
        seat = (assign.membership.generation, assign.seat.rank)
        held = None if kept is None else self._seats.pop(kept, None)
        process = held or self._unassigned(assign)
        process.seat, process.log_file = seat, assign.log_file
        self._seats[seat] = process
        self._send(process, assign, output)
        if process.pid:
            self._give(inputs.WorkerForked(*seat, process.pid))

    def _unassigned(self, assign: worker_protocol.Assign) -> WorkerProcess:
        standbys = [p for p in self._processes.values() if p.seat is None]
        if self.imports.known():
            # One that is not forked yet may wait longer for a template than a worker with a rank.
            standbys = [p for p in standbys if p.pid]
        # Standbys that are already forked come first: they may be warm; then the one that may have
        # opened the rank's GPU.
        wanted = assign.seat.local_rank
        process = min(
            standbys, key=lambda p: (p.pid == 0, p.local_rank != wanted, p.number), default=None
        )
        return process or self._fork()

    def halt(self, generation: int, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            if (process := self._seats.get((generation, rank))) is not None:
                with contextlib.suppress(OSError):
                    process.asked.send(worker_protocol.HALT)

    def kill(self, command: commands.Kill) -> None:
        process = self._seats.get((command.generation, command.rank))
        if process is None:
            return
        # Peers may notice a death long before its parent does.
        if process.pid and not process.signalled and not command.injected:
            process.signalled = True
            process.was_ending = processes.is_ending(process.pid)
        self._request(fork_protocol.SignalWorker(worker=process.number, signal=command.signal))

    def send(
        self, generation: int, rank: int, message: worker_protocol.ToWorker, fd: int | None
    ) -> None:
        process = self._seats.get((generation, rank))
        if process is not None:
            self._send(process, message, fd)

    async def inspect(self, generation: int, rank: int, timeout_s: float) -> Inspection:
        """Ask a worker for its stacks and its collectives; what it has reported after `timeout_s`.
        A program without Holdfast has no thread that answers."""
        process = self._seats.get((generation, rank))
        if process is None:
            return Inspection()
        if process.answer is None or process.answer.done():
            process.answer, process.stack_text = self._loop.create_future(), ""
            with contextlib.suppress(OSError):
                process.asked.send(worker_protocol.ASK_STACK)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(process.answer)
        except TimeoutError:
            return Inspection(process.stack_text)

    def find(self, generation: int, rank: int) -> tuple[int, int] | None:
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
    def _fork(self, local_rank: int = -1) -> WorkerProcess:
        self._next += 1
        ours, theirs = worker_transport.pair()
        ours.setblocking(False)
        stack_fd = os.memfd_create(f"holdfast-stack-{self._next}", os.MFD_CLOEXEC)
        asked, asks = worker_transport.pair()
        asked.setblocking(False)
        process = WorkerProcess(self._next, ours, stack_fd, asked, local_rank=local_rank)
        self._processes[process.number] = process
        fork = fork_protocol.ForkWorker(
            worker=process.number,
            local_rank=local_rank,
            modules=self.imports.known(),
            left_out=self.imports.left_out,
        )
        self._request(fork, (theirs.fileno(), stack_fd, asks.fileno()))
        theirs.close()
        asks.close()
        self._loop.add_reader(ours, self._from_worker, process)
        return process

    def _request(self, message: fork_protocol.ForkMessage, fds: tuple[int, ...] = ()) -> None:
        if self._server is None:
            return  # the forkserver has died; the exits of all workers follow
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
                    self._check_standbys()
                    if process.seat is not None:
                        self._give(inputs.ForkFailed(*process.seat, message.detail))
                case fork_protocol.ImportLeftOut():
                    self.imports.leave_out(message.modules)
                case fork_protocol.ProcessEnded():
                    self._note_killed(message)
                    self._ended(self._processes[message.worker], message.code, message.signal)
                case _:
                    raise AssertionError(f"the forkserver sent {type(message).__name__}")

    def _note_killed(self, ended: fork_protocol.ProcessEnded) -> None:
        """Name what a worker that ended well had left running: perhaps an upload."""
        seat = self._processes[ended.worker].seat
        if seat is None or ended.code != 0 or not ended.killed:
            return
        first, more = ended.killed[0][:MAX_COMMAND_CHARS], len(ended.killed) - 1
        programs = f"`{first}`{f' and {more} more' if more else ''}"
        self.noted(f"rank {seat[1]} has ended, with its background processes: {programs}")

    def _forked(self, message: fork_protocol.Forked) -> None:
        process = self._processes[message.worker]
        process.pid = message.pid
        try:
            process.pidfd = os.pidfd_open(message.pid)
        except ProcessLookupError:
            return  # the worker was reaped; ProcessEnded is the next message
        if process.seat is not None:
            self._give(inputs.WorkerForked(*process.seat, process.pid))

    def _ended(self, process: WorkerProcess, code: int | None, number: int | None) -> None:
        self._drain(process)  # its messages come before its exit
        del self._processes[process.number]
        self._close(process)
        if process.seat is None:
            self._check_standbys()
            return
        del self._seats[process.seat]
        out_of_memory = False
        if number == signal.SIGKILL and cgroup.memory_kills(self._memory) > self._memory_kills:
            out_of_memory = True
            # The kernel may have killed other workers too, whose exits come next. Kills of other
            # processes must not be attributed to a worker that ends much later.
            self._memory_kills += 1
            self._loop.call_later(OOM_KILLS_S, self._forget_memory_kills)
        crash = None
        if number in CRASH_SIGNALS:
            crash = last_output.crash(self._last_output(process))
        elif code == USAGE_CODE:
            crash = last_output.usage(self._last_output(process))
        wall_ns, early = time.time_ns(), process.was_ending
        self._give(
            inputs.WorkerEnded(*process.seat, code, number, out_of_memory, wall_ns, crash, early)
        )

    def _last_output(self, process: WorkerProcess) -> str:
        """The end of what the worker has printed."""
        if process.log_file:
            return last_output.tail(process.log_file)
        return self.printed(process.seat[1]) if process.seat is not None else ""

    def _server_died(self) -> None:
        """The workers die with the forkserver (PDEATHSIG) and their exit status is lost. A new
        forkserver imports torch again; requests wait in its socket meanwhile."""
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
        self._collecting = self._loop.create_task(self._collect_exits(lost))

    async def _collect_exits(self, lost: list[WorkerProcess]) -> None:
        for process in lost:
            if process.pidfd >= 0:
                await _until_readable(self._loop, process.pidfd)
            self._ended(process, None, signal.SIGKILL)
        self._give(inputs.ForkserverDied("it ended; a new one imports torch again"))
        # The dead workers are our children now (subreaper): do not keep them as zombies.
        with contextlib.suppress(ChildProcessError):
            while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                os.waitpid(-1, os.WNOHANG)

    def _forget_memory_kills(self) -> None:
        self._memory_kills = cgroup.memory_kills(self._memory)

    # -- sockets ------------------------------------------------------------------------------
    def _from_worker(self, process: WorkerProcess) -> None:
        if not self._drain(process):
            self._loop.remove_reader(process.link)

    def _drain(self, process: WorkerProcess) -> bool:
        """Receive all waiting messages; False when the worker has closed its end."""
        while True:
            try:
                message, fd = worker_transport.receive(process.link)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                # The worker ended with unread messages of ours. The kernel reports that once,
                # before the worker's own messages.
                continue
            except msgspec.MsgspecError as error:
                print(f"worker {process.seat}: {error}", file=sys.stderr)
                continue
            if fd is not None:
                os.close(fd)
            if message is None:
                return False
            if isinstance(message, worker_protocol.StackReport):
                process.stack_text = message.text
            elif isinstance(message, worker_protocol.CollectivesReport):
                if process.answer is not None and not process.answer.done():
                    process.answer.set_result(Inspection(process.stack_text, message.groups))
            elif isinstance(message, worker_protocol.StandbyImported):
                process.imported = True
                self._check_standbys()
            elif isinstance(message, worker_protocol.Noted):
                self.noted(message.text)
            elif isinstance(message, Audited):
                if process.seat is not None:
                    self.audited(process.seat, message)
            elif process.seat is not None and isinstance(message, worker_protocol.FromWorker):
                if isinstance(message, worker_protocol.Failed):
                    message = self._received(message)
                elif isinstance(message, worker_protocol.ImportsReported):
                    self.imports.learned(message.modules)
                self._give(inputs.FromRank(*process.seat, message))

    def _received(self, failed: worker_protocol.Failed) -> worker_protocol.Failed:
        failed = structs.replace(failed, at_ns=time.time_ns())
        killed = cgroup.memory_kills(self._memory) > self._memory_kills
        if not (killed and _CHILD_KILLED.search(failed.message)):
            return failed
        self._forget_memory_kills()
        why = f"{failed.message} (the kernel killed it, because memory ran out)"
        return structs.replace(failed, message=why, out_of_memory=True)

    def _send(
        self, process: WorkerProcess, message: worker_protocol.ToWorker, fd: int | None
    ) -> None:
        try:
            worker_transport.send(process.link, message, fd)
        except (BrokenPipeError, ConnectionResetError):
            return  # the worker has ended; the forkserver reports it
        except BlockingIOError:
            # Hundreds of unread messages: the process is stopped and will be killed as hung.
            print(
                f"worker {process.seat} does not read its socket; dropped {message}",
                file=sys.stderr,
            )

    def _close(self, process: WorkerProcess) -> None:
        self._loop.remove_reader(process.link)
        if process.answer is not None and not process.answer.done():
            process.answer.set_result(Inspection(process.stack_text))
        process.link.close()
        process.asked.close()
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
