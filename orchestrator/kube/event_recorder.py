"""Kubernetes Events of a TrainingJob: what `kubectl describe` tells of it.

Owns: writing them, the same thing said again being counted and not repeated, and that a job that
talks too much does not fill etcd. Must not: decide what is worth telling.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import logging
from collections import OrderedDict
from typing import Literal

from ..api.v1alpha1 import API_VERSION, KIND
from . import names
from .client import Document, KubeClient
from .errors import EVENTS, ApiError, Conflict, NotFound, TooBusy, Unreachable
from .names import Owner

Severity = Literal["Normal", "Warning"]
MAX_MESSAGE = 1024
"""Of an Event, by the API."""
KEPT = 64
"""Distinct events that are remembered for counting."""
BURST = 30
REFILL_S = 10.0
"""After a burst, one event of a job in so many seconds; further ones are in the log only."""
SOURCE = "holdfast-operator"
TERMINATING = "because it is being terminated"
"""What the API server says of a namespace that goes, with all jobs in it."""

log = logging.getLogger("holdfast.events")


class EventRecorder:
    """Of one job. `record` never blocks; a lost event is a lost line in `describe`, no more."""

    def __init__(self, cluster: KubeClient, owner: Owner) -> None:
        self._cluster, self._owner = cluster, owner
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._tokens = float(BURST)
        self._refilled = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()
        self._problem = ""

    def record(self, severity: Severity, reason: str, message: str) -> None:
        """`reason`: one CamelCase word."""
        level = logging.WARNING if severity == "Warning" else logging.INFO
        log.log(level, "%s: %s", reason, message, extra={"job": self._owner.key})
        if not self._allowed():
            return
        task = asyncio.get_running_loop().create_task(self._write(severity, reason, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def flush(self) -> None:
        """Until everything told so far is written."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _allowed(self) -> bool:
        now = asyncio.get_running_loop().time()
        gained = (now - self._refilled) / REFILL_S
        self._tokens = min(float(BURST), self._tokens + gained)
        self._refilled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def _write(self, severity: Severity, reason: str, message: str) -> None:
        message = message[:MAX_MESSAGE]
        digest = hashlib.sha256(f"{self._owner.uid}/{reason}/{message}".encode()).hexdigest()[:16]
        name = f"{self._owner.name}.{digest}"
        async with self._order:
            count = self._counts.pop(name, 0) + 1
            self._counts[name] = count
            while len(self._counts) > KEPT:
                self._counts.popitem(last=False)
            try:
                if count > 1 and await self._again(name, count):
                    return
                document = event_document(self._owner, name, severity, reason, message)
                await self._cluster.create(EVENTS, self._owner.namespace, document)
                self._problem = ""
            except (Conflict, Unreachable, TooBusy) as error:
                # Most often: the one of an earlier operator is still there.
                log.debug("an event was not written: %s", error)
            except ApiError as error:
                self._note(error)

    def _note(self, error: ApiError) -> None:
        """What somebody has to put right, once: this log is now the only place of the story."""
        gone = isinstance(error, NotFound) or TERMINATING in str(error)
        if gone or self._problem == str(error):
            return
        self._problem = str(error)
        log.warning("events cannot be written: %s", error, extra={"job": self._owner.key})

    async def _again(self, name: str, count: int) -> bool:
        """False: the API server has forgotten it."""
        body = {"count": count, "lastTimestamp": _now()}
        try:
            await self._cluster.patch(EVENTS, self._owner.namespace, name, body)
        except NotFound:
            return False
        return True


def event_document(
    owner: Owner, name: str, severity: Severity, reason: str, message: str
) -> Document:
    now = _now()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": {names.LABEL_JOB: owner.name},
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
