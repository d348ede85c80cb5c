"""Prints the Events and the pod logs of a job in a cluster.

A cluster keeps Events for an hour, so `debug events` also prints the incidents of the status
whose Events are gone. A pod's log holds the lines of its workers, each after its rank and
generation, and those of its agent; it is deleted with the pod.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, BinaryIO, Self

import msgspec

from holdfast.orchestrator import tasks
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.cli.log_files import LogMissing, folded, heading, one_of
from holdfast.orchestrator.cli.output import date, print_json_line, stderr, stdout
from holdfast.orchestrator.cli.rank_lines import RankLines
from holdfast.orchestrator.cli.render import outcome
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.informer import Backoff
from holdfast.orchestrator.kube.pod_logs import lines
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.job_directory import JobDirectory
from holdfast.orchestrator.runtime.observe.view import Incident

from ....kube.errors import EVENTS, PODS, Expired, Invalid, NotFound, TooBusy, Unreachable
from ..remote_job import LogSelector
from ..tempdir import scratch
from .resource_view import time_ns, view_of_object
from .session import ClusterSession, annotation_of, events_selector, until_finished

LAST_EVENTS_S = 2.0
"""The Events of a job's end follow its last status."""
LAST_LOGS_S = 5.0
NEW_PODS_INTERVAL_S = 2.0
MAX_PODS = 16
"""Pods whose logs `holdfast run` reads until rank 0's pod is known."""
_WORKER_LINE = re.compile(rb"\[rank (\d+), gen (\d+)\] ?")


# -- Events ----------------------------------------------------------------------------------
def print_events(
    session: ClusterSession, document: Document, *, follow: bool, as_json: bool
) -> None:
    """All that are kept, in order; then, with `follow`, new ones until the job ends."""
    printer = _EventPrinter(document, as_json)

    async def act(cluster: KubeClient, namespace: str) -> None:
        await printer.print_kept(cluster)
        if follow:
            await printer.follow(cluster)

    session.run(act)


