"""The end of a TrainingJob object: when it is over, and its deletion after ttlSecondsAfterFinished.

Owns: these. Must not: know how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Callable
from typing import Any

from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS, ApiError
from holdfast.orchestrator.kube.informer import Backoff
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.observe.view import JobView

from .status import FINISHED

Document = dict[str, Any]
NS = 1_000_000_000
RETRY_MIN_S = 1.0
RETRY_MAX_S = 60.0

log = logging.getLogger("holdfast.operator")


def is_finished(document: Document) -> bool:
    """By its own status, which only an operator writes."""
    status = document.get("status") or {}
    return status.get("state") in FINISHED and bool(status.get("completionTime"))


async def expire(
    cluster: KubeClient,
    owner: Owner,
    document: Callable[[], Document],
    changed: asyncio.Event,
    over_s: float,
    clock: Clock,
    tell: Callable[[str], None],
) -> None:
    """Delete the object, and with it everything of it, when its time is over. The time counts from
    `over_s`, Unix time, and may be given, changed or taken away at any moment until then:
    `document` is the object as it is now, `changed` is set when it is another one. Returns when it
    is deleted; until then it is tried again, and `tell` hears once why it could not be."""
    pauses = Backoff(RETRY_MIN_S, RETRY_MAX_S)
    problem = ""
    while True:
        changed.clear()
        ttl_s = document().get("spec", {}).get("ttlSecondsAfterFinished")
        wait_s = None if ttl_s is None else over_s + float(ttl_s) - clock.now_ns() / NS
        if wait_s is None or wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await changed.wait()
            continue
        try:
            await cluster.delete(JOBS, owner.namespace, owner.name, uid=owner.uid)
            log.info("deleted %g s after its end", ttl_s, extra={"job": owner.key})
            return
        except ApiError as error:
            if str(error) != problem:
                problem = str(error)
                tell(f"its time is over and it cannot be deleted: {error}; trying again")
            await asyncio.sleep(pauses.next_s())


def ended_s(document: Document, last: JobView | None, now_ns: int) -> float:
    """When it ended, as Unix time; now, where nobody knows. `last`: its last view, where we have
    seen it end."""
    if last is not None and last.finished_ns is not None:
        return last.finished_ns / NS
    text = (document.get("status") or {}).get("completionTime")
    return datetime.datetime.fromisoformat(text).timestamp() if text else now_ns / NS
