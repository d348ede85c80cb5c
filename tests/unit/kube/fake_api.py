"""A fake API server over HTTP: lists, watches and single objects, as a test scripts them.

A real API server is in tests/e2e/kubernetes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kubernetes.aio import client as library

from holdfast.orchestrator.kube.client import KubeClient

Document = dict[str, Any]
BOUND_S = 30
"""Usually a second is enough."""


@dataclass
class Watch:
    """One watch that a client has opened, and the events that it receives."""

    version: str
    """The resource version of the request."""
    _lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    def send(self, kind: str, document: Document) -> None:
        line = json.dumps({"type": kind, "object": document})
        self._lines.put_nowait(line.encode() + b"\n")

    def end(self) -> None:
        self._lines.put_nowait(None)

    async def next(self) -> bytes | None:
        return await self._lines.get()


def status(code: int, reason: str, message: str = "") -> Document:
    """A Status document."""
    return {
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


@dataclass
class FakeApi:
    """Serves one kind of object by list and watch, and single objects by path."""

    objects: dict[str, Document] = field(default_factory=dict)
    """Path -> response to GET; other paths are 404."""
    logs: dict[str, bytes] = field(default_factory=dict)
    """Path of a pod's log -> its lines with their timestamps."""
    listed: list[Document] = field(default_factory=list)
    nodes: list[Document] = field(default_factory=list)
    """Kubernetes nodes."""
    version: str = "1"
    """The resource version of the list."""
    num_lists: int = 0
    refusals: list[Document] = field(default_factory=list)
    """Responses to the next requests, each once."""
    made: dict[str, Document] = field(default_factory=dict)
    """Pods that were created and not deleted, by name."""
    num_made: int = 0
    """Pods ever created."""
    room: int = 1_000_000
    """Quota of pods."""
    lost_answers: int = 0
    """The connection breaks after the creation of this many of the next pods."""
    token: str = ""
    """Required token; empty: none."""
    watches: asyncio.Queue[Watch] = field(default_factory=asyncio.Queue)
    """Opened watches, in order."""
    _opened: list[Watch] = field(default_factory=list)

    def close(self) -> None:
        for watch in self._opened:
            watch.end()

    async def next_watch(self) -> Watch:
        async with asyncio.timeout(BOUND_S):
            return await self.watches.get()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _refusal(status(401, "Unauthorized", "Unauthorized"))
        if self.refusals:
            return _refusal(self.refusals.pop(0))
        if request.method == "POST":
            return await self._make(request)
        if request.method == "DELETE" and self.made.pop(request.path.rsplit("/", 1)[1], None):
            return web.json_response({})
        if "watch" in request.query:
            return await self._watch(request)
        if request.path in self.objects:
            return web.json_response(self.objects[request.path])
        if request.path in self.logs:
            return web.Response(body=self.logs[request.path])
        if request.path == "/api/v1/nodes":
            return web.json_response({"metadata": {}, "items": self.nodes})
        if request.path.endswith("/pods"):
            self.num_lists += 1
            metadata = {"resourceVersion": self.version}
            return web.json_response({"metadata": metadata, "items": self.listed})
        return _refusal(status(404, "NotFound", f"{request.path} not found"))

    async def _make(self, request: web.BaseRequest) -> web.StreamResponse:
        pod = await request.json()
        name = pod["metadata"]["name"]
        if name in self.made:
            return _refusal(status(409, "AlreadyExists", f'pods "{name}" already exists'))
        if len(self.made) >= self.room:
            return _refusal(status(403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota'))
        self.made[name] = pod
        self.num_made += 1
        if self.lost_answers:
            self.lost_answers -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(pod)

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        watch = Watch(request.query["resourceVersion"])
        self._opened.append(watch)
        response = web.StreamResponse()
        await response.prepare(request)
        self.watches.put_nowait(watch)
        while (line := await watch.next()) is not None:
            await response.write(line)
        return response


def _refusal(document: Document) -> web.Response:
    return web.json_response(document, status=document["code"])


@asynccontextmanager
async def serving(api: FakeApi) -> AsyncIterator[str]:
    """The URL of the running server."""
    server = web.Server(api.answer, handler_cancellation=True)
    runner = web.ServerRunner(server, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        api.close()
        await runner.cleanup()


@asynccontextmanager
async def cluster_of(api: FakeApi) -> AsyncIterator[KubeClient]:
    """A client of the server."""
    async with serving(api) as url:
        configuration = library.Configuration(host=url)
        async with KubeClient(library.ApiClient(configuration), "default") as cluster:
            yield cluster


async def eventually(true: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(BOUND_S):
        while not true():
            await asyncio.sleep(0.01)
    assert true(), what
