"""The operator's process: stand by, lead, stand down.

Owns: the order of these, the signals of the process and its log. Must not: know jobs.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.leader_election import LEASE_S, LeaderElection, LeaseName
from holdfast.orchestrator.runtime.observe.view import JobPhase, JobView

from .http_server import HttpServer
from .manager import Manager, Options
from .metrics import OperatorState, exposition

LogFormat = Literal["json", "text"]
LEASE_NAME = "holdfast-operator"

log = logging.getLogger("holdfast.operator")


@dataclass(frozen=True)
class OperatorProcess:
    """Of this replica."""

    identity: str
    """Unique among the replicas: the pod's name."""
    lease_namespace: str = ""
    """Empty: the one we run in."""
    lease_name: str = LEASE_NAME
    lease_s: float = LEASE_S
    metrics_address: str = ""
    metrics_port: int = 8080
    context: str | None = None
    """Of the kubeconfig, outside of a cluster."""


async def run_operator(process: OperatorProcess, options: Options) -> None:
    """Until a signal. Raises UserError for what cannot be as asked."""
    operator = Operator(process, options)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    work = asyncio.create_task(operator.run())
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not work.done():
        log.info("told to stop; training goes on")
        work.cancel()
        await asyncio.wait([work])
    if not work.cancelled():
        work.result()


class Operator:
    """One replica."""

    def __init__(self, process: OperatorProcess, options: Options) -> None:
        self._process, self._options = process, options
        self.manager: Manager | None = None
        self.leader: LeaderElection | None = None
        self._clusters: tuple[KubeClient, ...] = ()

    async def run(self) -> None:
        """Stand by, lead until cancelled; then let everything go."""
        server, context = HttpServer(self._unready, self._metrics), self._process.context
        # A lease that is renewed behind what a thousand jobs ask for is a lost one.
        async with (
            await KubeClient.connect(context) as cluster,
            await KubeClient.connect(context) as own,
        ):
            self._clusters = (cluster, own)
            await server.open(self._process.metrics_address, self._process.metrics_port)
            try:
                await self._serve(cluster, own)
            finally:
                await server.close()

    async def _serve(self, cluster: KubeClient, own: KubeClient) -> None:
        """Term after term. A replica that loses its lead forgets all it knew and stands by again:
        to end instead would earn it the kubelet's growing pauses between restarts. `own`: the way
        of the lease alone."""
        namespace = self._process.lease_namespace or cluster.namespace
        lease = LeaseName(namespace, self._process.lease_name)
        while True:
            leader = LeaderElection(own, lease, self._process.identity, self._process.lease_s)
            self.leader = leader
            log.info("standing by as %s", self._process.identity)
            await leader.acquire()
            try:
                log.warning("stood down, training goes on: %s", await self._lead(cluster, leader))
            finally:
                self.manager = None
                await leader.release()

    async def _lead(self, cluster: KubeClient, leader: LeaderElection) -> str:
        """Until the lead is lost; returns why. Raises what the manager raises."""
        self.manager = Manager(cluster, self._options)
        managing = asyncio.create_task(self.manager.run())
        keeping = asyncio.create_task(leader.keep())
        try:
            await asyncio.wait([managing, keeping], return_when=asyncio.FIRST_COMPLETED)
            if managing.done():
                managing.result()
            return keeping.result()
        finally:
            for task in (managing, keeping):
                task.cancel()
            await asyncio.wait([managing, keeping])

    # -- asked by the server -------------------------------------------------------------------
    def _unready(self) -> str:
        """A replica that stands by is ready when it could take over."""
        if self.leader is None:
            return "starting"
        return self.manager.ready if self.manager is not None else self.leader.problem

    async def _metrics(self) -> bytes:
        """Agents are heard between the views of two jobs."""
        views: dict[tuple[str, str], JobView] = {}
        states: dict[tuple[str, str], JobPhase] = {}
        jobs = list(self.manager.jobs.items()) if self.manager is not None else []
        for key, job in jobs:
            view = job.view
            if view is not None:
                views[key] = view
                await asyncio.sleep(0)
            else:
                states[key] = job.state
        leading = self.leader is not None and self.leader.leading
        requests = sum((cluster.requests for cluster in self._clusters), Counter())
        return await asyncio.to_thread(exposition, OperatorState(leading, requests, views, states))


class JsonLines(logging.Formatter):
    """One JSON document per line, as log collectors like it."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, str] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        job = getattr(record, "job", "")
        if job:
            line["job"] = job
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(form: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    for name in ("holdfast", "asyncio"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("holdfast").setLevel(logging.INFO)
