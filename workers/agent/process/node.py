"""The agent process: feeds the machine with facts and carries out what it wants.

Owns: the event loop of a node, and the only clock and IO of the agent. Must not: decide anything;
machine.py does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from msgspec.structs import replace

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.environment import worker_environment
from holdfast.orchestrator.protocol.facts import NodeFacts, StagedShard
from holdfast.orchestrator.protocol.messages import Endpoint
from holdfast.workers import worker_protocol

from ..linux import inventory, processes
from ..machine import inputs as f
from ..machine.machine import AgentMachine
from ..pool import forkserver, stacks
from ..pool.log_forwarder import TO_OUTPUT, LogForwarder
from ..pool.worker_pool import WorkerPool
from ..storage import memfd, peer_transfer, persist
from . import process_env
from .connect import Connector, endpoint_in
from .controller_link import ControllerLink, ReservedPort
from .thread_pools import ThreadPools

REAP_EVERY_S = 10.0
MIN_GRACE_S = 5.0
"""A job whose workers get no time to end still gives its nodes some."""


@dataclass(frozen=True)
class NodeOptions:
    """What an agent must be told at its start; the rest comes with Welcome."""

    job: str
    node: str
    slots: int
    token_file: Path
    endpoint_file: Path | None = None
    """Where the controller is; read at every reconnect."""
    endpoints: tuple[Endpoint, ...] = ()
    """Used where there is no file."""
    tls_directory: Path | None = None
    """The job's tls.crt and tls.key; without them nothing is dialled or served beyond loopback."""
    tls_name: str = ""
    """The name in that certificate."""
    bind_address: str = ""
    """Where the data port listens; empty: on all interfaces."""
    address: str = ""
    """Where other nodes reach this one; empty: the address that the controller is dialled from."""
    failure_domain: str = ""
    """What this node may be lost together with; empty: it stands alone."""
    grace_s: float | None = None
    """From SIGTERM to SIGKILL; None: as the job's spec says for its workers."""


