"""Writes the status of one TrainingJob object, and chooses what becomes a Kubernetes Event.

A changed condition is written at once, anything else at most every few seconds. A status that a
user has edited is overwritten.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.orchestrator import tasks
from holdfast.orchestrator.api.v1alpha1 import API_VERSION, KIND
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import (
    JOBS,
    ApiError,
    Conflict,
    NotFound,
    TooBusy,
    Unreachable,
)
from holdfast.orchestrator.kube.event_recorder import Severity
from holdfast.orchestrator.kube.informer import Backoff
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime.observe.view import Incident, JobView

from .status import BUSY, HOLD_REASON, PHASE_REASONS

SETTLE_S = 0.05
"""Changes that come together are written together."""
NUM_OWN_VERSIONS = 16
"""Own writes that the watch may still report."""
TRANSIENT = (Unreachable, TooBusy, Conflict)
"""The next attempt may succeed, so no Event is recorded."""

log = logging.getLogger("holdfast.operator")

BuildStatus = Callable[[Sequence[Document]], Document]
"""Conditions that are in the object now -> the whole status."""


class StatusWriter:
    """Writes the status of one job."""

    def __init__(
        self,
        cluster: KubeClient,
        owner: Owner,
        before: Document,
        build: BuildStatus,
        report_problem: Callable[[str], None],
        interval_s: float = 5.0,
    ) -> None:
        """`report_problem`: called once for each reason why the status cannot be written: users
        would take an old status for a job that makes no progress."""
        self._cluster, self._owner, self._build = cluster, owner, build
        self._report_problem, self._interval_s = report_problem, interval_s
        self._problem = ""
        self._last: Document = before
        """The status in the object, as far as we know."""
        self._own_versions: deque[str] = deque(maxlen=NUM_OWN_VERSIONS)
        self._dirty, self._urgent = asyncio.Event(), asyncio.Event()
        self._foreign_fields: set[str] = set()
        """Fields that a user has added to the status."""
        self._written_at = float("-inf")
        self._writing, self._lock = False, asyncio.Lock()
        self._unseen: Document | None = None

    def mark_dirty(self, *, urgent: bool = False) -> None:
        """`build` may return another status now. `urgent`: a condition may have changed."""
        self._dirty.set()
        if urgent:
            self._urgent.set()

    def observe(self, document: Document) -> None:
        """The object has changed, by our own write or by a user who edited the status."""
        if self._writing:
            self._unseen = document  # most likely our own write, whose answer is on its way
            return
        if document["metadata"]["resourceVersion"] in self._own_versions:
            return
        status = document.get("status") or {}
        if self._own_versions and status != self._last:
            self._foreign_fields = set(status) - set(self._last)
            self._last = status
            self.mark_dirty(urgent=True)

    async def run(self) -> None:
        """Run until cancelled or the object is gone. Failed writes are retried."""
        pauses = Backoff(0.5, 30.0)
        while True:
            await self._dirty.wait()
            wait_s = self._written_at + self._interval_s - asyncio.get_running_loop().time()
            # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the
            # event, and an operator that stands down would wait for this task without end.
            await tasks.within(wait_s, self._urgent.wait())
            await asyncio.sleep(SETTLE_S)
            self._dirty.clear()
            self._urgent.clear()
            try:
                await self.write()
                pauses.reset()
                self._note(None)
            except NotFound:
                return
            except ApiError as error:
                self._note(error)
                self._dirty.set()
                await asyncio.sleep(pauses.next_s())

    def _note(self, error: ApiError | None) -> None:
        """Log or report the result of a write, where it differs from the last one."""
        if error is None:
            if self._problem:
                log.info("the status is written again", extra={"job": self._owner.key})
            self._problem = ""
        elif self._problem != str(error):
            self._problem = str(error)
            text = f"the status cannot be written: {error}; trying again"
            if isinstance(error, TRANSIENT):
                log.info("%s", text, extra={"job": self._owner.key})
            else:
                self._report_problem(text)

    async def write(self) -> None:
        """Write the status now. Raises ApiError."""
        async with self._lock:
            self._writing = True
            try:
                await self._write()
            finally:
                self._writing = False
                unseen, self._unseen = self._unseen, None
                if unseen is not None:
                    self.observe(unseen)

    async def _write(self) -> None:
        self._written_at = asyncio.get_running_loop().time()
        status = self._build(self._last.get("conditions") or ())
        last = {name: value for name, value in self._last.items() if name != "seen"}
        if status == last and not self._foreign_fields:
            return
        # The time accounts of a job with workers change, so this costs no write of its own.
        if status.get("state") in BUSY:
            status["seen"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        namespace, name = self._owner.namespace, self._owner.name
        if self._foreign_fields:
            removal = {"status": dict.fromkeys(self._foreign_fields)}
            await self._remember(
                self._cluster.patch(JOBS, namespace, name, removal, subresource="status")
            )
            self._foreign_fields = set()
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace, "uid": self._owner.uid},
            "status": status,
        }
        written = await self._remember(
            self._cluster.patch(JOBS, namespace, name, body, subresource="status", apply=True)
        )
        self._last = written.get("status") or {}

    async def _remember(self, write: Coroutine[Any, Any, Document]) -> Document:
        written = await write
        self._own_versions.append(str(written["metadata"]["resourceVersion"]))
        return written


# -- Events ----------------------------------------------------------------------------------
PLANNED = ("resize", "new-code", "suspend", "cancel", "finish", "deadline")
_INCIDENT_REASONS = {
    "user": "UserError",
    "infrastructure": "InfrastructureFailure",
    "preemption": "Preemption",
    "hang": "Hang",
    "resize": "Resize",
    "new-code": "NewCode",
    "suspend": "Suspend",
}
_PHASES = ("pending", "suspended", *TERMINAL)


class EventDraft(NamedTuple):
    severity: Severity
    reason: str
    message: str
    annotations: Mapping[str, str] = {}


def new_events(before: JobView | None, after: JobView) -> list[EventDraft]:
    """Events between two views of a job. Pure. `before` None: this operator has just taken the job
    over, and earlier Events were recorded by the operator before it."""
    if before is None:
        return []
    events: list[EventDraft] = []
    old = {incident.number: incident for incident in before.incidents}
    for new in after.incidents:
        earlier = old.get(new.number)
        if _is_decided(new, after) and not (earlier is not None and _is_decided(earlier, before)):
            events.append(_opened(new))
        was_closed = earlier is not None and "total" in earlier.seconds
        if "total" in new.seconds and not was_closed:
            events.append(_closed(new))
    if after.generation > before.generation:
        workers = f"{after.world_size} workers" if after.world_size != 1 else "1 worker"
        mesh = f", {after.mesh}" if after.mesh else ""
        text = f"generation {after.generation}: {workers}{mesh}"
        events.append(EventDraft("Normal", "GenerationStarted", text))
    if after.storage_problem and after.storage_problem != before.storage_problem:
        events.append(EventDraft("Warning", "CheckpointFailed", after.storage_problem))
    if after.state != before.state and after.state in _PHASES:
        bad = after.state in ("failed", "cancelled") or bool(after.hold)
        severity: Severity = "Warning" if bad else "Normal"
        reason = HOLD_REASON if after.hold else PHASE_REASONS[after.state]
        events.append(EventDraft(severity, reason, after.reason))
    return events


def _is_decided(one: Incident, view: JobView) -> bool:
    """True if the action on the incident is known, or that nothing can be done for now."""
    waits = view.state in ("pending", "suspended", "failed", "cancelled")
    return bool(one.title) and (bool(one.decision) or waits)


def _opened(one: Incident) -> EventDraft:
    text = f"incident {one.number}: {one.title}"
    if one.evidence and one.evidence not in one.title:
        text += f" ({one.evidence})"
    if one.culprit_machine and one.culprit_machine not in text:
        text += f" on Kubernetes node {one.culprit_machine}"
    if one.rehearsal:
        text += " (injected)"
    if one.decision:
        text += f"; {one.decision}"
    reason = _INCIDENT_REASONS.get(one.failure_class, "Interruption")
    severity: Severity = "Normal" if one.failure_class in PLANNED else "Warning"
    return EventDraft(severity, reason, text, {names.INCIDENT: str(one.number)})


def _closed(one: Incident) -> EventDraft:
    text = f"incident {one.number} is over: {one.decision or 'training continues'}"
    least = "at least " * one.steps_lost_at_least
    lost = f"{least}{one.steps_lost} steps lost" if one.steps_lost else "no finished step lost"
    if one.steps_lost is None or (least and not one.steps_lost):
        lost = "the number of lost steps is unknown"
    text += f"; {one.seconds['total']:.2f} s, {lost}"
    return EventDraft("Normal", "Recovered", text, {names.INCIDENT: str(one.number)})
