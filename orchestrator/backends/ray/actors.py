"""Agents' actors from outside: starting, finding and ending them, and why one is dead.

Owns: the options that an agent's actor is started with. Must not: know which nodes are wanted.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

from . import names, runtime_env
from .agent import AgentActor, AgentOrder

log = logging.getLogger("holdfast.ray")


@functools.cache
def _remote_class() -> Any:
    """Made once: Ray puts each one that is made into the cluster's store."""
    import ray

    return ray.remote(AgentActor)


def start(order: AgentOrder, group: Any, bundle: int, resources: dict[str, float]) -> Any:
    """The actor of a new node, holding all of its bundle. It outlives the controller that asked
    for it, and is never restarted: what was in its memory would be gone. Blocks for round trips to
    the head; safe to repeat."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options: dict[str, Any] = {"num_cpus": resources["CPU"]}
    if "GPU" in resources:
        options["num_gpus"] = resources["GPU"]
    if "memory" in resources:
        options["memory"] = resources["memory"]
    made = _remote_class().options(
        name=names.agent(order.job, order.node),
        namespace=names.NAMESPACE,
        lifetime="detached",
        max_restarts=0,
        max_concurrency=64,
        get_if_exists=True,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        **options,
    )
    return made.remote(order)


def find(job: str, node: str) -> Any:
    """The actor of a node; None where there is none any more."""
    import ray

    try:
        return ray.get_actor(names.agent(job, node), names.NAMESPACE)
    except ValueError:
        return None


def kill(actor: Any) -> None:
    import ray

    ray.kill(actor, no_restart=True)


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def cause(error: BaseException) -> str:
    """What Ray says of an actor's death, without the table of its ids. Of an actor that could not
    be made there is a traceback, which says in its last line what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = [line for line in lines if line.startswith("The actor is dead because")]
    if not found and "raised in its creation task" in str(error):
        found = lines[-1:]
    return (found or [first_line(error)])[0][:400]


async def until_ended(actor: Any, answer_s: float) -> str:
    """Until the node of this actor has ended, for whatever reason; returns it. `answer_s`: an actor
    whose connection broke and that does not answer within this has ended."""
    from ray.exceptions import (
        ActorUnavailableError,
        RayActorError,
        RayError,
        RuntimeEnvSetupError,
    )

    while True:
        try:
            how = await actor.wait_for_end.remote()
            if how is not None:  # else newer calls of others took its place
                return f"its agent {how}"
        except ActorUnavailableError as error:
            try:
                async with asyncio.timeout(answer_s):
                    await actor.facts.remote()
            except (RayError, TimeoutError):
                return f"its actor does not answer ({first_line(error)})"
        except RayActorError as error:
            return cause(error)
        except RuntimeEnvSetupError as error:
            why = runtime_env.short(error.error_message or str(error))
            return f"its Ray node could not build the job's runtime env: {why}"
        except RayError as error:
            return first_line(error)
        # Ray's RpcError or a plain RuntimeError: the head restarts, and the node may well be there.
        except Exception as error:
            log.warning("waiting for the end of %s: %s; trying again", actor, first_line(error))
            await asyncio.sleep(answer_s)
