"""The actor of one node: it holds the node's resources on a Ray node and runs the agent's process.

Training happens in the agent's own process tree and not in this process, because a Ray worker has
threads and imported libraries. The tree ends when this process ends, for whatever reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.orchestrator.protocol import python_command, tls

from . import drains, names, ray_nodes

UNATTENDED_S = 600.0
"""The actor exits when its agent has ended and no controller asks about it for this long."""
MAX_WAITERS = 8
"""Calls that wait for the agent's end. Each run of the controller makes one, which stays when that
controller has ended, and an actor runs a limited number of calls at once. More controllers than
this never live at the same time, so a live one is always among the newest."""


class AgentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments with which an actor starts its agent."""

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

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        order: AgentOrder,
        command: Sequence[str] | None = None,
        logs: Path | None = None,
        parent: Path | None = None,
    ) -> None:
        """Tests choose the agent's command, the log directory, and where secrets are written."""
        self._order = order
        self._secrets = SecretDirectory(order.job_id, parent)
        self._secrets.write("token", order.token.encode())
        self._secrets.write(tls.CERTIFICATE_NAME, order.certificate)
        self._secrets.write(tls.KEY_NAME, order.key)
        await self.set_endpoint(order.address, order.port)
        self._logs = logs or ray_nodes.log_directory(order.job, order.job_id)
        self._logs.mkdir(parents=True, exist_ok=True)
        # From this thread, which runs the loop and lives as long as the process: the kernel ends
        # the child when the thread that started it ends.
        self._log_file = self._logs / f"agent-{order.node}.log"
        with self._log_file.open("ab") as output:
            self._process = subprocess.Popen(
                command or self._command(),
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=self._environment(), start_new_session=True, cwd=self._secrets.path,
            )  # fmt: skip
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = loop.create_future()
        self._waiters: deque[asyncio.Future[Any]] = deque()
        """One for each waiting call, the oldest first; done when the call is to return early."""
        # The dashboard shows this as the actor's log.
        print(
            f"agent of {order.job} {order.node}: process {self._process.pid}; its log and its"
            f" workers' (gen-*/rank-*.log) are in {self._logs.name}/ of this Ray node",
            flush=True,
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._on_end)

    def __repr__(self) -> str:
        return f"HoldfastAgent({self._order.job} {self._order.node})"

    # -- called by the controller --------------------------------------------------------------
    async def facts(self) -> dict[str, Any]:
        """Ray node on which the agent runs."""
        return {"pid": self._process.pid, "actor_pid": os.getpid(), **ray_nodes.own_node()}

    async def set_endpoint(self, address: str, port: int) -> None:
        """Address of the controller now; the agent reads it whenever it connects."""
        if self._secrets.path.exists():
            endpoint = {"address": address, "port": port}
            self._secrets.write("controller.json", json.dumps(endpoint).encode())

    async def wait_for_end(self) -> str | None:
        """End of the agent's process; None: newer calls replaced this one first. Fails
        when this actor or its Ray node ends first."""
        enough: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiters.append(enough)
        if len(self._waiters) > MAX_WAITERS:
            self._waiters.popleft().set_result(None)
        await asyncio.wait([self._ended, enough], return_when=asyncio.FIRST_COMPLETED)
        return self._ended.result() if self._ended.done() else None

    async def preempt(self) -> None:
        """Have the agent hand over its state, as on a node that is announced to leave."""
        self._signal(signal.SIGTERM)

    async def drain_reason(self) -> str:
        """Reason of this Ray node's drain, from the log of its raylet (our parent process)."""
        return await asyncio.to_thread(drains.reason_in_log, self._logs.parent, os.getppid())

    async def end(self) -> None:
        """End the agent with all its workers and its memory."""
        self._signal(signal.SIGKILL)
        await asyncio.shield(self._ended)

    # -- its process ---------------------------------------------------------------------------
    def _command(self) -> list[str]:
        order, here, secrets = self._order, ray_nodes.own_node(), self._secrets.path
        return [
            *python_command.start("holdfast.workers.agent"),
            "--job", order.job, "--node", order.node, "--slots", str(order.slots),
            "--token-file", str(secrets / "token"),
            "--endpoint-file", str(secrets / "controller.json"),
            "--tls", str(secrets), "--tls-name", names.tls(order.job_id),
            "--address", here["address"], "--failure-domain", here["ray_node"],
            "--log-file", str(self._log_file), "--die-with", str(os.getpid()),
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        # Ray sets the number of threads for its own workers; Holdfast has another rule.
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
        self._secrets.remove()
        loop.call_later(UNATTENDED_S, os._exit, 0)


class SecretDirectory:
    """A directory with an agent's token, TLS key and controller address, for its owner only.

    A process that is killed cannot remove its directory, so the next process on the machine does,
    of whatever job. A directory's owner holds a lock in it, which the kernel releases however the
    owner ends. The lock is taken before its file gets its name: a directory whose lock file has
    that name and is not locked is left over.
    """

    LOCK = "owner"
    PATTERN = f"holdfast-{'[0-9a-f]' * 16}-*"
    """Pattern with a job's id, which no other directory has in its name."""

    def __init__(self, job_id: str, parent: Path | None = None) -> None:
        """Raises OSError."""
        parent = parent or Path(tempfile.gettempdir())
        self._remove_left_over(parent)
        self.path = Path(tempfile.mkdtemp(prefix=f"holdfast-{job_id}-", dir=parent))  # mode 0700
        unnamed = self.path / f".{self.LOCK}"
        self._lock = os.open(unnamed, os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / self.LOCK)

    def write(self, name: str, data: bytes) -> None:
        """Replaces the file as a whole."""
        temporary = self.path / f".{name}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        temporary.replace(self.path / name)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    @classmethod
    def _remove_left_over(cls, parent: Path) -> None:
        for path in parent.glob(cls.PATTERN):
            # An OSError: it belongs to another user, or is just being removed or made.
            with contextlib.suppress(OSError):
                # Any user may put a pipe there, and opening a pipe waits for its reader.
                lock = os.open(path / cls.LOCK, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)
