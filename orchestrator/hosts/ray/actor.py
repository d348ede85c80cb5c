"""The controller actor of a job: detached, named, restarted by Ray without limit.

Owns: the actor around a Host, making it, finding it and asking it. Must not: know what a controller
does. What it hosts is above this room (hosts/ray/host.py) and handed in when it is made.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any, Protocol, Self

import msgspec

from holdfast.orchestrator.backends.ray import cluster, names, rest

ON_THE_HEAD = {"node:__internal_head__": 0.001}
"""What Ray gives to its head alone, to a thousand actors at most. A lost head is a lost cluster, or
one that waits; any other Ray node may have a node of the job, and would take the controller along
just when there is something to decide: Ray starts it anew only after missed health checks."""
RESTART_PAUSE_S = 1.0
"""What fails at once, fails again at once."""

log = logging.getLogger("holdfast.ray")


class ControllerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller is told at its start, and at every restart again."""

    document: dict[str, Any]
    """The job, valid."""
    job: str
    job_id: str
    spec_directory: str
    token: str
    certificate: bytes
    key: bytes
    runtime_env: dict[str, Any] = {}
    """Ray's, of the process that handed the job in. The first controller inherits it; one that
    another process revives must be given it. What was uploaded for it is a URI by now."""

    def __repr__(self) -> str:
        return f"ControllerOrder({self.job})"


class JobHost(Protocol):
    """One job, from the actor's start to the job's end."""

    async def run(self) -> None:
        """Until the job has ended and its record is written. Raises HoldfastError."""

    async def perform(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]: ...

    async def watch(self, seen: Any) -> dict[str, Any]: ...


class ControllerActor:
    """All methods run in its event loop."""

    def __new__(cls, *_arguments: Any) -> Self:
        rest.prepare()
        return super().__new__(cls)

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, order: ControllerOrder, make_host: Callable[[ControllerOrder], JobHost]
    ) -> None:
        self._order = order
        self._host = make_host(order)
        rest.begin()
        self._life = asyncio.get_running_loop().create_task(self._live())

    def __repr__(self) -> str:
        return f"HoldfastController({self._order.job})"

    async def perform(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A verb of the command line: {ok, detail, body}."""
        return await self._host.perform(verb, arguments)

    async def watch(self, seen: Any) -> dict[str, Any]:
        """{seen, view} once something has changed since `seen`, that of the answer before or -1."""
        return await self._host.watch(seen)

    async def facts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), **cluster.here()}

    async def _live(self) -> None:
        import ray

        try:
            await self._host.run()
        except Exception:
            # Whatever it is: a new process goes on from the journal. Ray restarts it.
            log.exception("the controller of job %s failed", self._order.job)
            await asyncio.sleep(RESTART_PAUSE_S)
            os._exit(1)
        # The record is written; who watches reads it there. A process that has nothing to do any
        # more would hold its place in the cluster for ever.
        actor = ray.get_runtime_context().current_actor
        await asyncio.to_thread(ray.kill, actor, no_restart=True)


def create(
    order: ControllerOrder,
    make_host: Callable[[ControllerOrder], JobHost],
    runtime_env: dict[str, Any] | None = None,
) -> Any:
    """A new controller. It has the runtime env of this process, and over that the given one; its
    nodes have the same. Raises ValueError when there is one of this name."""
    import ray

    made = ray.remote(ControllerActor).options(
        name=names.controller(order.job), namespace=names.NAMESPACE, lifetime="detached",
        max_restarts=-1, max_task_retries=0, max_concurrency=1000, num_cpus=0,
        resources=ON_THE_HEAD, runtime_env=runtime_env,
    )  # fmt: skip
    return made.remote(order, make_host)


def own_runtime_env() -> dict[str, Any]:
    """That of this process, which all that it starts inherits. JSON, as Ray keeps it."""
    import ray

    return dict(ray.get_runtime_context().runtime_env)


def find(job: str) -> Any:
    """The controller of a job; None where there is none."""
    import ray

    try:
        return ray.get_actor(names.controller(job), names.NAMESPACE)
    except ValueError:
        return None
