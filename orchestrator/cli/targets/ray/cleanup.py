"""Jobs of a Ray cluster that no controller looks after: cancelled all the same, or expired.

Owns: what is recorded of their end. Must not: touch a job whose controller answers, or import ray.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from holdfast.orchestrator.backends.ray import cleanup, kv
from holdfast.orchestrator.core.journal import JournalError
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.control_api import view_body
from holdfast.orchestrator.runtime.observe.view import JobView

if TYPE_CHECKING:
    from .job import RayJob

NS = 1_000_000_000


def end(job: RayJob) -> None:
    """All that there is of it in the cluster, but its record."""
    cleanup.end(job.name)


def cancel(job: RayJob, by: str, cause: str) -> str:
    """End all that there is of it, and record that. Returns what was done."""
    end(job)
    now_ns = Clock().now_ns()
    try:
        view = job.fold()
    except JournalError:  # that may be why there is no controller
        view = JobView(name=job.name, job_id=job.order.job_id, submitted_ns=now_ns)
    view.state, view.finished_ns, view.now_ns, view.nodes = "cancelled", now_ns, now_ns, []
    view.reason = f"cancelled by {by or 'somebody'} without its controller ({cause})"
    record = {"view": view_body(view), "refusal": ""}
    kv.JobKeyValueStore(job.name).put(kv.ENDED, json.dumps(record).encode())
    return f"no controller answers ({cause}): its actors and placement groups were removed"


def expire(names: Iterable[str], find: Callable[[str], RayJob]) -> list[str]:
    """Delete the records of jobs that finished longer than their ttlSecondsAfterFinished ago."""
    deleted = []
    for name in names:
        try:
            job = find(name)
        except HoldfastError:
            continue  # another Holdfast's, or deleted by now
        ttl_s, ended = job.ttl_s, job.ended
        finished_ns = ended["view"].get("finished_ns") if ended is not None else None
        if ttl_s is None or finished_ns is None or Clock().now_ns() < finished_ns + ttl_s * NS:
            continue
        kv.JobKeyValueStore(name).clear()
        deleted.append(name)
    return deleted
