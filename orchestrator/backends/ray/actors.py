"""Calls to a job's Ray actors and to the cluster's head: starting, finding and ending actors,
retries while the head does not answer, and Ray's errors as short texts."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.orchestrator.errors import HoldfastError

from . import names
from .agent import AgentActor, AgentOrder

ANSWER_S = 60.0
"""A controller that Ray restarts answers once it has read its journal."""
PAUSE_S = 0.25
"""Seconds between two calls to an actor that Ray restarts."""
HEAD_PATIENCE_S = 120.0
"""A head that restarts is back within a minute where Ray keeps its state; training continues."""
HEAD_PAUSE_S = 0.5
UNLISTED = ("watch",)
"""Methods that are called every other second: they would fill Ray's list of tasks."""

log = logging.getLogger("holdfast.ray")
T = TypeVar("T")


# -- the head ----------------------------------------------------------------------------------
async def until_head_answers(
    work: Callable[[], T], what: str, pause_s: float = HEAD_PAUSE_S
) -> T:  # fmt: skip
    """Call `work`, which is safe to repeat, in a thread until it succeeds. Raises HoldfastErrors of
    `work` at once, and any other error after HEAD_PATIENCE_S."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + HEAD_PATIENCE_S
    while True:
        try:
            return await asyncio.to_thread(work)
        except HoldfastError:
            raise
        # Ray raises its own RpcError, but also plain RuntimeErrors, depending on its version.
        except Exception as error:
            if loop.time() > give_up:
                raise
            log.warning("%s: %s; trying again", what, error)
        await asyncio.sleep(pause_s)


# -- agents ------------------------------------------------------------------------------------
@functools.cache
def _agent_class() -> Any:
    """Made once: Ray puts each remote class into the cluster's store."""
    import ray

    return ray.remote(AgentActor)


def start_agent(order: AgentOrder, group: Any, bundle: int, resources: dict[str, float]) -> Any:
    """The actor of a new node, holding its whole bundle. It outlives the controller, and is never
    restarted: its memory would be lost. Blocks for round trips to the head; safe to repeat."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options: dict[str, Any] = {"num_cpus": resources["CPU"]}
    if "GPU" in resources:
        options["num_gpus"] = resources["GPU"]
    if "memory" in resources:
        options["memory"] = resources["memory"]
    if further := {k: v for k, v in resources.items() if k not in ("CPU", "GPU", "memory")}:
        options["resources"] = further
    options_of_actor = _agent_class().options(
        name=names.agent(order.job, order.node),
        namespace=names.NAMESPACE,
        lifetime="detached",
        max_restarts=0,
        max_concurrency=64,
        get_if_exists=True,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        **options,
    )
    return options_of_actor.remote(order)


def find(name: str) -> Any:
    """The actor of this name; None where there is none."""
    import ray

    try:
        return ray.get_actor(name, names.NAMESPACE)
    except ValueError:
        return None


def find_agent(job: str, node: str) -> Any:
    return find(names.agent(job, node))


def kill(actor: Any) -> None:
    import ray

    ray.kill(actor, no_restart=True)


def kill_all(job: str) -> None:
    """SIGKILL for the controller and the agents of a job, workers included."""
    import ray

    for ray_actor in ray.util.list_named_actors(all_namespaces=True):
        if ray_actor["namespace"] == names.NAMESPACE and names.belongs(ray_actor["name"], job):
            actor = find(ray_actor["name"])
            if actor is not None:
                kill(actor)


async def agent_end(actor: Any, answer_s: float) -> str:
    """Wait until this agent's node has ended; returns why. An actor whose connection broke and that
    does not answer within `answer_s` has ended."""
    from ray.exceptions import (
        ActorUnavailableError,
        RayActorError,
        RayError,
        RuntimeEnvSetupError,
    )

    while True:
        try:
            how = await actor.wait_for_end.remote()
            if how is not None:  # else newer calls replaced this one
                return f"its agent {how}"
        except ActorUnavailableError as error:
            try:
                async with asyncio.timeout(answer_s):
                    await actor.facts.remote()
            except (RayError, TimeoutError):
                return f"its actor does not answer ({first_line(error)})"
        except RayActorError as error:
            return death_cause(error)
        except RuntimeEnvSetupError as error:
            why = runtime_env_summary(error.error_message or str(error))
            return f"its Ray node could not build the job's runtime env: {why}"
        except RayError as error:
            return first_line(error)
        # Ray's RpcError or a plain RuntimeError: the head restarts, and the node may still exist.
        except Exception as error:
            log.warning("waiting for the end of %s: %s; trying again", actor, first_line(error))
            await asyncio.sleep(answer_s)


# -- the controller, from a command without an event loop --------------------------------------
class ControllerActorGone(HoldfastError):
    """The job's controller has ended or does not answer."""


class RuntimeEnvGone(ControllerActorGone):
    """The cluster cannot build the job's runtime env, which its controller needs to start."""


def ask(actor: Any, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
    """Raises RuntimeEnvGone, ControllerActorGone."""
    import ray
    from ray.exceptions import (
        ActorUnavailableError,
        ActorUnschedulableError,
        GetTimeoutError,
        RayActorError,
        RuntimeEnvSetupError,
    )

    call = getattr(actor, method).options(enable_task_events=method not in UNLISTED)
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(0.1, give_up - time.monotonic())
            return ray.get(call.remote(*arguments), timeout=left_s)
        except ActorUnavailableError as error:
            if time.monotonic() > give_up:
                raise ControllerActorGone(death_cause(error)) from None
            time.sleep(PAUSE_S)  # Ray restarts it
        except GetTimeoutError:
            raise ControllerActorGone(f"no answer within {timeout_s:g} s") from None
        except RuntimeEnvSetupError as error:
            raise RuntimeEnvGone(runtime_env_error(error.error_message or "")) from None
        except (RayActorError, ActorUnschedulableError) as error:
            raise ControllerActorGone(death_cause(error)) from None


# -- Ray's errors ------------------------------------------------------------------------------
def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def death_cause(error: BaseException) -> str:
    """Ray's report of an actor's death, without the table of its ids. For an actor that could not
    be created, Ray gives a traceback whose last line has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    if not causes and "raised in its creation task" in str(error):
        causes = lines[-1:]
    return (causes or [first_line(error)])[0][:400]


FRAMES = re.compile(r"Traceback \(most recent call last\):\n(?:[ ].*\n)*")
"""Frames of Ray's own code, which do not help the author of a runtime env."""
GENERAL = re.compile(r"(Failed to set up runtime environment|Could not create the actor because).*")
"""Lines that every such error has."""
SUMMARY_CHARS = 200
"""Characters of each end: the request comes first in pip's output, and its error last."""


def runtime_env_error(text: str) -> str:
    """Ray's error about a runtime env, without stack frames."""
    return FRAMES.sub("", text).strip()


def runtime_env_summary(text: str) -> str:
    """The beginning and the end of that error, in one line."""
    line = " ".join(GENERAL.sub("", runtime_env_error(text)).split())
    if len(line) <= 2 * SUMMARY_CHARS:
        return line
    return f"{line[:SUMMARY_CHARS]} ... {line[-SUMMARY_CHARS:]}"
