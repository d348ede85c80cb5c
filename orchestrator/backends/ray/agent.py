"""The actor that holds a node's resources and keeps its agent: one per node of the job.

Owns: the agent's process and its files (token, key, the controller's address). Must not: fork
workers, or know what the agent does: a Ray worker has threads and imported libraries, so training
happens in the agent's own process tree, which ends when this process does, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import deque
from typing import Any, Self

import msgspec

from holdfast.orchestrator.protocol import python_command, tls

from . import cluster, drains, names, rest
from .secret_dir import PrivateDirectory

UNATTENDED_S = 600.0
"""An agent has ended and no controller has asked about it for this long: nobody will."""
WAITERS = 8
"""Calls that wait for the agent's end. Each life of the controller makes one, which stays when that
life has ended, and an actor runs no more than so many at once. More controllers than this never
live at the same time, so who is still there is among the newest."""


class AgentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is told at its start."""

    job: str
    node: str
    slots: int
    job_id: str
    token: str
    certificate: bytes
    key: bytes
    address: str
    port: int
    env: dict[str, str]

    def __repr__(self) -> str:
        return f"AgentOrder({self.job}/{self.node})"


class AgentActor:
    """Runs in a process of its own on a Ray node. All methods run in its event loop."""

    def __new__(cls, *_arguments: Any) -> Self:
        rest.prepare()
        return super().__new__(cls)

    async def __init__(self, order: AgentOrder) -> None:  # type: ignore[misc]  # Ray awaits it
        self._order = order
        self._private = PrivateDirectory(order.job_id)
        self._directory = self._private.path
        self._private.write("token", order.token.encode())
        self._private.write(tls.CERTIFICATE_NAME, order.certificate)
        self._private.write(tls.KEY_NAME, order.key)
        await self.set_endpoint(order.address, order.port)
        logs = cluster.log_directory(order.job, order.job_id)
        logs.mkdir(parents=True, exist_ok=True)
        # From this thread, which is the loop's and lives as long as the process: the kernel ends
        # the child when the thread that started it does.
        with (logs / f"agent-{order.node}.log").open("ab") as output:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=self._environment(), start_new_session=True, cwd=self._directory,
            )  # fmt: skip
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = loop.create_future()
        self._waiters: deque[asyncio.Future[Any]] = deque()
        """The oldest first; done when a call is to wait no longer."""
        # What the dashboard shows as this actor's log.
        print(
            f"agent of {order.job} {order.node}: process {self._process.pid}; its log and its"
            f" workers' (gen-*/rank-*.log) are in {logs.name}/ of this Ray node",
            flush=True,
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._on_end)

    def __repr__(self) -> str:
        return f"HoldfastAgent({self._order.job} {self._order.node})"

    # -- called by the controller --------------------------------------------------------------
    async def facts(self) -> dict[str, Any]:
        """Where it is."""
        return {"pid": self._process.pid, "actor_pid": os.getpid(), **cluster.here()}

    async def set_endpoint(self, address: str, port: int) -> None:
        """Where the controller listens now; the agent reads it whenever it dials."""
        if self._directory.exists():
            told = {"address": address, "port": port}
            self._private.write("controller.json", json.dumps(told).encode())

    async def wait_for_end(self) -> str | None:
        """How the agent's process ended; None: it has not, and this call made way for newer ones.
        Fails when this actor or its Ray node ends first."""
        rest.begin()  # who asks this has nothing else to say for now
        enough: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiters.append(enough)
        if len(self._waiters) > WAITERS:
            self._waiters.popleft().set_result(None)
        await asyncio.wait([self._ended, enough], return_when=asyncio.FIRST_COMPLETED)
        return self._ended.result() if self._ended.done() else None

    async def preempt(self) -> None:
        """Have the agent hand over: what it would do on a node that is announced to leave."""
        self._signal(signal.SIGTERM)

    async def drain_reason(self) -> str:
        """Why this Ray node is drained, as far as it says; its raylet is our parent."""
        logs = cluster.log_directory(self._order.job, self._order.job_id).parent
        return await asyncio.to_thread(drains.reason_in_log, logs, os.getppid())

    async def end(self) -> None:
        """End the agent with all its workers and its memory."""
        self._signal(signal.SIGKILL)
        await asyncio.shield(self._ended)

    # -- its process ---------------------------------------------------------------------------
    def _command(self) -> list[str]:
        order, here = self._order, cluster.here()
        return [
            *python_command.start("holdfast.workers.agent"),
            "--job", order.job, "--node", order.node, "--slots", str(order.slots),
            "--token-file", str(self._directory / "token"),
            "--endpoint-file", str(self._directory / "controller.json"),
            "--tls", str(self._directory), "--tls-name", names.tls(order.job_id),
            "--address", here["address"], "--failure-domain", here["ray_node"],
            "--die-with", str(os.getpid()),
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        # Ray sets the number of threads for its own workers; ours has its own rule.
        inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        return {
            **inherited,
            "PYTHONPATH": python_command.import_path(),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            **self._order.env,
            "OPENBLAS_NUM_THREADS": "1",
        }

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.done():
            self._process.send_signal(number)

    def _on_end(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        killer = signal.Signals(-code).name if code < 0 else ""
        how = f"was killed by {killer}" if killer else f"ended with exit code {code}"
        print(f"the agent {how}", flush=True)
        self._ended.set_result(how)
        self._private.remove()
        loop.call_later(UNATTENDED_S, os._exit, 0)
