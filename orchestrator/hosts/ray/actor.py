"""The controller actor of a job: detached, named, and restarted by Ray without limit. It runs a
RayHost (host.py) until the job has ended."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.orchestrator.backends.ray import actors, names, ray_nodes
from holdfast.orchestrator.protocol.strangers import raise_descriptor_limit

ON_THE_HEAD = {"node:__internal_head__": 0.001}
"""A resource that only the head has, enough for a thousand actors. Without its head a cluster
stands still anyway. Any other Ray node may run a node of the job: losing it would lose the
controller, too, just when it must decide, and Ray restarts an actor only after missed health
checks."""
RESTART_PAUSE_S = 1.0
"""Seconds until the actor exits after a failure: Ray must not restart it in a tight loop."""

log = logging.getLogger("holdfast.ray")


class ControllerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a controller at its start, and at every restart again."""

    document: dict[str, Any]
    """The job, valid."""
    job: str
    job_id: str
    spec_directory: str
    token: str
    certificate: bytes
    key: bytes
    runtime_env: dict[str, Any] = {}
    """Ray's, of the process that submitted the job. The first controller inherits it; a controller
    that another process starts must be given it. Uploaded directories are URIs in it."""

    def __repr__(self) -> str:
        return f"ControllerOrder({self.job})"


class ControllerActor:
    """All methods run in its event loop."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, order: ControllerOrder, make_host: Callable[[ControllerOrder], Any]
    ) -> None:
        raise_descriptor_limit()
        self._order = order
        self._host = make_host(order)
        self._life = asyncio.get_running_loop().create_task(self._live())

    def __repr__(self) -> str:
        return f"HoldfastController({self._order.job})"

    async def perform(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A request of the command line: {ok, detail, body}."""
        reply: dict[str, Any] = await self._host.perform(verb, arguments)
        return reply

    async def watch(self, seen: Any) -> dict[str, Any]:
        """{seen, view} once the view has changed since `seen`, from the answer before, or -1."""
        change: dict[str, Any] = await self._host.watch(seen)
        return change

    async def facts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), **ray_nodes.own_node()}

    async def _live(self) -> None:
        import ray

        try:
            await self._host.run()
        except Exception:
            # Ray restarts the actor, which continues from the journal.
            log.exception("the controller of job %s failed", self._order.job)
            await asyncio.sleep(RESTART_PAUSE_S)
            os._exit(1)
        # The end record is written, and watchers read it. The actor's resources are released.
        actor = ray.get_runtime_context().current_actor
        await asyncio.to_thread(ray.kill, actor, no_restart=True)


def create(
    order: ControllerOrder,
    make_host: Callable[[ControllerOrder], Any],
    runtime_env: dict[str, Any] | None = None,
) -> Any:
    """A new controller. It and its nodes get the runtime env of this process, updated with the
    given one. Raises ValueError when there is an actor of this name."""
    import ray

    actor = ray.remote(ControllerActor).options(
        name=names.controller(order.job), namespace=names.NAMESPACE, lifetime="detached",
        max_restarts=-1, max_task_retries=0, max_concurrency=1000, num_cpus=0,
        resources=ON_THE_HEAD, runtime_env=runtime_env,
    )  # fmt: skip
    return actor.remote(order, make_host)


def own_runtime_env() -> dict[str, Any]:
    """Runtime environment of this process; its actors inherit it. JSON, as Ray keeps it."""
    import ray

    return dict(ray.get_runtime_context().runtime_env)


def find(job: str) -> Any:
    """The controller of a job; None where there is none."""
    return actors.find(names.controller(job))
