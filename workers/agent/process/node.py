"""The agent process: gives inputs to the machine and carries out its commands.

The event loop, clock and IO of the agent are here; decisions are in machine/machine.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn, TypeVar, get_args

from msgspec.structs import replace

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.protocol import hardware, strangers
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.environment import PROGRESS_URL, explain_environment
from holdfast.orchestrator.protocol.facts import NodeFacts, StagedShard, state_after
from holdfast.orchestrator.protocol.messages import Endpoint
from holdfast.orchestrator.tasks import TaskSet
from holdfast.workers import worker_protocol
from holdfast.workers.checkpoint.layout import DamagedCheckpoint
from holdfast.workers.worker_protocol import BufferRequest

from ..linux import inventory, output, processes
from ..linux.activity import ActivityMeter
from ..linux.orphans import CLEAN_UP_S
from ..machine import commands, inputs
from ..machine.commands import Command
from ..machine.inputs import Input
from ..machine.machine import AgentMachine
from ..pool import forkserver, stacks
from ..pool.log_forwarder import TO_OUTPUT, LogForwarder
from ..pool.worker_pool import Audited, WorkerPool
from ..storage import memfd, peer_transfer, persist
from ..storage.own_checkpoints import OwnCheckpoints
from ..storage.shared_fetches import Fetched, SharedFetches
from . import process_env
from .connect import Connector, endpoint_in
from .controller_link import ControllerLink, ReservedPort
from .guarded_starts import GuardedStarts, StartSetting
from .progress_server import ProgressServer, without_proxy
from .questions import answer
from .uploaded_code import UploadedCode

R = TypeVar("R")
Kind = Literal["upload", "push", "fetch", "touch"]

HOUSEKEEPING_INTERVAL_S = 10.0
MIN_GRACE_S = 5.0
"""Least grace of a node, even for a job whose workers get none."""
MIN_THREADS = 8
"""Threads of a kind, which wait for disks and networks, not for cores. A node with more workers has
that many threads, since all workers stage and restore at the same moment."""


@dataclass(frozen=True)
class NodeOptions:
    """Options of an agent at its start; the rest comes with Welcome."""

    job: str
    node: str
    slots: int
    token_file: Path
    endpoint_file: Path | None = None
    """JSON file with the controller's address; read at every reconnect."""
    endpoints: tuple[Endpoint, ...] = ()
    """Used without an endpoint file."""
    tls_directory: Path | None = None
    """The job's tls.crt and tls.key; without them the agent uses loopback only."""
    tls_name: str = ""
    """The name in that certificate."""
    bind_address: str = ""
    """Address of the data port; empty: the one at which other nodes reach this one."""
    address: str = ""
    """Address for other nodes; empty: the local address of the controller connection."""
    failure_domain: str = ""
    """Nodes with the same value may be lost together; empty: this node alone."""
    grace_s: float | None = None
    """Time from SIGTERM to SIGKILL; None: spec.recovery.terminationGraceSeconds."""
    log_file: Path | None = None
    """File of the output of this process, opened for appending: the agent bounds it."""


