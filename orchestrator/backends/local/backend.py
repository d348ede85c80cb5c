"""The local backend: nodes are agents of this machine, forked by the job's machine host.

Owns: the host's life, node names, and noticing that a node ended. Must not: talk to agents; they
dial in to the controller by themselves.

A node is known to have ended from two sides: the host's NodeEnded, and a pidfd on the agent, which
also works when the host has died. Whichever comes first counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol import launcher_protocol as protocol

from ..base import NodeGone, NoRoom, Starts
from . import devices, node_registry
from .launcher_link import LauncherLink, LauncherProcess, connect, host_environment
from .processes import Identity, Watch, identify, watch

NEWS_WAIT_S = 0.05
"""The kernel tells of an agent's end a moment before the host tells how it ended; when the host
says nothing for this long, the end alone must do."""

SAVE_S = 0.05
"""From news of nodes to their record."""

HOST_ATTEMPTS = 3
"""Hosts that died one after the other before any of them started a node that was asked for."""

WORKERS_PER_CORE = 16
"""More of them starve each other's heartbeats, and then the machine."""

END_TIMEOUT_S = 10.0
"""SIGKILL to reaped, for the host and all nodes together; then they are killed one by one."""


def node_limit(job: TrainingJob) -> int:
    """Nodes of this job that this machine can bear."""
    workers = WORKERS_PER_CORE * len(os.sched_getaffinity(0))
    if (names := devices.shared_out(job)) is not None:
        workers = min(workers, len(names))
    return workers // job.spec.workers_per_node


@dataclass(frozen=True)
class LocalPaths:
    """Where things of one job lie."""

    directory: Path
    nodes_file: Path
    socket: Path
    token_file: Path
    endpoint_file: Path
    logs: Path


