"""A small HTTP server that answers as an API server does: lists, watches and single objects.

Owns: these answers, said by the test line by line. Must not: know what the objects mean, or keep
to more of the protocol than tests here need; a real API server is in tests/e2e/kubernetes.
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
"""What a test waits for takes a second at most."""


@dataclass
class Watch:
    """One watch that a client has opened, and what it hears."""

    version: str
    """From which it was asked for."""
    _lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    def tell(self, kind: str, document: Document) -> None:
        line = json.dumps({"type": kind, "object": document})
        self._lines.put_nowait(line.encode() + b"\n")

    def end(self) -> None:
        self._lines.put_nowait(None)

    async def next(self) -> bytes | None:
        return await self._lines.get()


def status(code: int, reason: str, message: str = "") -> Document:
    """The document of a refusal."""
    return {
        "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message,
    }  # fmt: skip


@dataclass
class FakeApi:
    """Of one kind of object that is listed and watched, and of any that are read one by one."""

    objects: dict[str, Document] = field(default_factory=dict)
    """Path -> what GET of it answers; without: 404."""
    listed: list[Document] = field(default_factory=list)
    version: str = "1"
    """Of the list."""
    num_lists: int = 0
    refusals: list[Document] = field(default_factory=list)
    """Answers to the next requests, each once."""
    made: dict[str, Document] = field(default_factory=dict)
    """Pods that were made and not deleted, by name."""
    num_made: int = 0
    """Of all pods that ever were made."""
    room: int = 1_000_000
    """Pods that a quota lets be there."""
    lost_answers: int = 0
    """So many of the next pods are made, and the connection breaks before anybody hears of it."""
    token: str = ""
    """Which it wants to see; empty: none."""
    watches: asyncio.Queue[Watch] = field(default_factory=asyncio.Queue)
    """Those that were opened, in order."""
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
    """Its URL, while it answers."""
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
    """A client of it."""
    async with serving(api) as url:
        configuration = library.Configuration(host=url)
        async with KubeClient(library.ApiClient(configuration), "default") as cluster:
            yield cluster


async def eventually(true: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(BOUND_S):
        while not true():
            await asyncio.sleep(0.01)
    assert true(), what
