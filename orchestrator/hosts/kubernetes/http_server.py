"""/healthz, /readyz and /metrics of the operator.

Owns: the HTTP server. Must not: know what makes it ready; it is told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from holdfast.orchestrator.runtime.agent_server import cannot_listen


class HttpServer:
    """Answers from the event loop itself: an answer is a proof that the loop turns."""

    def __init__(self, unready: Callable[[], str], metrics: Callable[[], Awaitable[bytes]]) -> None:
        """`unready`: why not; empty when ready. `metrics`: the page of a scrape."""
        self._unready, self._metrics = unready, metrics
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def open(self, address: str, port: int) -> None:
        """Raises UserError when the port cannot be had."""
        application = web.Application()
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/readyz", self._ready)
        application.router.add_get("/metrics", self._scrape)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, address or None, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise cannot_listen("--metrics-port", address, port, error) from None
        self.port = int(self._runner.addresses[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        problem = self._unready()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    async def _scrape(self, request: web.Request) -> web.Response:
        body = await self._metrics()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
