"""Writes Kubernetes Events of a TrainingJob, which `kubectl describe` shows.

Repeated events increase a count, and a rate limit keeps one job from filling etcd.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal

from holdfast.orchestrator.tasks import TaskSet

from ..api.v1alpha1 import API_VERSION, KIND
from . import names
from .client import Document, KubeClient
from .errors import EVENTS, ApiError, Conflict, NotFound, TooBusy, Unreachable
from .names import Owner

Severity = Literal["Normal", "Warning"]
MAX_MESSAGE = 1024
"""The API's limit for an Event."""
MAX_COUNTED = 64
"""Distinct events whose repetitions are counted."""
BURST = 30
REFILL_S = 10.0
"""Seconds per event of a job after a burst; further ones are only logged."""
SOURCE = "holdfast-operator"
TERMINATING = "because it is being terminated"
"""Part of the API server's message for a namespace that is being deleted."""

log = logging.getLogger("holdfast.events")


class EventRecorder:
    """The events of one job. `record` never blocks; a lost event is only a missing line."""

    def __init__(self, cluster: KubeClient, owner: Owner) -> None:
        self._cluster, self._owner = cluster, owner
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._tokens = float(BURST)
        self._refilled = 0.0
        self._tasks = TaskSet()
        self._order = asyncio.Lock()
        self._problem = ""

    def record(
        self,
        severity: Severity,
        reason: str,
        message: str,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """`reason`: one CamelCase word. `annotations`: what programs read of the Event."""
        level = logging.WARNING if severity == "Warning" else logging.INFO
        log.log(level, "%s: %s", reason, message, extra={"job": self._owner.key})
        if not self._within_rate():
            return
        self._tasks.start(self._write(severity, reason, message, annotations or {}))

    async def flush(self) -> None:
        """Wait until all recorded events are written."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _within_rate(self) -> bool:
        now = asyncio.get_running_loop().time()
        gained = (now - self._refilled) / REFILL_S
        self._tokens = min(float(BURST), self._tokens + gained)
        self._refilled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def _write(
        self, severity: Severity, reason: str, message: str, annotations: Mapping[str, str]
    ) -> None:
        message = message[:MAX_MESSAGE]
        digest = hashlib.sha256(f"{self._owner.uid}/{reason}/{message}".encode()).hexdigest()[:16]
        name = f"{self._owner.name}.{digest}"
        async with self._order:
            count = self._counts.pop(name, 0) + 1
            self._counts[name] = count
            while len(self._counts) > MAX_COUNTED:
                self._counts.popitem(last=False)
            try:
                if count > 1 and await self._increment(name, count):
                    return
                document = event_document(self._owner, name, severity, reason, message, annotations)
                await self._cluster.create(EVENTS, self._owner.namespace, document)
                self._problem = ""
            except (Conflict, Unreachable, TooBusy) as error:
                # Conflict: an earlier operator has written the same event.
                log.debug("an event was not written: %s", error)
            except ApiError as error:
                self._report(error)

    def _report(self, error: ApiError) -> None:
        """Log an error that a user has to fix, once: the events are now only in this log."""
        gone = isinstance(error, NotFound) or TERMINATING in str(error)
        if gone or self._problem == str(error):
            return
        self._problem = str(error)
        log.warning("events cannot be written: %s", error, extra={"job": self._owner.key})

    async def _increment(self, name: str, count: int) -> bool:
        """False when the API server has expired the event."""
        body = {"count": count, "lastTimestamp": _now()}
        try:
            await self._cluster.patch(EVENTS, self._owner.namespace, name, body)
        except NotFound:
            return False
        return True


def event_document(
    owner: Owner,
    name: str,
    severity: Severity,
    reason: str,
    message: str,
    annotations: Mapping[str, str],
) -> Document:
    now = _now()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": {names.LABEL_JOB: owner.name},
            "annotations": dict(annotations),
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": owner.namespace,
            "name": owner.name,
            "uid": owner.uid,
        },
        "type": severity,
        "reason": reason,
        "message": message,
        "source": {"component": SOURCE},
        "reportingComponent": SOURCE,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