class AgentProcess:
    """One agent."""

    def __init__(self, options: NodeOptions, server: socket.socket) -> None:
        self._options = options
        token = options.token_file.read_text(encoding="ascii").strip()
        self._credentials = peer_transfer.credentials(
            token, options.tls_directory, options.tls_name
        )
        self._loop = asyncio.get_running_loop()
        self._machine = AgentMachine(
            job=options.job, node=options.node, token=token, slots=options.slots
        )
        self._memory = memfd.MemfdPool()
        self._crew = WorkerPool(self._loop, self._give)
        self._crew.attach(server)
        self._data = peer_transfer.DataPort(
            self._credentials, self._on_get, self._on_put, address=options.bind_address
        )
        file = options.endpoint_file
        where = endpoint_in(file) if file is not None else lambda: options.endpoints
        self._link = ControllerLink(
            Connector(where, self._credentials.client, options.tls_name),
            self._on_link,
            lambda message: self._give(f.Received(message)),
            lambda: self._give(f.LinkDown()),
        )
        self._ports = ReservedPort()
        self._pools = ThreadPools(self._loop, options.slots)
        self._facts: NodeFacts | None = None
        self._job: TrainingJob | None = None
        self._queue: deque[f.Input] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._stopped_ranks: tuple[int, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions: dict[int, asyncio.Future[f.Output]] = {}
        self._next_question = 0
        self._echo: LogForwarder | None = None
        self._crowded = False
        self.ended: asyncio.Future[str] = self._loop.create_future()

    async def run(self) -> str:
        """Until the machine ends the node; returns why."""
        self._loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        self._spawn(self._data.run())
        self._spawn(self._link.run())
        self._spawn(self._reap_orphans())
        try:
            return await self.ended
        finally:
            if self._echo is not None:
                self._echo.finish()

    def _on_sigterm(self) -> None:
        grace_s = self._options.grace_s
        if grace_s is None:
            job = self._job
            asked = job.spec.recovery.termination_grace_s if job else limits.TERMINATION_GRACE_S
            grace_s = max(asked, MIN_GRACE_S)
        self._give(f.Terminated(grace_s))

    async def _reap_orphans(self) -> None:
        seen: set[int] = set()
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            seen = processes.reap_strays(seen)

    # -- the machine --------------------------------------------------------------------------
    def _give(self, given: f.Input) -> None:
        """Facts may come up while commands are carried out: they wait their turn."""
        self._queue.append(given)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue:
                for output in self._machine.step(time.monotonic_ns(), self._queue.popleft()):
                    self._carry_out(output)
        finally:
            self._busy = False
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._machine.next_deadline_ns()
        if due is not None:
            delay_s = max(0, due - time.monotonic_ns()) / 1e9
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        stopped = self._crew.stopped_ranks()
        if stopped != self._stopped_ranks:
            self._stopped_ranks = stopped
            self._give(f.StoppedRanks(stopped))
        self._give(f.ClockTick())

    def _on_link(self, own_address: str) -> None:
        address = self._options.address or own_address
        if self._facts is None:
            self._facts = inventory.node_facts(
                slots=self._options.slots,
                address=address,
                data_port=self._data.port,
                failure_domain=self._options.failure_domain or self._options.node,
            )
        self._facts = replace(self._facts, address=address)
        self._give(f.LinkUp(self._facts, self._ports.take()))

    # -- commands -----------------------------------------------------------------------------
    def _carry_out(self, output: f.Output) -> None:
        match output:
            case f.Send():
                self._link.send(output.message)
            case f.CloseLink():
                self._link.close(output.detail)
            case f.Configure():
                self._configure()
            case f.Fork():
                try:
                    self._fork(output)
                except OSError as error:  # no room for logs, or no descriptor is left
                    seat = (output.membership.generation, output.seat.rank)
                    self._give(f.ForkFailed(*seat, str(error)))
            case f.Kill():
                self._crew.kill(output.generation, output.rank, output.signal)
            case f.TakeStacks():
                self._spawn(self._take_stacks(output))
            case f.OfferPort():
                self._give(f.PortOffered(self._ports.take()))
            case f.ToRank():
                fd = None if output.buffer is None else self._memory.fd(output.buffer)
                self._crew.send(output.generation, output.rank, output.message, fd)
            case f.MakeBuffer():
                self._make_buffer(output)
            case f.FreeBuffer():
                self._memory.free(output.buffer)
            case f.WriteStorage():
                self._spawn(self._write(output, self._memory.copy_of_fd(output.buffer)))
            case f.PushToBuddy():
                self._spawn(self._push(output, self._memory.copy_of_fd(output.buffer)))
            case f.FetchFromPeer():
                self._spawn(self._fetch(output))
            case f.AcceptCopy() | f.RefuseCopy():
                self._answer(output.copy_id, output)
            case f.ServePeer() | f.RefusePeer():
                self._answer(output.request_id, output)
            case f.Note():
                print(output.text, file=sys.stderr)
            case f.RefillStandbys():
                self._crew.refill(output.count)
            case f.KillNode():
                os.kill(os.getpid(), signal.SIGKILL)
            case f.EndNode():
                if not self.ended.done():
                    self.ended.set_result(output.detail)

    def _configure(self) -> None:
        welcome = self._machine.welcome
        assert welcome is not None
        self._job = job_from_mapping(welcome.spec)
        process_env.adopt(self._job.spec.env)
        self._crew.configure(welcome.spec, welcome.spec_directory)

    def _fork(self, fork: f.Fork) -> None:
        welcome, job, facts = self._machine.welcome, self._job, self._facts
        assert welcome is not None and job is not None and facts is not None
        logs = ""
        if welcome.log_directory != TO_OUTPUT:
            logs = f"{welcome.log_directory}/gen-{fork.membership.generation:04d}"
            Path(logs).mkdir(parents=True, exist_ok=True)
        environment = worker_environment(
            job, fork.membership, fork.seat, fork.node_rank, facts, log_directory=logs
        )
        assign = worker_protocol.Assign(
            membership=fork.membership,
            seat=fork.seat,
            node_rank=fork.node_rank,
            environment=environment,
            checkpoint_path=welcome.checkpoint_path,
            node=self._options.node,
            spec_directory=welcome.spec_directory,
            log_file=f"{logs}/rank-{fork.seat.rank:05d}.log" if logs else "",
        )
        if logs:
            self._crew.seat(assign, None)
            return
        self._echo = self._echo or LogForwarder()
        output = self._echo.pipe(f"[rank {fork.seat.rank}] ")
        self._crew.seat(assign, output)
        os.close(output)

    def _make_buffer(self, make: f.MakeBuffer) -> None:
        self._memory.make(make.buffer, make.num_bytes)
        known = self._facts.memory_bytes if self._facts else 0
        crowding = memfd.crowding(self._memory.total_bytes, known)
        if crowding and not self._crowded:
            self._crowded = True
            print(crowding, file=sys.stderr)
            self._link.send(m.AgentEvent(text=crowding))
        fd = self._memory.copy_of_fd(make.buffer)
        self._spawn(self._touch(fd, make.num_bytes))

    # -- work in threads ----------------------------------------------------------------------
    async def _touch(self, fd: int, num_bytes: int) -> None:
        try:
            await self._pools.run("touch", memfd.touch, fd, num_bytes)
        except OSError as error:
            print(f"staging buffer of {num_bytes} bytes: {error}", file=sys.stderr)

    async def _take_stacks(self, order: f.TakeStacks) -> None:
        found = {rank: self._crew.where(order.generation, rank) for rank in order.ranks}
        alive = {rank: where for rank, where in found.items() if where is not None}
        self._give(f.StacksTaken(order.generation, await stacks.take(alive)))

    async def _write(self, order: f.WriteStorage, fd: int) -> None:
        assert self._machine.welcome is not None
        path = self._machine.welcome.checkpoint_path
        done = f.WriteDone(order.buffer, order.staged, order.file)
        begin = time.monotonic()
        try:
            where = (path, order.directory, order.file)
            checksum = await self._pools.run(
                "upload", persist.write_shard, fd, order.staged.num_bytes, *where
            )
        except Exception as error:  # any store's library may raise anything; the job hears of it
            detail = f"{type(error).__name__}: {error}"
            self._give(replace(done, detail=detail))
        else:
            seconds = time.monotonic() - begin
            self._give(replace(done, checksum=checksum, seconds=seconds))

    async def _push(self, order: f.PushToBuddy, fd: int) -> None:
        target = (order.address, order.port, self._credentials, order.staged, fd)
        detail = ""
        try:
            await self._pools.run("push", peer_transfer.push, *target)
        except peer_transfer.PeerError as error:
            detail = f"{order.node}: {error}"
        self._give(f.PushDone(order.buffer, detail))

    async def _fetch(self, order: f.FetchFromPeer) -> None:
        shard, details = order.wanted.shard, []
        for source in order.sources:
            where = (source.address, source.data_port, self._credentials, order.wanted)
            try:
                fd, num_bytes = await self._pools.run("fetch", peer_transfer.fetch, *where)
            except peer_transfer.PeerError as error:
                details.append(f"{source.node}: {error}")
                continue
            found = worker_protocol.Shard(shard=shard, num_bytes=num_bytes)
            self._crew.send(order.generation, order.rank, found, fd)
            os.close(fd)
            return
        missing = worker_protocol.NoShard(shard=shard, detail="; ".join(details))
        self._crew.send(order.generation, order.rank, missing, None)

    # -- other agents -------------------------------------------------------------------------
    async def _on_get(self, get: peer_transfer.Get) -> peer_transfer.Answer:
        number = self._question()
        answer = await self._ask(number, f.PeerAsked(number, get.step, get.generation, get.shard))
        if not isinstance(answer, f.ServePeer):
            assert isinstance(answer, f.RefusePeer)
            return answer.detail
        return self._hold(answer.buffer, answer.staged, lambda ok: self._give(f.ServeDone(number)))

    async def _on_put(self, put: peer_transfer.Put) -> peer_transfer.Answer:
        number = self._question()
        answer = await self._ask(number, f.CopyOffered(number, put.staged))
        if not isinstance(answer, f.AcceptCopy):
            assert isinstance(answer, f.RefuseCopy)
            return answer.detail
        return self._hold(answer.buffer, put.staged, lambda ok: self._give(f.CopyDone(number, ok)))

    def _hold(
        self, buffer: int, staged: StagedShard, done: Callable[[bool], None]
    ) -> peer_transfer.Hold:
        fd = self._memory.copy_of_fd(buffer)
        return peer_transfer.Hold(fd, staged.num_bytes, staged.num_shards, done)

    def _question(self) -> int:
        self._next_question += 1
        return self._next_question

    async def _ask(self, number: int, question: f.Input) -> f.Output:
        answer: asyncio.Future[f.Output] = self._loop.create_future()
        self._questions[number] = answer
        self._give(question)
        return await answer

    def _answer(self, number: int, output: f.Output) -> None:
        self._questions.pop(number).set_result(output)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.ended.done():
            self.ended.set_exception(task.exception() or AssertionError())


def run_node(options: NodeOptions) -> NoReturn:
    """Become an agent: fork the forkserver while this process is pristine, then serve. Never
    returns; the forkserver, the workers and the memory go with this process."""
    processes.adopt_orphans()
    processes.name_process(options.node)
    _, server = forkserver.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 0
    try:
        detail = asyncio.run(_main(options, server))
        print(f"node {options.node} ends: {detail}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


async def _main(options: NodeOptions, server: socket.socket) -> str:
    return await AgentProcess(options, server).run()
