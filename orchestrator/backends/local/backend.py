"""The local backend: nodes are agents of this machine, forked by the job's node launcher.

The end of a node is reported by the launcher (NodeEnded) and by a pidfd of the agent, which also
works after the launcher has ended. The first report counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.orchestrator import tasks
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol import launcher_protocol as protocol
from holdfast.orchestrator.protocol.environment import CACHE_VARIABLE

from .. import devices
from ..base import NodeGone, NoRoom, Starts, Withholding
from . import node_registry
from .launcher_link import (
    MIN_START_TIMEOUT_S,
    LauncherLink,
    LauncherProcess,
    connect,
    launcher_environment,
)
from .processes import Identity, Watch, identify, watch

LAUNCHER_ATTEMPTS = 3
"""Launchers that may end one after the other without having started a requested node."""

WORKERS_PER_CORE = 16
"""More workers delay each other's heartbeats, and then overload the machine."""


@dataclass(frozen=True)
class LocalTiming:
    ended_wait_s: float = 0.05
    """The pidfd of an agent reports its end just before the launcher reports how it ended. After
    this time without a report of the launcher, the end alone counts."""
    save_delay_s: float = 0.05
    """Seconds from a change of nodes to their record."""
    end_timeout_s: float = 10.0
    """Seconds from SIGKILL to reaped, for the launcher and all nodes together."""


