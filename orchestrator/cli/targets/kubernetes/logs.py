"""`holdfast logs` of a job in a cluster: what its pods printed.

Owns: which pods, which of their lines, and moving on to new pods. Must not: keep anything; the logs
of a pod that is gone are gone with it.

A pod's log holds the lines of its workers, each with its rank before it, and those of its agent.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from typing import Any

from holdfast.orchestrator.cli.output import stderr
from holdfast.orchestrator.cli.render import FINISHED
from holdfast.orchestrator.errors import HoldfastError, Problem, UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import PODS, Invalid, NotFound, TooBusy, Unreachable
from holdfast.orchestrator.kube.pod_logs import lines

from ..base import LogSelector
from .session import ClusterSession
from .watch import follow as follow_job

Document = dict[str, Any]
LOOK_EVERY_S = 2.0
"""For new pods."""
LAST_WORDS_S = 5.0
_WORKER = re.compile(rb"\[rank (\d+)\] ?")
Filter = Callable[[bytes], bytes | None]


def print_logs(
    link: ClusterSession, document: Document, wanted: LogSelector, *, follow: bool
) -> None:
    """Raises UserError for what does not exist."""
    reader = _Reader(link, document, wanted)
    link.run(reader.follow if follow else reader.print)


def line_filter(wanted: LogSelector, world_size: int) -> Filter:
    """Line of a pod -> line as it is shown, or None: not wanted."""
    width = len(str(max(world_size - 1, 0)))

    def show(line: bytes) -> bytes | None:
        match = _WORKER.match(line)
        if wanted.node is not None:
            return line if match is None else None
        if match is None:
            return None
        rank, text = int(match[1]), line[match.end() :]
        if wanted.rank is not None:
            return text if rank == wanted.rank else None
        return b"[%*d] %b" % (width, rank, text)

    return show


def chosen(pods: list[Document], wanted: LogSelector, workers_per_node: int) -> list[Document]:
    """Of a job's pods, in the order of their ranks; spares last."""

    def first_rank(pod: Document) -> int:
        label = (pod["metadata"].get("labels") or {}).get(names.LABEL_RANK, "")
        return int(label) if label.isdigit() else sys.maxsize

    ordered = sorted(pods, key=lambda pod: (first_rank(pod), pod["metadata"]["name"]))
    if wanted.node is not None:
        return [pod for pod in ordered if pod["metadata"]["name"] == wanted.node]
    if wanted.rank is None:
        return ordered
    rank = wanted.rank
    # Labels come after the start: until they are there, its lines may be anywhere.
    having = [p for p in ordered if first_rank(p) <= rank < first_rank(p) + workers_per_node]
    return having or ordered


class _Reader:
    def __init__(self, link: ClusterSession, document: Document, wanted: LogSelector) -> None:
        self._link, self._document, self._wanted = link, document, wanted
        self._name: str = document["metadata"]["name"]
        self._namespace: str = document["metadata"]["namespace"]
        status = document.get("status") or {}
        self._world_size = int(status.get("worldSize") or 0)
        self._workers_per_node = int(document["spec"].get("workersPerNode") or 1)
        self._show = line_filter(wanted, self._world_size)
        self._num_shown = 0
        self._tails: dict[str, asyncio.Task[bool]] = {}

    async def print(self, cluster: KubeClient, namespace: str) -> None:
        self._check()
        pods = await self._pods(cluster)
        if not pods:
            raise HoldfastError(
                f"job {self._name}: got no pods; expected some: logs are kept by the nodes as long "
                f"as their pods exist, and {self._state()} jobs have none"
            )
        for pod in pods:
            name = pod["metadata"]["name"]
            try:
                await self._copy(cluster, name, follow=False)
            except (Invalid, NotFound) as error:
                stderr().print(f"{name}: {error.message}", style="yellow", soft_wrap=True)
        if not self._num_shown and self._wanted.node is None:
            look = self._link.hint("logs", self._name, "--node", pods[0]["metadata"]["name"])
            stderr().print(
                f"job {self._name}: no worker has written anything that is still kept; what an "
                f"agent writes: {look}",
                style="yellow",
                soft_wrap=True,
            )

    async def follow(self, cluster: KubeClient, namespace: str) -> None:
        self._check()
        if self._wanted.node is not None:
            await self._pods(cluster)
        ending = asyncio.create_task(self._until_finished(cluster))
        try:
            while not ending.done():
                await self._start_tails(cluster)
                await asyncio.wait([ending], timeout=LOOK_EVERY_S)
            ending.result()
            await self._start_tails(cluster)
            if self._tails:
                await asyncio.wait(self._tails.values(), timeout=LAST_WORDS_S)
        finally:
            tasks = [ending, *self._tails.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _start_tails(self, cluster: KubeClient) -> None:
        """Of pods that run and are not followed yet."""
        try:
            pods = await self._pods(cluster)
        except (Unreachable, TooBusy, UserError):
            return  # the next look comes soon; a pod that was there may be gone by now
        for pod in pods:
            name = pod["metadata"]["name"]
            if name not in self._tails and pod.get("status", {}).get("phase") != "Pending":
                self._tails[name] = asyncio.create_task(self._tail(cluster, name))
        for name, task in list(self._tails.items()):
            if task.done() and not task.result():
                del self._tails[name]

    async def _tail(self, cluster: KubeClient, pod: str) -> bool:
        """False: its container has not started yet."""
        try:
            await self._copy(cluster, pod, follow=True)
        except NotFound:
            return True
        except Invalid:
            return False
        return True

    async def _copy(self, cluster: KubeClient, pod: str, *, follow: bool) -> None:
        async for line in lines(cluster, self._namespace, pod, follow=follow):
            shown = self._show(line)
            if shown is not None:
                self._num_shown += 1
                sys.stdout.buffer.write(shown + b"\n")
                if follow:
                    sys.stdout.buffer.flush()
        sys.stdout.buffer.flush()

    async def _until_finished(self, cluster: KubeClient) -> None:
        async for seen in follow_job(cluster, self._document):
            if (seen.get("status") or {}).get("state") in FINISHED:
                return

    async def _pods(self, cluster: KubeClient) -> list[Document]:
        """Raises UserError for a node that there is not."""
        selector = names.selector(self._name)
        found, _version = await cluster.list_all(PODS, self._namespace, selector)
        pods = chosen(found, self._wanted, self._workers_per_node)
        if found and not pods:
            known = ", ".join(sorted(pod["metadata"]["name"] for pod in found))
            raise UserError(str(Problem("--node", str(self._wanted.node), f"one of {known}")))
        return pods

    def _check(self) -> None:
        """Raises UserError for what no pod can tell."""
        if self._wanted.generation is not None:
            expected = (
                "none with --kubernetes: a pod's log holds all generations, one after another"
            )
            problem = Problem("--generation", str(self._wanted.generation), expected)
            raise UserError(str(problem))
        rank, size = self._wanted.rank, self._world_size
        if rank is not None and size and not 0 <= rank < size:
            raise UserError(str(Problem("--rank", str(rank), f"0 to {size - 1}")))

    def _state(self) -> str:
        return str((self._document.get("status") or {}).get("state") or "new")
