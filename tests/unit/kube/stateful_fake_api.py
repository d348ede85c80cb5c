"""A SmallApi that keeps what it is told: enough of an API server for the whole life of a job whose
pods never start, and operators that come and go beside it.

Owns: objects by path, refusals of single requests, and the list of what was asked. Must not: check
anything; a real API server is in tests/e2e/kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from holdfast.orchestrator.backends.kubernetes.backend import OperatorContext
from holdfast.orchestrator.backends.kubernetes.gang_arbiter import GangArbiter
from holdfast.orchestrator.backends.kubernetes.node_informer import NodeInformer
from holdfast.orchestrator.backends.kubernetes.pod_informer import PodInformer
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings
from holdfast.orchestrator.hosts.kubernetes.reconciler import JobReconciler, ReconcilerContext
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.runtime.agent_server import AgentServer
from tests.unit.api.wrong_jobs import job, script
from tests.unit.kube.fake_api import FakeApi, cluster_of, eventually, status

Document = dict[str, Any]
Request = tuple[str, str]
"""(verb, path)"""
BUSY = status(429, "TooManyRequests", "too many requests, please try again later")


@dataclass
class StatefulFakeApi(FakeApi):
    """`refusal`: what it says to which requests instead. `asked`: all requests, in order."""

    refusal: Callable[[Request], Document | None] = lambda request: None
    asked: list[Request] = field(default_factory=list)
    _version: int = 100

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = (request.method, request.path)
        self.asked.append(asked)
        refusal = self.refusal(asked)
        if refusal is not None:
            return web.json_response(refusal, status=refusal["code"])
        if request.method == "GET":
            return await super().answer(request)
        body = await request.json() if request.can_read_body else {}
        path = request.path.removesuffix("/status")
        if request.method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if "dryRun" in request.query:
                return web.json_response(body)
            if path in self.objects:
                return self._refused(409, "AlreadyExists", path)
        elif path not in self.objects:
            return self._refused(404, "NotFound", path)
        if request.method == "DELETE":
            return web.json_response(self.objects.pop(path))
        if request.method == "PATCH":
            # Of a status: applied by the only one who writes it, what it no longer names is gone.
            body = {**body, "metadata": {**self.objects[path]["metadata"]}}
            body = {**self.objects[path], **body}
        return web.json_response(self.keep(path, body))

    def keep(self, path: str, document: Document) -> Document:
        self._version += 1
        metadata = {**document["metadata"], "resourceVersion": str(self._version)}
        self.objects[path] = {**document, "metadata": metadata}
        return self.objects[path]

    def _refused(self, code: int, reason: str, path: str) -> web.Response:
        return web.json_response(status(code, reason, path), status=code)


def wanted(name: str, namespace: str = "team", **spec: Any) -> Document:
    """A TrainingJob as the API server has it when it was just made."""
    document = job(script(image="i:1", **spec), name)
    uid = f"uid-{namespace}-{name}"
    document["metadata"] = {
        "name": name, "namespace": namespace, "uid": uid, "generation": 1, "resourceVersion": "9",
    }  # fmt: skip
    return document


class World:
    """One API server and one operator's part of it: jobs are taken up as a Manager would."""

    def __init__(self, api: StatefulFakeApi, cluster: KubeClient, root: str) -> None:
        self.api = api
        self.feed = PodInformer(cluster)
        settings = PodSettings("h:1", "i", checkpoint_root=root)
        shared = OperatorContext(cluster, self.feed, NodeInformer(cluster), GangArbiter(), settings)
        self.context = ReconcilerContext(shared, AgentServer())
        self.tasks: list[asyncio.Task[None]] = []

    def take(self, document: Document) -> JobReconciler:
        """A job that is new, or that another operator has left behind."""
        metadata = document["metadata"]
        path = JOBS.path(metadata["namespace"], metadata["name"])
        self.api.objects.setdefault(path, document)
        taken = JobReconciler(self.api.objects[path], self.context)
        self.tasks.append(asyncio.get_running_loop().create_task(taken.run()))
        return taken

    def seen(self, name: str, namespace: str = "team") -> Document:
        """The object as it stands there."""
        return self.api.objects[JOBS.path(namespace, name)]

    def edit(self, taken: JobReconciler, **spec: Any) -> None:
        """A person's change, which comes over the watch. A field that is None is taken away."""
        path = JOBS.path(taken.owner.namespace, taken.owner.name)
        old = self.api.objects[path]
        after = {name: one for name, one in {**old["spec"], **spec}.items() if one is not None}
        metadata = {**old["metadata"], "generation": old["metadata"]["generation"] + 1}
        taken.update(self.api.keep(path, {**old, "metadata": metadata, "spec": after}))

    def welcome(self, name: str, namespace: str = "team") -> wire.Welcome:
        """What an agent of it would hear."""
        return self.context.endpoint._guests[f"{namespace}/{name}"].welcome()

    async def told(self, name: str, what: str, true: Callable[[Document], bool]) -> Document:
        """Its status, when it says this."""
        await eventually(
            lambda: "status" in self.seen(name) and true(self.seen(name)["status"]), what
        )
        return dict(self.seen(name)["status"])


@asynccontextmanager
async def operating(api: StatefulFakeApi, root: str = "") -> AsyncIterator[World]:
    """An operator, until it stops: training would go on."""
    async with cluster_of(api) as cluster:
        world = World(api, cluster, root)
        feeding = asyncio.create_task(world.feed.run())
        try:
            yield world
        finally:
            for task in (*world.tasks, feeding):
                task.cancel()
            await asyncio.wait([*world.tasks, feeding])
            await world.context.endpoint.close()
            for task in world.tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    task.result()
