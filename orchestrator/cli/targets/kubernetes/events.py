"""`holdfast events` of a job in a cluster: its Kubernetes Events, and the incidents of its status
whose Events are not kept any more.

Owns: their order and layout. Must not: say anything that is in neither.

A cluster keeps Events for an hour; the facts themselves are in the operator's journal, which is not
for reading.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from holdfast.orchestrator.api.v1alpha1 import KIND
from holdfast.orchestrator.cli.output import date, print_json_line, stderr, stdout
from holdfast.orchestrator.cli.render import FINISHED, outcome
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import EVENTS, Expired, NotFound, TooBusy, Unreachable
from holdfast.orchestrator.kube.informer import Backoff
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.observe.view import Incident

from .resource_view import time_ns, view_of_object
from .session import ClusterSession
from .watch import follow as follow_job

Document = dict[str, Any]
LAST_WORDS_S = 2.0
"""Events of a job's end come after its last status."""
_INCIDENT = re.compile(r"incident (\d+)\b")


def fields_of(document: Document) -> str:
    """Field selector of the job's Events."""
    return f"involvedObject.kind={KIND},involvedObject.name={document['metadata']['name']}"


def is_about(event: Document, document: Document) -> bool:
    """And not about an earlier job of the same name."""
    about = event.get("involvedObject") or {}
    return bool(about.get("uid") in (None, "", document["metadata"]["uid"]))


def event_ns(event: Document) -> int:
    """When it last happened."""
    series = event.get("series") or {}
    times = (
        event.get("lastTimestamp"),
        series.get("lastObservedTime"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        event["metadata"].get("creationTimestamp"),
    )
    return next((time_ns(text) for text in times if text), 0)


def print_events(link: ClusterSession, document: Document, *, follow: bool, as_json: bool) -> None:
    """Everything there is, in order; then, with `follow`, what comes until the job ends."""
    teller = _EventPrinter(document, as_json)

    async def act(cluster: KubeClient, namespace: str) -> None:
        await teller.tell_past(cluster)
        if follow:
            await teller.tell_future(cluster)

    link.run(act)


class _EventPrinter:
    def __init__(self, document: Document, as_json: bool) -> None:
        self._document, self._as_json = document, as_json
        self._namespace: str = document["metadata"]["namespace"]
        self._fields = fields_of(document)
        self._told: set[tuple[str, int]] = set()
        self._console = stdout()

    async def tell_past(self, cluster: KubeClient) -> None:
        found, _version = await cluster.list_all(EVENTS, self._namespace, fields=self._fields)
        events = [event for event in found if is_about(event, self._document)]
        numbers = {
            int(match[1])
            for event in events
            if (match := _INCIDENT.match(str(event.get("message", ""))))
        }
        view = view_of_object(self._document, Clock().now_ns())
        ended = view.state in FINISHED
        lines: list[tuple[int, Document | Incident]] = [
            (one.at_ns, one) for one in view.incidents if one.number not in numbers
        ]
        lines += [(event_ns(event), event) for event in events]
        if not lines:
            text = f"no events of job {view.name} are kept: a cluster forgets them after an hour"
            stderr().print(text, soft_wrap=True)
        for at_ns, line in sorted(lines, key=lambda line: line[0]):
            if isinstance(line, Incident):
                self._tell_incident(at_ns, line, ended=ended)
            else:
                self._tell(line)

    async def tell_future(self, cluster: KubeClient) -> None:
        telling = asyncio.create_task(self._tell_changes(cluster))
        ending = asyncio.create_task(self._until_finished(cluster))
        try:
            await asyncio.wait([telling, ending], return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                ending.result()
                await asyncio.wait([telling], timeout=LAST_WORDS_S)
            if telling.done():
                telling.result()
        finally:
            for task in (telling, ending):
                task.cancel()
            await asyncio.wait([telling, ending])

    async def _until_finished(self, cluster: KubeClient) -> None:
        async for seen in follow_job(cluster, self._document):
            if (seen.get("status") or {}).get("state") in FINISHED:
                return

    async def _tell_changes(self, cluster: KubeClient) -> None:
        async for event in self._changes(cluster):
            if is_about(event, self._document):
                self._tell(event)

    async def _changes(self, cluster: KubeClient) -> AsyncIterator[Document]:
        pauses = Backoff()
        while True:
            try:
                found, version = await cluster.list_all(
                    EVENTS, self._namespace, fields=self._fields
                )
                for event in sorted(found, key=event_ns):
                    yield event
                async for kind, event in cluster.watch(
                    EVENTS, version, self._namespace, fields=self._fields
                ):
                    pauses.reset()
                    if kind in ("ADDED", "MODIFIED"):
                        yield event
            except Expired:
                continue
            except (Unreachable, TooBusy, NotFound):
                await asyncio.sleep(pauses.next_s())

    def _tell(self, event: Document) -> None:
        count = int(event.get("count") or 1)
        if (event["metadata"]["uid"], count) in self._told:
            return
        self._told.add((event["metadata"]["uid"], count))
        reason, text = str(event.get("reason", "")), str(event.get("message", ""))
        if self._as_json:
            print_json_line(
                {
                    "at_ns": event_ns(event),
                    "event": {
                        "type": event.get("type", ""),
                        "reason": reason,
                        "message": text,
                        "count": count,
                    },
                }
            )
            return
        times = f" ({count} times)" if count > 1 else ""
        self._line(event_ns(event), reason, text + times)

    def _tell_incident(self, at_ns: int, incident: Incident, *, ended: bool) -> None:
        if self._as_json:
            print_json_line({"at_ns": at_ns, "incident": msgspec.to_builtins(incident)})
            return
        rehearsal = " (rehearsal)" if incident.rehearsal else ""
        self._line(at_ns, "status", f"incident {incident.number}: {incident.title}{rehearsal}")
        self._line(at_ns, "->", outcome(incident, ended=ended))

    def _line(self, at_ns: int, source: str, text: str) -> None:
        self._console.print(f"{date(at_ns)}  {source:<18}  {text}", soft_wrap=True)