def node_limit(job: TrainingJob) -> int:
    """Nodes of this job that fit on this machine."""
    workers = WORKERS_PER_CORE * len(os.sched_getaffinity(0))
    if (names := devices.gpu_names(job)) is not None:
        workers = min(workers, len(names) // job.spec.resources.num_gpus)
    return workers // job.spec.workers_per_node


@dataclass(frozen=True)
class LocalPaths:
    """Paths of one job."""

    directory: Path
    nodes_file: Path
    socket: Path
    token_file: Path
    endpoint_file: Path
    logs: Path
    cache: Path | None = None
    """Cache of compilers; the same for all jobs."""


class LocalBackend(Withholding):
    """Implements backends.base.Backend."""

    def __init__(
        self,
        job: TrainingJob,
        paths: LocalPaths,
        *,
        launcher_module: str = "holdfast.workers.agent.process.node_launcher",
        timing: LocalTiming | None = None,
    ) -> None:
        self._job = job
        self._paths = paths
        self._module = launcher_module
        self._timing = timing or LocalTiming()
        self._nodes = node_registry.LocalNodeRegistry()
        self._watches: dict[str, Watch] = {}
        self._node_ended = asyncio.Event()
        self._on_node_gone: Callable[[NodeGone], None] = lambda gone: None
        self._link: LauncherLink | None = None
        self._process: LauncherProcess | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closing = False
        self._saving: asyncio.TimerHandle | None = None
        self._earlier: set[str] = set()
        """Nodes whose launcher has ended before them."""
        self._launcher_ends = 0
        """Launchers that ended since the last start of a node."""

    # -- the contract --------------------------------------------------------------------------
    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        self._on_node_gone = on_node_gone
        if self._job.spec.resources.num_gpus:
            await asyncio.to_thread(devices.gpus)  # queries the driver once, which takes time
        self._nodes = node_registry.load(self._paths.nodes_file)
        for node, identity in list(self._nodes.agents.items()):
            self._watch(node, identity)
        self._link = await connect(self._paths.socket, self._new_link, None)
        if self._link is None:
            self._earlier = set(self._nodes.agents)
            self._start_launcher()
            return
        # The previous controller may not have sent these; a second StartNode does nothing.
        for node in sorted(self._nodes.starting):
            self._send_start(node)

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        # One machine, so `avoid` does not matter. Names are never reused.
        self.expect_room()
        gpus, need = devices.gpu_names(self._job), devices.gpus_per_node(self._job)
        if gpus is not None and len(gpus) < need:
            raise NoRoom(f"a node needs {need} GPUs; this machine has {len(gpus)} that can be used")
        first = self._nodes.next_number
        nodes = tuple(f"node-{number}" for number in range(first, first + count))
        self._nodes.next_number += count
        self._nodes.starting.update(nodes)
        try:
            node_registry.save(self._paths.nodes_file, self._nodes)
        except HoldfastError:
            self._nodes.starting.difference_update(nodes)  # none was requested
            self._save_soon()  # the file may name them, and a new controller would start them
            raise
        if self._link is None and self._connecting is None:
            self._start_launcher()
        elif self._link is not None:
            for node in nodes:
                self._send_start(node)
        return nodes

    async def release_node(self, node: str) -> None:
        if node in self._nodes.starting:
            self._nodes.starting.discard(node)
            self._save_soon()
        if self._link is not None:
            self._link.send(protocol.StopNode(node=node))
        if node in self._watches:
            self._watches[node].kill()

    async def list_nodes(self) -> tuple[str, ...]:
        return tuple(sorted({*self._watches, *self._nodes.starting}))

    async def close(self, *, release: bool) -> None:
        self._closing = True
        if self._connecting is not None:
            await tasks.end([self._connecting])
        if release:
            await self._end_everything()
        for process_watch in self._watches.values():
            process_watch.close()
        self._watches.clear()
        self._save()
        if self._link is not None:
            self._link.close()
            await asyncio.wait([self._link.closed], timeout=self._timing.end_timeout_s)

    def node_limit(self) -> int:
        return node_limit(self._job)

    def starts(self) -> Starts:
        """The first nodes wait for their launcher; later ones are forked at once."""
        return Starts(0.0 if self._link is not None else None)

    # -- the launcher --------------------------------------------------------------------------
    def _start_launcher(self) -> None:
        # A stale socket of a killed launcher would refuse every connection.
        self._paths.socket.unlink(missing_ok=True)
        self._process = LauncherProcess(
            self._module,
            self._paths.socket,
            self._paths.logs / "host.log",
            launcher_environment(self._threads(), self._caches() | self._job.spec.env),
            self._paths.directory,
        )
        self._connecting = asyncio.get_running_loop().create_task(self._connect(self._process))

    def _caches(self) -> dict[str, str]:
        if self._paths.cache is None or CACHE_VARIABLE in os.environ:
            return {}
        return {CACHE_VARIABLE: str(self._paths.cache)}

    async def _connect(self, process: LauncherProcess) -> None:
        try:
            timeout_s = max(MIN_START_TIMEOUT_S, self._job.spec.recovery.startup_timeout_s)
            link = await connect(self._paths.socket, self._new_link, process, timeout_s)
        except HoldfastError as error:
            self._connecting = None
            for node in sorted(self._nodes.starting):
                self._ended(node, str(error))
            return
        self._link, self._connecting = link, None
        for node in sorted(self._nodes.starting):
            self._send_start(node)

    def _threads(self) -> int:
        cpu = self._job.spec.resources.cpu
        if cpu is not None:
            return max(1, int(cpu))
        workers = self._job.spec.nodes.max * self._job.spec.workers_per_node
        return max(1, len(os.sched_getaffinity(0)) // workers)

    def _new_link(self) -> LauncherLink:
        return LauncherLink(self._on_message, self._on_closed)

    def _on_message(self, message: protocol.FromLauncher) -> None:
        if isinstance(message, protocol.NodeEnded):
            self._ended(message.node, message.detail)
            return
        for node, pid in message.nodes.items():
            if node in self._watches:
                continue
            identity = identify(pid)
            if identity is not None and self._watch(node, identity):
                self._nodes.agents[node] = identity
                if node in message.devices:
                    self._nodes.devices[node] = message.devices[node]
                self._launcher_ends = 0
                self._nodes.starting.discard(node)
            elif node in self._nodes.starting:
                self._ended(node, "ended at once")
        self._earlier = set(self._nodes.agents) - set(message.nodes)
        self._save_soon()

    def _on_closed(self) -> None:
        """The launcher has ended. Its agents have not: their pidfds would report it."""
        self._link = None
        if self._closing:
            return
        self._launcher_ends += 1
        self._earlier = set(self._nodes.agents)
        if self._nodes.starting and self._launcher_ends < LAUNCHER_ATTEMPTS:
            self._start_launcher()
            return
        for node in sorted(self._nodes.starting):
            self._ended(
                node,
                f"the node launcher ended {self._launcher_ends} times before it started the node",
            )

    def _send_start(self, node: str) -> None:
        assert self._link is not None
        self._link.send(
            protocol.StartNode(
                node=node,
                job=self._job.name,
                slots=self._job.spec.workers_per_node,
                token_file=str(self._paths.token_file),
                endpoint_file=str(self._paths.endpoint_file),
                log_file=str(self._paths.logs / f"agent-{node}.log"),
                devices=self._free_devices(),
                num_devices=devices.gpus_per_node(self._job),
            )
        )

    def _free_devices(self) -> tuple[str, ...] | None:
        """GPUs for new nodes: not those of agents that an earlier launcher started. The launcher
        knows those of its own."""
        names = devices.gpu_names(self._job)
        if names is None:
            return None
        held = {name for node in self._earlier for name in self._nodes.devices.get(node, ())}
        return tuple(name for name in names if name not in held)

    # -- nodes ---------------------------------------------------------------------------------
    def _watch(self, node: str, identity: Identity) -> bool:
        watched = watch(identity, lambda: self._exited(node))
        if watched is None:
            self._nodes.agents.pop(node, None)
            return False
        self._watches[node] = watched
        return True

    def _exited(self, node: str) -> None:
        detail = "its agent's process ended"
        if self._link is None or self._closing:
            self._ended(node, detail)
        else:
            asyncio.get_running_loop().call_later(
                self._timing.ended_wait_s, self._ended, node, detail
            )

    def _ended(self, node: str, detail: str) -> None:
        process_watch = self._watches.pop(node, None)
        if process_watch is None and node not in self._nodes.starting:
            return
        if process_watch is not None:
            process_watch.close()
        self._nodes.starting.discard(node)
        self._nodes.agents.pop(node, None)
        self._nodes.devices.pop(node, None)
        if node in self._earlier:
            self._earlier.discard(node)
            for waiting in sorted(self._nodes.starting) if self._link is not None else ():
                self._send_start(waiting)  # for the GPUs of the node that has ended
        self._node_ended.set()
        if not self._closing:
            self._on_node_gone(NodeGone(node, detail))
        self._save_soon()

    def _save_soon(self) -> None:
        """Save after the callbacks of this change, and once for several changes: it waits for the
        disk. A new controller finds changes that were not saved by itself."""
        if self._saving is None:
            loop = asyncio.get_running_loop()
            self._saving = loop.call_later(self._timing.save_delay_s, self._save)

    def _save(self) -> None:
        if self._saving is None:
            return
        self._saving.cancel()
        self._saving = None
        # A full disk must not hide the event from the controller, which writes it to the journal.
        with contextlib.suppress(HoldfastError):
            node_registry.save(self._paths.nodes_file, self._nodes)

    async def _end_everything(self) -> None:
        self._nodes.starting.clear()
        for process_watch in self._watches.values():
            process_watch.kill()
        launcher_ended = asyncio.Event()
        identity = self._link.launcher if self._link is not None else None
        launcher = watch(identity, launcher_ended.set) if identity is not None else None
        if self._link is not None:
            self._link.send(protocol.StopLauncher())
        elif self._process is not None:
            self._process.kill()  # it does not listen yet, so it has no nodes
        limit_s = self._timing.end_timeout_s
        if launcher is not None and not await tasks.within(limit_s, launcher_ended.wait()):
            launcher.kill()
            await launcher_ended.wait()
        if self._process is not None:
            await self._process.ended
        if not await tasks.within(limit_s, self._agents_ended()):
            nodes = ", ".join(sorted(self._watches))
            raise HoldfastError(f"{nodes}: still running {limit_s:g} s after SIGKILL")
        self._paths.socket.unlink(missing_ok=True)

    async def _agents_ended(self) -> None:
        while self._watches:
            self._node_ended.clear()
            await self._node_ended.wait()