class LocalBackend:
    """Implements backends.base.Backend."""

    def __init__(
        self,
        job: TrainingJob,
        paths: LocalPaths,
        *,
        host_module: str = "holdfast.workers.agent.process.node_launcher",
    ) -> None:
        self._job = job
        self._paths = paths
        self._module = host_module
        self._known = node_registry.LocalNodeRegistry()
        self._watches: dict[str, Watch] = {}
        self._gone: asyncio.Event = asyncio.Event()
        self._on_node_gone: Callable[[NodeGone], None] = lambda gone: None
        self._link: LauncherLink | None = None
        self._process: LauncherProcess | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._withheld_until = 0.0
        self._closing = False
        self._saving: asyncio.TimerHandle | None = None
        self._deaths = 0
        """Hosts that died since a node was last confirmed."""

    # -- the contract --------------------------------------------------------------------------
    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        self._on_node_gone = on_node_gone
        if self._job.spec.resources.gpu:
            await asyncio.to_thread(devices.gpus)  # asks the driver once, which takes its time
        self._known = node_registry.load(self._paths.nodes_file)
        for node, identity in list(self._known.agents.items()):
            self._watch(node, identity)
        self._link = await connect(self._paths.socket, self._new_link, None)
        if self._link is None:
            self._start_host()
            return
        # What the last controller may not have got to say; to say it twice does no harm.
        for node in sorted(self._known.starting):
            self._send_start(node)

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        # There is one machine, so there is nothing to avoid; names are never used again anyway.
        left_s = self._withheld_until - asyncio.get_running_loop().time()
        if left_s > 0:
            raise NoRoom(f"replacements are withheld for another {left_s:.0f} s (rehearsal)")
        gpus, workers = devices.shared_out(self._job), self._job.spec.workers_per_node
        if gpus is not None and len(gpus) < workers:
            raise NoRoom(f"a node takes {workers} GPUs; {len(gpus)} of this machine can be used")
        first = self._known.next_number
        nodes = tuple(f"node-{number}" for number in range(first, first + count))
        self._known.next_number += count
        self._known.starting.update(nodes)
        try:
            node_registry.save(self._paths.nodes_file, self._known)
        except HoldfastError:
            self._known.starting.difference_update(nodes)  # nobody has been asked for them
            self._save_soon()  # the file may name them, and a new controller would start them
            raise
        if self._link is None and self._connecting is None:
            self._start_host()
        elif self._link is not None:
            for node in nodes:
                self._send_start(node)
        return nodes

    async def release_node(self, node: str) -> None:
        if node in self._known.starting:
            self._known.starting.discard(node)
            self._save_soon()
        if self._link is not None:
            self._link.send(protocol.StopNode(node=node))
        if node in self._watches:
            self._watches[node].kill()

    async def list_nodes(self) -> tuple[str, ...]:
        return tuple(sorted({*self._watches, *self._known.starting}))

    async def close(self, *, release: bool) -> None:
        self._closing = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if release:
            await self._end_everything()
        for one in self._watches.values():
            one.close()
        self._watches.clear()
        self._save()
        if self._link is not None:
            self._link.close()
            await asyncio.wait([self._link.closed], timeout=END_TIMEOUT_S)

    def node_limit(self) -> int:
        return node_limit(self._job)

    def starts(self) -> Starts:
        """The first nodes wait for their host; later ones are forked from it, in no time."""
        return Starts(0.0 if self._link is not None else None)

    # -- rehearsal -----------------------------------------------------------------------------
    def withhold(self, seconds: float) -> None:
        """Have no room for new nodes for this long."""
        self._withheld_until = asyncio.get_running_loop().time() + seconds

    # -- the host ------------------------------------------------------------------------------
    def _start_host(self) -> None:
        # A stale socket of a host that was killed would look like one that refuses for ever.
        self._paths.socket.unlink(missing_ok=True)
        self._process = LauncherProcess(
            self._module,
            self._paths.socket,
            self._paths.logs / "host.log",
            host_environment(self._threads(), self._job.spec.env),
            self._paths.directory,
        )
        self._connecting = asyncio.get_running_loop().create_task(self._connect(self._process))

    async def _connect(self, process: LauncherProcess) -> None:
        try:
            link = await connect(self._paths.socket, self._new_link, process)
        except HoldfastError as error:
            self._connecting = None
            for node in sorted(self._known.starting):
                self._ended(node, str(error))
            return
        self._link, self._connecting = link, None
        for node in sorted(self._known.starting):
            self._send_start(node)

    def _threads(self) -> int:
        cpu = self._job.spec.resources.cpu
        if cpu is not None:
            return max(1, int(cpu))
        workers = self._job.spec.nodes.max * self._job.spec.workers_per_node
        return max(1, len(os.sched_getaffinity(0)) // workers)

    def _new_link(self) -> LauncherLink:
        return LauncherLink(self._on_message, self._on_closed)

    def _on_message(self, message: protocol.FromHost) -> None:
        if isinstance(message, protocol.NodeEnded):
            self._ended(message.node, message.detail)
            return
        for node, pid in message.nodes.items():
            if node in self._watches:
                continue
            identity = identify(pid)
            if identity is not None and self._watch(node, identity):
                self._known.agents[node] = identity
                self._deaths = 0
                self._known.starting.discard(node)
            elif node in self._known.starting:
                self._ended(node, "ended at once")
        self._save_soon()

    def _on_closed(self) -> None:
        """The host is gone. Its agents are not: their pidfds tell of them."""
        self._link = None
        if self._closing:
            return
        self._deaths += 1
        if self._known.starting and self._deaths < HOST_ATTEMPTS:
            self._start_host()
            return
        for node in sorted(self._known.starting):
            self._ended(node, f"the machine host died {self._deaths} times before it started it")

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
                devices=devices.shared_out(self._job),
            )
        )

    # -- nodes ---------------------------------------------------------------------------------
    def _watch(self, node: str, identity: Identity) -> bool:
        found = watch(identity, lambda: self._exited(node))
        if found is None:
            self._known.agents.pop(node, None)
            return False
        self._watches[node] = found
        return True

    def _exited(self, node: str) -> None:
        detail = "its agent's process ended"
        if self._link is None or self._closing:
            self._ended(node, detail)
        else:
            asyncio.get_running_loop().call_later(NEWS_WAIT_S, self._ended, node, detail)

    def _ended(self, node: str, detail: str) -> None:
        one = self._watches.pop(node, None)
        if one is None and node not in self._known.starting:
            return
        if one is not None:
            one.close()
        self._known.starting.discard(node)
        self._known.agents.pop(node, None)
        self._gone.set()
        if not self._closing:
            self._on_node_gone(NodeGone(node, detail))
        self._save_soon()

    def _save_soon(self) -> None:
        """After whoever has been told of it has acted on it, and once for all that comes at once:
        it waits for the disk. A new controller looks anew at what was not saved."""
        if self._saving is None:
            self._saving = asyncio.get_running_loop().call_later(SAVE_S, self._save)

    def _save(self) -> None:
        if self._saving is None:
            return
        self._saving.cancel()
        self._saving = None
        # A full disk must not keep this controller from what has happened; the journal is next.
        with contextlib.suppress(HoldfastError):
            node_registry.save(self._paths.nodes_file, self._known)

    async def _end_everything(self) -> None:
        self._known.starting.clear()
        for one in self._watches.values():
            one.kill()
        host_ended = asyncio.Event()
        identity = self._link.host if self._link is not None else None
        host = watch(identity, host_ended.set) if identity is not None else None
        if self._link is not None:
            self._link.send(protocol.StopLauncher())
        elif self._process is not None:
            self._process.kill()  # it has not listened yet, so it has no nodes
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                if host is not None:
                    await host_ended.wait()
        except TimeoutError:
            assert host is not None
            host.kill()
            await host_ended.wait()
        if self._process is not None:
            await self._process.ended
        await self._wait_for_agents()
        self._paths.socket.unlink(missing_ok=True)

    async def _wait_for_agents(self) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + END_TIMEOUT_S
        while self._watches:
            self._gone.clear()
            try:
                async with asyncio.timeout_at(give_up):
                    await self._gone.wait()
            except TimeoutError:
                nodes = ", ".join(sorted(self._watches))
                raise HoldfastError(
                    f"{nodes}: still there {END_TIMEOUT_S:g} s after SIGKILL"
                ) from None
