"""The end of a TrainingJob object: when it is over, and its deletion after ttlSecondsAfterFinished.

Owns: these. Must not: know how it ended.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from typing import Any

from ..backends.kubernetes.client import Cluster
from ..backends.kubernetes.errors import JOBS
from ..backends.kubernetes.pods import Owner
from ..runtime.view import JobView
from .status import FINISHED

Document = dict[str, Any]
NS = 1_000_000_000

log = logging.getLogger("holdfast.operator")


def is_finished(document: Document) -> bool:
    """By its own status, which only an operator writes."""
    status = document.get("status") or {}
    return status.get("state") in FINISHED and bool(status.get("completionTime"))


async def expire(
    cluster: Cluster, owner: Owner, document: Document, last: JobView | None, now_ns: int
) -> None:
    """Delete the object, and with it everything of it, when its time is over; at once returns where
    it has none. `last`: its last view, where we have seen it end. Raises ApiError."""
    ttl_s = document.get("spec", {}).get("ttlSecondsAfterFinished")
    if ttl_s is None:
        return
    wait_s = max(0.0, _finished_s(document, last, now_ns) + float(ttl_s) - now_ns / NS)
    log.info("deleted in %.0f s", wait_s, extra={"job": owner.key})
    await asyncio.sleep(wait_s)
    await cluster.delete(JOBS, owner.namespace, owner.name, uid=owner.uid)


def _finished_s(document: Document, last: JobView | None, now_ns: int) -> float:
    """Unix time; now, where nobody knows."""
    if last is not None and last.finished_ns is not None:
        return last.finished_ns / NS
    text = (document.get("status") or {}).get("completionTime")
    return datetime.datetime.fromisoformat(text).timestamp() if text else now_ns / NS