class _EventPrinter:
    def __init__(self, document: Document, as_json: bool) -> None:
        self._document, self._as_json = document, as_json
        self._namespace: str = document["metadata"]["namespace"]
        self._selector = events_selector(document)
        self._printed: set[tuple[str, int]] = set()
        self._console = stdout()

    async def print_kept(self, cluster: KubeClient) -> None:
        events, _version = await self._list(cluster)
        with_events = {annotation_of(event, names.INCIDENT) for event in events}
        view = view_of_object(self._document, Clock().now_ns())
        kept: list[tuple[int, Document | Incident]] = [
            (i.at_ns, i) for i in view.incidents if str(i.number) not in with_events
        ]
        kept += [(event_ns(event), event) for event in events]
        if not kept:
            text = f"no events of job {view.name} are kept: a cluster deletes them after an hour"
            stderr().print(text, soft_wrap=True)
        for _at_ns, shown in sorted(kept, key=lambda entry: entry[0]):
            if isinstance(shown, Incident):
                self._print_incident(shown, ended=view.state in TERMINAL)
            else:
                self._print(shown)

    async def follow(self, cluster: KubeClient) -> None:
        printing = asyncio.create_task(self._print_new(cluster))
        ending = asyncio.create_task(until_finished(cluster, self._document))
        try:
            await asyncio.wait([printing, ending], return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                ending.result()
                await asyncio.wait([printing], timeout=LAST_EVENTS_S)
            if printing.done():
                printing.result()
        finally:
            await tasks.end([printing, ending])

    async def _print_new(self, cluster: KubeClient) -> None:
        pauses = Backoff()
        while True:
            try:
                events, version = await self._list(cluster)
                for event in sorted(events, key=event_ns):
                    self._print(event)
                async for kind, event in cluster.watch(
                    EVENTS, version, self._namespace, fields=self._selector
                ):
                    pauses.reset()
                    if kind in ("ADDED", "MODIFIED"):
                        self._print(event)
            except Expired:
                continue
            except (Unreachable, TooBusy, NotFound):
                await asyncio.sleep(pauses.next_s())

    async def _list(self, cluster: KubeClient) -> tuple[list[Document], str]:
        return await cluster.list_all(EVENTS, self._namespace, fields=self._selector)

    def _print(self, event: Document) -> None:
        count = int(event.get("count") or 1)
        key = (str(event["metadata"]["uid"]), count)
        if key in self._printed:
            return
        self._printed.add(key)
        at_ns = event_ns(event)
        reason, text = str(event.get("reason", "")), str(event.get("message", ""))
        if self._as_json:
            kind = event.get("type", "")
            fields = {"type": kind, "reason": reason, "message": text, "count": count}
            print_json_line({"at_ns": at_ns, "event": fields})
            return
        self._print_line(at_ns, reason, f"{text} ({count} times)" if count > 1 else text)

    def _print_incident(self, incident: Incident, *, ended: bool) -> None:
        at_ns = incident.at_ns
        if self._as_json:
            print_json_line({"at_ns": at_ns, "incident": msgspec.to_builtins(incident)})
            return
        injected = " (injected)" if incident.rehearsal else ""
        text = f"incident {incident.number}: {incident.title}{injected}"
        self._print_line(at_ns, "status", text)
        self._print_line(at_ns, "->", outcome(incident, ended=ended))

    def _print_line(self, at_ns: int, source: str, text: str) -> None:
        self._console.print(f"{date(at_ns)}  {source:<18}  {text}")


def event_ns(event: Document) -> int:
    """Time of an Event's last occurrence."""
    times = (
        event.get("lastTimestamp"),
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        event["metadata"].get("creationTimestamp"),
    )
    return next((time_ns(text) for text in times if text), 0)


# -- logs ------------------------------------------------------------------------------------
LineWriter = Callable[[bytes], object]


def print_logs(
    session: ClusterSession, document: Document, selector: LogSelector, *, follow: bool
) -> None:
    """Raises UserError for a node, rank or generation that cannot be shown."""
    out = sys.stdout.buffer

    def write(line: bytes) -> None:
        out.write(line + b"\n")
        if follow:
            out.flush()

    reader = _LogReader(session, document, selector, write, headings=True)
    session.run(reader.follow if follow else reader.print)
    out.flush()


class LinesOfRank0:
    """Shows what rank 0 prints beside the display of a job, inside of the context: its lines go
    through a file of this machine, so that the display shows them like a local job's."""

    def __init__(self, session: ClusterSession, display: Display) -> None:
        self._session, self._display = session, display
        self._resources = ExitStack()
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self._display.wants_lines is not False:
            directory = JobDirectory(self._resources.enter_context(scratch("holdfast-logs-")))
            path = directory.rank_log(1, 0)
            path.parent.mkdir(parents=True)
            self._file = self._resources.enter_context(path.open("wb", buffering=0))
            self._resources.enter_context(RankLines(directory, self._display.line))
        return self

    def __exit__(self, *error: Any) -> None:
        self._resources.close()

    async def follow(self, cluster: KubeClient, document: Document, *, only_new: bool) -> None:
        """Follow until the job has ended. What cannot be read is noted once: the display goes
        on."""
        wanted, file = self._display.wants_lines, self._file
        if wanted is None:
            wanted = "recipe" not in (document["spec"].get("entrypoint") or {})
        if not wanted or file is None:
            return
        selector = LogSelector(rank=0)
        reader = _LogReader(
            self._session, document, selector, lambda line: file.write(line + b"\n"), MAX_PODS
        )
        try:
            await reader.follow(cluster, document["metadata"]["namespace"], only_new=only_new)
        except HoldfastError as error:
            self._display.note(f"what rank 0 prints cannot be shown: {error}")


class LineFilter:
    """Turns a line of a pod into the printed one; None: it is not selected."""

    def __init__(self, selector: LogSelector, world_size: int, *, headings: bool = False) -> None:
        """`headings`: a line before the first one of another generation than the last line's."""
        self._selector, self._headings = selector, headings
        self._width = len(str(max(world_size - 1, 0)))
        self._generation = 1
        self._ranks: dict[int, set[int]] = {}
        """Generation -> ranks with a line."""

    def __call__(self, line: bytes) -> bytes | None:
        match, selector = _WORKER_LINE.match(line), self._selector
        if selector.node is not None:
            return folded(line) if match is None else None
        if match is None:
            return None
        rank, generation = int(match[1]), int(match[2])
        self._ranks.setdefault(generation, set()).add(rank)
        if selector.rank not in (None, rank) or selector.generation not in (None, generation):
            return None
        text = folded(line[match.end() :])
        if selector.rank is None:
            text = b"[%*d] %b" % (self._width, rank, text)
        if self._headings and selector.generation is None and generation != self._generation:
            self._generation = generation
            text = b"%b\n%b" % (heading(generation).encode(), text)
        return text

    def check_found(self) -> None:
        """Check the end of the lines if none was selected. Raises LogMissing if the selected
        generation has none of this rank."""
        rank, generation = self._selector.rank, self._selector.generation
        if generation is None or self._selector.node is not None:
            return
        ranks = self._ranks.get(generation, set())
        if rank is not None and ranks:
            ranks_known = [str(number) for number in sorted(ranks)]
            raise LogMissing.of("--rank", str(rank), one_of(ranks_known, "rank"))
        ranks_known = [str(number) for number in sorted(self._ranks)]
        fix = "the lines of a pod are deleted with it"
        expected = one_of(ranks_known, "generation")
        raise LogMissing.of("--generation", str(generation), expected, fix)


def select_pods(
    pods: list[Document], selector: LogSelector, workers_per_node: int
) -> list[Document]:
    """Pods in the order of their ranks; spares last."""

    def first_rank(pod: Document) -> int:
        label = (pod["metadata"].get("labels") or {}).get(names.LABEL_RANK, "")
        return int(label) if label.isdigit() else sys.maxsize

    ordered = sorted(pods, key=lambda pod: (first_rank(pod), pod["metadata"]["name"]))
    if selector.node is not None:
        return [pod for pod in ordered if pod["metadata"]["name"] == selector.node]
    if selector.rank is None or selector.generation is not None:  # the labels are the newest one's
        return ordered
    rank = selector.rank
    matching = [p for p in ordered if first_rank(p) <= rank < first_rank(p) + workers_per_node]
    # Labels follow the first step of a generation; before that, any pod may have the rank.
    return matching or ordered


class _LogReader:
    def __init__(
        self,
        session: ClusterSession,
        document: Document,
        selector: LogSelector,
        write: LineWriter,
        max_pods: int | None = None,
        *,
        headings: bool = False,
    ) -> None:
        """`max_pods`: of more, none is read before it is known which of them has the rank."""
        self._session, self._document, self._selector = session, document, selector
        self._write, self._max_pods = write, max_pods
        self._name: str = document["metadata"]["name"]
        self._namespace: str = document["metadata"]["namespace"]
        status = document.get("status") or {}
        self._state = str(status.get("state") or "new")
        self._world_size = int(status.get("worldSize") or 0)
        self._filter = LineFilter(selector, self._world_size, headings=headings)
        self._num_printed = 0
        self._tails: dict[str, asyncio.Task[None]] = {}

    async def print(self, cluster: KubeClient, namespace: str) -> None:
        self._check()
        pods = await self._pods(cluster)
        if not pods:
            raise HoldfastError(
                f"job {self._name}: got no pods; expected at least one: logs are deleted with "
                f"their pods, and {self._state} jobs have none"
            )
        for name in pods:
            try:
                await self._copy(cluster, name, follow=False)
            except (Invalid, NotFound) as error:
                stderr().print(f"{name}: {error.message}", style="yellow", soft_wrap=True)
        if not self._num_printed:
            self._filter.check_found()
        if not self._num_printed and self._selector.node is None:
            hint = self._session.hint("logs", self._name, "--node", next(iter(pods)))
            text = f"job {self._name}: workers have printed nothing; output of an agent: {hint}"
            stderr().print(text, style="yellow", soft_wrap=True)

    async def follow(self, cluster: KubeClient, namespace: str, *, only_new: bool = False) -> None:
        """`only_new`: nothing that the present pods have printed before."""
        self._check()
        if self._selector.node is not None:
            await self._pods(cluster)
        if only_new:
            await self._start_tails(cluster, only_new=True)
        ending = asyncio.create_task(until_finished(cluster, self._document))
        try:
            while not ending.done():
                await self._start_tails(cluster)
                await asyncio.wait([ending], timeout=NEW_PODS_INTERVAL_S)
            ending.result()
            await self._start_tails(cluster)
            if self._tails:
                await asyncio.wait(self._tails.values(), timeout=LAST_LOGS_S)
        finally:
            await tasks.end([ending, *self._tails.values()])
        if not self._num_printed:
            self._filter.check_found()

    async def _start_tails(self, cluster: KubeClient, *, only_new: bool = False) -> None:
        """Follow pods that are running and not followed yet."""
        for task in self._tails.values():
            if task.done():
                task.result()
        try:
            pods = await self._pods(cluster)
        except (Unreachable, TooBusy, UserError):
            return  # tried again soon; a named pod may be gone by now
        if self._max_pods is not None and len(pods) > self._max_pods:
            return
        for name, pod in pods.items():
            if name not in self._tails and pod.get("status", {}).get("phase") != "Pending":
                tail = self._tail(cluster, name, only_new=only_new)
                self._tails[name] = asyncio.create_task(tail)

    async def _tail(self, cluster: KubeClient, pod: str, *, only_new: bool) -> None:
        while True:
            try:
                await self._copy(cluster, pod, follow=True, only_new=only_new)
            except NotFound:
                return
            except Invalid:  # the container has not started
                await asyncio.sleep(NEW_PODS_INTERVAL_S)
                continue
            return

    async def _copy(
        self, cluster: KubeClient, pod: str, *, follow: bool, only_new: bool = False
    ) -> None:
        async for line in lines(cluster, self._namespace, pod, follow=follow, only_new=only_new):
            shown = self._filter(line)
            if shown is not None:
                self._num_printed += 1
                self._write(shown)

    async def _pods(self, cluster: KubeClient) -> dict[str, Document]:
        """The selected pods by name, in order. Raises UserError for an unknown node."""
        label_selector = names.selector(self._name)
        documents, _version = await cluster.list_all(PODS, self._namespace, label_selector)
        per_node = int(self._document["spec"].get("workersPerNode") or 1)
        pods = select_pods(documents, self._selector, per_node)
        if documents and not pods:
            pod_names = ", ".join(sorted(pod["metadata"]["name"] for pod in documents))
            raise UserError.of("--node", str(self._selector.node), f"one of {pod_names}")
        return {pod["metadata"]["name"]: pod for pod in pods}

    def _check(self) -> None:
        """Raises UserError for what pod logs cannot show."""
        rank, size = self._selector.rank, self._world_size
        # Another generation may have had more ranks.
        of_newest = self._selector.generation is None
        if of_newest and rank is not None and size and not 0 <= rank < size:
            raise UserError.of("--rank", str(rank), f"0 to {size - 1}")
