"""Calls to a controller actor from a command that is no event loop.

Owns: waiting, and what becomes of Ray's errors. Must not: know what the verbs mean.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.orchestrator.errors import HoldfastError

from . import actors, runtime_env

ANSWER_S = 60.0
"""A controller that is being restarted by Ray answers once it has read its journal."""
PAUSE_S = 0.25
QUIET = ("watch",)
"""Called every other second: Ray's list of tasks would be full of it, and has its price."""


class ControllerActorGone(HoldfastError):
    """Nobody answers for this job."""


class RuntimeEnvGone(ControllerActorGone):
    """The cluster cannot build the job's runtime env, which its controller needs to start."""


def ask(actor: Any, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
    """Raises RuntimeEnvGone, ControllerGone when the actor has ended or does not answer in time."""
    import ray
    from ray.exceptions import (
        ActorUnavailableError,
        ActorUnschedulableError,
        GetTimeoutError,
        RayActorError,
        RuntimeEnvSetupError,
    )

    call = getattr(actor, method).options(enable_task_events=method not in QUIET)
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(0.1, give_up - time.monotonic())
            return ray.get(call.remote(*arguments), timeout=left_s)
        except ActorUnavailableError as error:
            if time.monotonic() > give_up:
                raise ControllerActorGone(actors.cause(error)) from None
            time.sleep(PAUSE_S)  # Ray restarts it
        except GetTimeoutError:
            raise ControllerActorGone(f"no answer within {timeout_s:g} s") from None
        except RuntimeEnvSetupError as error:
            raise RuntimeEnvGone(runtime_env.words(error.error_message or "")) from None
        except (RayActorError, ActorUnschedulableError) as error:
            raise ControllerActorGone(actors.cause(error)) from None


@contextmanager
def on_sigterm(act: Callable[[], object]) -> Iterator[None]:
    """`ray job stop` sends it, and SIGKILL three seconds later."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
