"""The backends that the contract suite runs against.

A ContractTarget makes backends for one job, as successive controllers do, and finds the processes
of a node. To add a backend, add its target to TARGETS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.backends.base import Backend, NodeGone, NoRoom
from holdfast.orchestrator.backends.local import LocalBackend, LocalPaths
from holdfast.orchestrator.runtime.job_directory import Home

BOUND_S = 90.0
"""Importing torch on a busy machine takes long."""


def make_job() -> TrainingJob:
    return job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "contract"},
            "spec": {"entrypoint": {"script": "train.py"}, "nodes": {"max": 4}},
        }
    )


class ContractTarget(Protocol):
    def make(self) -> Backend:
        """A backend for the same job, as for a new controller."""

    def agent_pid(self, node: str) -> int | None:
        """The process of a node's agent; None if there is none."""

    def leftovers(self) -> list[str]:
        """Processes and files of the job that must not exist after its release."""

    def close(self) -> None:
        """Remove what the target itself has started."""


class LocalContractTarget:
    def __init__(self, directory: Path) -> None:
        self.job = make_job()
        self.directory = Home(directory).create(self.job, directory)
        self.paths = LocalPaths(
            directory=self.directory.path,
            nodes_file=self.directory.nodes_file,
            socket=self.directory.host_socket,
            token_file=self.directory.token_file,
            endpoint_file=self.directory.controller_file,
            logs=self.directory.logs,
        )

    def make(self) -> Backend:
        return LocalBackend(self.job, self.paths)

    def agent_pid(self, node: str) -> int | None:
        agents = msgspec.json.decode(self.paths.nodes_file.read_bytes())["agents"]
        return int(agents[node]["pid"]) if node in agents else None

    def host_pids(self) -> list[int]:
        """Node launcher, agents and fork servers: they have the job's socket as an argument."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            if process.info["status"] == psutil.STATUS_ZOMBIE:
                continue
            if str(self.paths.socket) in (process.info["cmdline"] or []):
                found.append(process.pid)
        return found

    def leftovers(self) -> list[str]:
        files = [str(self.paths.socket)] if self.paths.socket.exists() else []
        return [*map(str, self.host_pids()), *files]

    def close(self) -> None:
        """Do nothing: the target has started nothing."""


def kubernetes_target(directory: Path) -> ContractTarget:
    from .kubernetes_target import (
        KubernetesContractTarget,  # needs the extra "kubernetes"
    )

    return KubernetesContractTarget(directory)


def ray_target(directory: Path) -> ContractTarget:
    from .ray_target import RayContractTarget

    return RayContractTarget(make_job(), directory)


TARGETS: dict[str, Callable[[Path], ContractTarget]] = {
    "local": LocalContractTarget,
    "kubernetes": kubernetes_target,
    "ray": ray_target,
}


class Controller:
    """A controller with its backend."""

    def __init__(self, target: ContractTarget) -> None:
        self.target = target
        self.backend = target.make()
        self.gone: dict[str, NodeGone] = {}
        self._gone_changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Controller:
        await self.backend.open(self._on_gone)
        return self

    async def __aexit__(self, *error: object) -> None:
        """End as if killed, without a release."""
        await self.backend.close(release=False)

    def _on_gone(self, gone: NodeGone) -> None:
        assert gone.node not in self.gone, f"{gone.node} ended twice"
        self.gone[gone.node] = gone
        task = asyncio.get_running_loop().create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._gone_changed:
            self._gone_changed.notify_all()

    async def request(self, count: int) -> tuple[str, ...]:
        """Retry while there is no capacity, as the core does: it may just have been released."""
        given: tuple[str, ...] = ()
        async with asyncio.timeout(BOUND_S):
            while len(given) < count:
                try:
                    given += await self.backend.request_nodes(count - len(given), ())
                except NoRoom:
                    await asyncio.sleep(0.1)
        return given

    async def ended(self, *nodes: str) -> None:
        async with asyncio.timeout(BOUND_S), self._gone_changed:
            await self._gone_changed.wait_for(lambda: all(node in self.gone for node in nodes))

    async def up(self, *nodes: str) -> None:
        """Wait until the processes of the agents exist."""
        async with asyncio.timeout(BOUND_S):
            while not all(self.target.agent_pid(node) for node in nodes):
                assert not any(node in self.gone for node in nodes), self.gone
                await asyncio.sleep(0.005)  # no event reports a new process

    def kill(self, node: str) -> None:
        pid = self.target.agent_pid(node)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


async def release(target: ContractTarget) -> None:
    """Release all nodes of a target."""
    async with Controller(target) as controller:
        await controller.backend.close(release=True)


def pid_exists(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