class ThreadPools:
    """One pool for each kind of work that waits for a disk, network or memory. Threads start when
    they are first needed.

    The kinds share no thread: an upload may wait for storage for minutes, and a push to a lost
    buddy for its timeout, while a restore or an allocation must not wait for either.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: int) -> None:
        self._loop = loop
        self._pools = {
            kind: ThreadPoolExecutor(max(MIN_THREADS, slots), thread_name_prefix=f"holdfast-{kind}")
            for kind in get_args(Kind)
        }

    async def run(self, kind: Kind, work: Callable[..., R], *arguments: object) -> R:
        """Run `work` in a thread of this kind's pool; returns or raises what it does."""
        return await self._loop.run_in_executor(self._pools[kind], work, *arguments)


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
        self._memory: dict[int, memfd.Memfd] = {}
        self._fetches = SharedFetches()
        self._workers = WorkerPool(self._loop, self._give)
        self._workers.attach(server)
        self._workers.noted, self._workers.audited = self._noted, self._audited
        self._data = peer_transfer.DataPort(self._credentials, self._on_get, self._on_put)
        file = options.endpoint_file
        where = endpoint_in(file) if file is not None else lambda: options.endpoints
        self._link = ControllerLink(
            Connector(where, self._credentials.client, options.tls_name),
            self._on_link,
            self._received,
            lambda: self._give(inputs.LinkDown()),
        )
        self._ports = ReservedPort()
        self._pools = ThreadPools(self._loop, options.slots)
        self._facts: NodeFacts | None = None
        self._job: TrainingJob | None = None
        self._queue: deque[Input] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._stopped_ranks: tuple[int, ...] = ()
        self._tasks = TaskSet(self._failed)
        self._meter = ActivityMeter()
        self._log_forwarder: LogForwarder | None = None
        self._code = UploadedCode(self._link.send)
        self._own_checkpoints = OwnCheckpoints()
        self._starts = GuardedStarts(self._start, self._give, self._link.send, self._code)
        self._progress: ProgressServer | None = None
        """Server for a script's reports."""
        self._rank_logs: set[Path] = set()
        self.ended: asyncio.Future[commands.EndNode] = self._loop.create_future()

    async def run(self) -> commands.EndNode:
        """Run until the machine ends the node; returns the reason and exit code."""
        self._loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        self._tasks.start(self._link.run())
        self._tasks.start(self._keep_house())
        try:
            return await self.ended
        finally:
            if self._log_forwarder is not None:
                self._log_forwarder.finish()
            self._code.close()

    def _on_sigterm(self) -> None:
        grace_s = self._options.grace_s
        if grace_s is None:
            job = self._job
            wanted_s = job.spec.recovery.termination_grace_s if job else limits.TERMINATION_GRACE_S
            grace_s = max(wanted_s, MIN_GRACE_S)
        self._give(inputs.Terminated(grace_s))

    async def _keep_house(self) -> None:
        """Reap orphans and bound the logs of this node and of its ranks."""
        seen: set[int] = set()
        while True:
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
            seen = processes.reap_strays(seen)
            own = [self._options.log_file] if self._options.log_file is not None else []
            for log in [*own, *self._rank_logs]:
                await asyncio.to_thread(output.rotate, log)

    # -- the machine --------------------------------------------------------------------------
    def _give(self, given: Input) -> None:
        """Inputs that arise while commands are carried out wait in a queue."""
        message = given.message if isinstance(given, inputs.FromRank) else None
        if isinstance(message, BufferRequest) and message.step < 0:
            self._queue.append(self._memory_measured())
        self._queue.append(given)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue:
                for command in self._machine.step(time.monotonic_ns(), self._queue.popleft()):
                    self._carry_out(command)
        finally:
            self._busy = False
        self._set_timer()

    def _received(self, message: m.ToAgent | m.Question | m.CodePart) -> None:
        if isinstance(message, m.CodePart):
            self._code.received(message)
        elif isinstance(message, m.Question):
            self._tasks.start(answer(message, self._workers, self._link.send))
        else:
            self._give(inputs.Received(message))
        if isinstance(message, m.Welcome):
            for checkpoint in self._own_checkpoints.known():
                self._link.send(checkpoint)

    def _memory_measured(self) -> Input:
        limit, available = hardware.memory_bytes(), inventory.available_bytes()
        on_cpu = self._job is not None and not self._job.spec.resources.num_gpus
        held = sum(memory.allocated_bytes for memory in self._memory.values())
        return inputs.MemoryMeasured(limit, available, held, on_cpu)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._machine.next_deadline_ns()
        if due is not None:
            delay_s = max(0, due - time.monotonic_ns()) / 1e9
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        stopped = self._workers.stopped_ranks()
        if stopped != self._stopped_ranks:
            self._stopped_ranks = stopped
            self._give(inputs.StoppedRanks(stopped))
        self._measure()
        self._give(inputs.ClockTick())

    def _measure(self) -> None:
        group = self._machine.group
        if group is None or group.stopped:
            return
        quiet = group.quiet_ranks(time.monotonic_ns())
        pids = {worker.seat.rank: worker.pid for worker in group.alive if worker.pid}
        activity = self._meter.measure(time.monotonic(), pids, quiet)
        if activity is not None:
            self._give(inputs.ActivityMeasured(*activity))

    def _on_link(self, own_address: str) -> None:
        address = self._options.address or own_address
        data_port = self._data.open(self._options.bind_address or address)
        if self._facts is None:
            self._facts = inventory.node_facts(
                slots=self._options.slots,
                address=address,
                data_port=data_port,
                failure_domain=self._options.failure_domain or self._options.node,
            )
        self._facts = replace(self._facts, address=address, data_port=data_port)
        self._give(inputs.LinkUp(self._facts, self._ports.take()))

    # -- commands -----------------------------------------------------------------------------
    def _carry_out(self, command: Command) -> None:
        match command:
            case commands.Send():
                self._link.send(command.message)
            case commands.CloseLink():
                self._link.close(command.detail)
            case commands.Configure():
                self._configure()
            case commands.OfferPort():
                self._give(inputs.PortOffered(self._ports.take()))
            case commands.Note():
                print(command.text, file=sys.stderr)
            case commands.KillNode():
                os.kill(os.getpid(), signal.SIGKILL)
            case commands.EndNode():
                if not self.ended.done():
                    self.ended.set_result(command)
            case commands.MakeBuffer():
                self._make_buffer(command)
            case commands.FreeBuffer():
                del self._memory[command.buffer]
            case commands.SealBuffer():
                self._seal(command)
            case commands.WriteStorage():
                self._tasks.start(self._write(command, self._memory[command.buffer]))
            case commands.PushToBuddy():
                self._tasks.start(self._push(command, self._memory[command.buffer]))
            case commands.FetchFromPeer():
                self._tasks.start(self._fetch(command))
            case _:
                self._command_workers(command)

    def _command_workers(self, command: Command) -> None:
        match command:
            case commands.Fork():
                welcome, job = self._machine.welcome, self._job
                assert welcome is not None and job is not None
                self._starts.begin(command, job, welcome)
            case commands.RefillStandbys():
                self._workers.refill(command.count)
            case commands.Kill():
                if not self._starts.dropped(command.generation, command.rank):
                    self._workers.kill(command)
            case commands.Halt():
                self._workers.halt(command.generation, command.ranks)
            case commands.TakeStacks():
                self._tasks.start(self._take_stacks(command))
            case commands.ToRank():
                fd = None if command.buffer is None else self._memory[command.buffer].fd
                self._workers.send(command.generation, command.rank, command.message, fd)

    def _configure(self) -> None:
        welcome = self._machine.welcome
        assert welcome is not None
        self._job = job_from_mapping(welcome.spec)
        if self._job.spec.entrypoint.recipe is None:
            try:
                self._progress = ProgressServer(self._posted, self._noted_in_thread)
            except OSError as error:
                print(f"frameworks cannot post their progress: {error}", file=sys.stderr)
        process_env.adopt(self._job.spec.env)
        if self._facts is not None and self._facts.cache_directory:
            self._workers.imports.keep_in(self._facts.cache_directory, self._job)
        recipe = self._job.spec.entrypoint.recipe
        of_recipe = recipe.config.preload if recipe is not None else ()
        self._workers.imports.preload = (*of_recipe, *self._job.spec.preload)
        if self._job.spec.learn_preload:
            self._workers.imports.learned(welcome.imports)
        self._workers.configure(welcome.spec, welcome.spec_directory)
        self._give(inputs.JobConfigured(bool(self._workers.imports.known())))

    def _posted(self, seat: tuple[int, int], report: worker_protocol.Reported) -> None:
        """Runs in a thread of the progress server."""
        self._loop.call_soon_threadsafe(self._give, inputs.FromRank(*seat, report))

    def _audited(self, seat: tuple[int, int], report: Audited) -> None:
        if isinstance(report, worker_protocol.CheckpointOpened):
            self._link.send(m.OwnCheckpointRead(generation=seat[0], path=report.path))
            return
        message = self._own_checkpoints.wrote(time.monotonic(), seat, report)
        if message is not None:
            self._link.send(message)

    def _noted_in_thread(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._noted, text)

    def _noted(self, text: str) -> None:
        self._link.send(m.NodeRemarked(text=text))

    def _start(self, fork: commands.Fork, setting: StartSetting) -> None:
        try:
            self._fork(fork, setting)
        except OSError as error:  # no directory for logs, or no descriptor is left
            seat = (fork.membership.generation, fork.seat.rank)
            self._give(inputs.ForkFailed(*seat, str(error)))

    def _fork(self, fork: commands.Fork, setting: StartSetting) -> None:
        welcome, job, facts = self._machine.welcome, self._job, self._facts
        self._fetches.begin(fork.membership.generation)
        assert welcome is not None and job is not None and facts is not None
        logs = ""
        if welcome.log_directory != TO_OUTPUT:
            generation = fork.membership.generation + fork.membership.ahead
            logs = self._log_directory(welcome.log_directory, generation)
        settings = explain_environment(
            job,
            fork.membership,
            fork.seat,
            fork.node_rank,
            facts,
            log_directory=logs,
            job_id=welcome.job_id,
        )
        environment = {variable.name: variable.value for variable in settings}
        environment |= setting.environment
        if self._progress is not None and PROGRESS_URL not in environment:
            seat = (fork.membership.generation, fork.seat.rank)
            environment |= self._progress.environment(*seat)
            environment |= without_proxy({**os.environ, **environment})
        assign = worker_protocol.Assign(
            membership=fork.membership,
            seat=fork.seat,
            node_rank=fork.node_rank,
            environment=environment,
            checkpoint_path=welcome.checkpoint_path,
            node=self._options.node,
            spec_directory=setting.directory,
            stage_every_steps=fork.stage_every_steps,
            twins=len(fork.twins),
            log_file=f"{logs}/rank-{fork.seat.rank:05d}.log" if logs else "",
        )
        if logs:
            self._rank_logs.add(Path(assign.log_file))
        if welcome.log_directory != TO_OUTPUT:
            self._workers.assign(assign, None, fork.kept)
            return
        forwarder = self._log_forwarder = self._log_forwarder or LogForwarder()
        self._workers.printed = forwarder.last_output
        output = forwarder.pipe(fork.membership.generation, fork.seat.rank)
        self._workers.assign(assign, output, fork.kept)
        os.close(output)

    def _log_directory(self, parent: str, generation: int) -> str:
        """The directory for the logs of a generation's workers; empty where it cannot be made: they
        train without logs. Directories of old generations are deleted."""
        directory = Path(parent, f"gen-{generation:04d}")
        self._rank_logs = {log for log in self._rank_logs if log.parent == directory}
        if not directory.exists():
            for old in output.old_generations(directory):
                shutil.rmtree(old, ignore_errors=True)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"{directory}: cannot be made ({error.strerror}); its workers train without logs"
            self._link.send(m.AgentEvent(text=text))
            return ""
        return str(directory)

    def _make_buffer(self, make: commands.MakeBuffer) -> None:
        memory = self._memory[make.buffer] = memfd.Memfd(f"{make.buffer}", make.num_bytes)
        self._tasks.start(self._touch(memory))

    def _seal(self, command: commands.SealBuffer) -> None:
        try:
            memfd.seal(self._memory[command.buffer].fd)
        except DamagedCheckpoint as error:  # its readers refuse it
            print(f"staging buffer {command.buffer}: {error}", file=sys.stderr)

    # -- work in threads ----------------------------------------------------------------------
    async def _touch(self, memory: memfd.Memfd) -> None:
        try:
            await self._pools.run("touch", memory.touch)
        except OSError as error:
            text = f"staging buffer of {memory.num_bytes} bytes: {error.strerror}"
            print(text, file=sys.stderr)
            self._link.send(m.AgentEvent(text=text))

    async def _take_stacks(self, command: commands.TakeStacks) -> None:
        generation = command.generation
        by_rank = {rank: self._workers.find(generation, rank) for rank in command.ranks}
        alive = {rank: process for rank, process in by_rank.items() if process is not None}
        take = stacks.take if command.by_signal else stacks.inspect
        taken = await take(alive, partial(self._workers.inspect, generation))
        self._give(inputs.StacksTaken(generation, taken, command.by_signal))

    async def _write(self, command: commands.WriteStorage, memory: memfd.Memfd) -> None:
        assert self._machine.welcome is not None
        path = self._machine.welcome.checkpoint_path
        done = inputs.WriteDone(command.buffer, command.staged, command.file)
        begin = time.monotonic()
        try:
            where = (path, command.directory, command.file)
            written = await self._pools.run(
                "upload", persist.write_shard, memory, command.staged.num_bytes, *where
            )
            if command.mesh is not None:
                note = persist.note_of(command.staged, command.file, written, command.mesh)
                await self._pools.run("upload", persist.write_note, note, *where)
        except Exception as error:  # any store's library may raise anything; the error is reported
            detail = f"{type(error).__name__}: {error}"
            self._give(replace(done, detail=detail))
        else:
            seconds = time.monotonic() - begin
            sums = {"checksum": written.checksum, "coverage": written.coverage}
            self._give(replace(done, **sums, seconds=seconds))

    async def _push(self, command: commands.PushToBuddy, memory: memfd.Memfd) -> None:
        target = (command.address, command.port, self._credentials, command.staged, memory)
        share = self._job.spec.checkpoint.memory.buddy_network_percent / 100 if self._job else 1.0
        detail, begin = "", time.monotonic()
        try:
            await self._pools.run("push", peer_transfer.push, *target, share, command.confirmed)
        except peer_transfer.PeerError as error:
            detail = f"{command.node}: {error}"
        seconds = time.monotonic() - begin
        self._give(inputs.PushDone(command.buffer, detail, seconds))

    async def _fetch(self, command: commands.FetchFromPeer) -> None:
        shard, fd = command.wanted.shard, None
        fetched = await self._fetches.get(
            command.generation, shard, command.readers, lambda: self._fetch_from_any(command)
        )
        if isinstance(fetched, str):
            message: worker_protocol.ToWorker = worker_protocol.NoShard(shard=shard, detail=fetched)
        else:
            message = worker_protocol.Shard(shard=shard, num_bytes=fetched.num_bytes)
            fd = fetched.fd
        self._workers.send(command.generation, command.rank, message, fd)

    async def _fetch_from_any(self, command: commands.FetchFromPeer) -> Fetched:
        details = []
        for source in command.sources:
            where = (source.address, source.data_port, self._credentials, command.wanted)
            try:
                return await self._pools.run("fetch", peer_transfer.fetch, *where)
            except peer_transfer.PeerError as error:
                details.append(f"{source.node}: {error}")
        return "; ".join(details)

    # -- other agents -------------------------------------------------------------------------
    def _on_get(self, get: peer_transfer.Get) -> peer_transfer.Answer:
        lent = self._machine.tiers.lend(get.step, get.generation, get.shard)
        if lent is None:
            return f"shard {get.shard} of {state_after(get.step)} is not in this node's memory"
        buffer, staged = lent
        return self._hold(buffer, staged, lambda ok: self._give(inputs.ServeDone(buffer)))

    def _on_put(self, put: peer_transfer.Put) -> peer_transfer.Answer:
        if self._machine.tiers.memory.current is None:
            self._give(self._memory_measured())
        buffer, before = self._machine.accept_copy(put.staged, put.confirmed)
        for command in before:
            self._carry_out(command)
        if isinstance(buffer, str):
            return buffer
        return self._hold(buffer, put.staged, lambda ok: self._give(inputs.CopyDone(buffer, ok)))

    def _hold(
        self, buffer: int, staged: StagedShard, done: Callable[[bool], None]
    ) -> peer_transfer.TransferBuffer:
        memory = self._memory[buffer]
        return peer_transfer.TransferBuffer(memory, staged.num_bytes, staged.num_shards, done)

    def _failed(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


def run_node(options: NodeOptions) -> NoReturn:
    """Become an agent: fork the forkserver while this process has no threads, then run. Never
    returns; the forkserver, the workers and the memory end with this process."""
    output.never_fail()
    strangers.raise_descriptor_limit()
    processes.adopt_orphans()
    processes.name_process(options.node)
    child, server = forkserver.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        end = asyncio.run(_main(options, server))
        code = end.code
        print(f"node {options.node} ends: {end.detail}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        server.close()
        _wait_for(child)
        output.flush()
        os._exit(code)


def _wait_for(child: int) -> None:
    """The forkserver ends what is left of the workers; it would die with this process."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(child)
        select.select([pidfd], [], [], 1.0 + CLEAN_UP_S)


async def _main(options: NodeOptions, server: socket.socket) -> commands.EndNode:
    """Make the agent where its event loop runs, which it needs from the start."""
    return await AgentProcess(options, server).run()
