"""The operator's process: leader election, signals, the log, and the HTTP server of health checks
and metrics."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from holdfast.orchestrator import tasks
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.leader_election import LEASE_S, LeaderElection, LeaseName
from holdfast.orchestrator.protocol.strangers import ConnectionLimit, listen, raise_descriptor_limit
from holdfast.orchestrator.runtime.agent_server import cannot_listen
from holdfast.orchestrator.runtime.observe.view import JobPhase, JobView

from .manager import Manager, Options
from .metrics import JobKey, OperatorState, exposition
from .peers import no_other_leads

LogFormat = Literal["json", "text"]
LEASE_NAME = "holdfast-operator"

log = logging.getLogger("holdfast.operator")


@dataclass(frozen=True)
class OperatorProcess:
    """Options of this replica."""

    identity: str
    """Unique among the replicas: the pod's name."""
    lease_namespace: str = ""
    """Empty: the operator's own."""
    lease_name: str = LEASE_NAME
    lease_s: float = LEASE_S
    metrics_address: str = ""
    metrics_port: int = 8080
    context: str | None = None
    """Context of the kubeconfig, outside of a cluster."""


async def run_operator(process: OperatorProcess, options: Options) -> None:
    """Run until SIGTERM or SIGINT. Raises UserError for invalid options."""
    raise_descriptor_limit()
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
        log.info("stopping on a signal; training continues")
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
        """Run until cancelled."""
        server, context = HttpServer(self._not_ready, self._metrics), self._process.context
        # The lease has a client of its own: queued behind the requests of a thousand jobs, it
        # would be renewed too late.
        async with (
            await KubeClient.connect(context) as cluster,
            await KubeClient.connect(context) as lease_client,
        ):
            self._clusters = (cluster, lease_client)
            await server.open(self._process.metrics_address, self._process.metrics_port)
            try:
                await self._serve(cluster, lease_client)
            finally:
                await server.close()

    async def _serve(self, cluster: KubeClient, lease_client: KubeClient) -> None:
        """One term as leader after the other. A replica that loses the lease drops all its state
        and stands by again; if it exited, the kubelet would delay each restart longer."""
        namespace = self._process.lease_namespace or cluster.namespace
        lease = LeaseName(namespace, self._process.lease_name)
        while True:
            leader = LeaderElection(
                lease_client, lease, self._process.identity, self._process.lease_s
            )
            self.leader = leader
            log.info("standing by as %s", self._process.identity)
            await leader.acquire()
            try:
                log.warning("stood down, training continues: %s", await self._lead(cluster, leader))
            finally:
                self.manager = None
                await leader.release()

    async def _lead(self, cluster: KubeClient, leader: LeaderElection) -> str:
        """Run until the lease is lost; returns why. Raises what the manager raises."""
        self.manager = Manager(cluster, self._options)
        managing = asyncio.create_task(self.manager.run())
        endpoint = self._options.pods.endpoint
        keeping = asyncio.create_task(leader.keep(lambda: no_other_leads(endpoint)))
        try:
            await asyncio.wait([managing, keeping], return_when=asyncio.FIRST_COMPLETED)
            if managing.done():
                managing.result()
            return keeping.result()
        finally:
            if not managing.done() and not keeping.done():
                await self.manager.leave()
            await tasks.end([managing, keeping])

    # -- health and metrics --------------------------------------------------------------------
    def _not_ready(self) -> str:
        """Reason why this replica is not ready; empty: it is. A standby replica is ready when it
        could take over."""
        if self.leader is None:
            return "starting"
        return self.manager.not_ready if self.manager is not None else self.leader.problem

    async def _metrics(self) -> bytes:
        """Yields to the event loop between two jobs, so that agents do not wait."""
        views: dict[JobKey, JobView] = {}
        states: dict[JobKey, JobPhase] = {}
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


class HttpServer:
    """/healthz, /readyz and /metrics. Answers come from the event loop, so that an answer proves
    that the loop is not blocked."""

    def __init__(
        self, not_ready: Callable[[], str], metrics: Callable[[], Awaitable[bytes]]
    ) -> None:
        """`not_ready`: why not; empty when ready. `metrics`: the text of a scrape."""
        self._not_ready, self._metrics = not_ready, metrics
        self._runner: web.AppRunner | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self, address: str, port: int) -> None:
        """Raises UserError when the port cannot be opened."""
        application = web.Application()
        application.on_response_prepare.append(one_request)
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/readyz", self._ready)
        application.router.add_get("/metrics", self._scrape)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        try:
            listener = listen(address, port)
        except OSError as error:
            await self._runner.cleanup()
            raise cannot_listen("--metrics-port", address, port, error) from None
        self.port = int(listener.getsockname()[1])
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None
        serving = ConnectionLimit().serve(
            listener, lambda sock: loop.connect_accepted_socket(server, sock)
        )
        self._serving = loop.create_task(serving)

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        problem = self._not_ready()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    async def _scrape(self, request: web.Request) -> web.Response:
        body = await self._metrics()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def one_request(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection after this answer; each connection has a limited time."""
    response.force_close()


class JsonLines(logging.Formatter):
    """One JSON document per line, for log collectors."""

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
