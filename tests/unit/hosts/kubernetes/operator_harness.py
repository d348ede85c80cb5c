"""A fake API server that keeps objects, and operators that reconcile them: enough for the whole
life of a job whose pods never start. A real API server is in tests/e2e/kubernetes."""

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
from holdfast.orchestrator.hosts.kubernetes.reconciler import (
    JobReconciler,
    ReconcilerContext,
    ReconcilerTiming,
)
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import JOBS
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.runtime.agent_server import AgentServer
from tests.unit.api.wrong_jobs import job, script
from tests.unit.kube.fake_api import FakeApi, cluster_of, eventually, status

Request = tuple[str, str]
"""(verb, path)"""
BUSY = status(429, "TooManyRequests", "too many requests, please try again later")
QUICK = ReconcilerTiming(retry_min_s=0.01)


@dataclass
class StatefulFakeApi(FakeApi):
    """`reject` returns the error of a request; None: it succeeds."""

    reject: Callable[[Request], Document | None] = lambda request: None
    requests: list[Request] = field(default_factory=list)
    """All requests, in order."""
    _version: int = 100

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        key = (request.method, request.path)
        self.requests.append(key)
        error = self.reject(key)
        if error is not None:
            return web.json_response(error, status=error["code"])
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
        elif request.method == "PUT":
            version = body["metadata"].get("resourceVersion")
            if version not in (None, self.objects[path]["metadata"].get("resourceVersion")):
                return self._refused(409, "Conflict", path)
        if request.method == "DELETE":
            return web.json_response(self.objects.pop(path))
        if request.method == "PATCH":
            # The status is applied by its only writer, so fields that it leaves out are removed.
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


def training_job(name: str, namespace: str = "team", **spec: Any) -> Document:
    """A TrainingJob object that was just created."""
    document = job(script(image="i:1", **spec), name)
    uid = f"uid-{namespace}-{name}"
    document["metadata"] = {
        "name": name, "namespace": namespace, "uid": uid, "generation": 1, "resourceVersion": "9",
    }  # fmt: skip
    return document


class FakeOperator:
    """Reconciles jobs of one API server, as a Manager does."""

    def __init__(
        self, api: StatefulFakeApi, cluster: KubeClient, root: str, compact_at_bytes: int | None
    ) -> None:
        self.api = api
        self.feed = PodInformer(cluster)
        prefixes = {"*": ["/", "ftp://"]}
        settings = PodSettings("h:1", "i", checkpoint_root=root, checkpoint_prefixes=prefixes)
        shared = OperatorContext(cluster, self.feed, NodeInformer(cluster), GangArbiter(), settings)
        self.context = ReconcilerContext(shared, AgentServer(), QUICK)
        if compact_at_bytes is not None:
            self.context.journal_compact_at_bytes = compact_at_bytes
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, document: Document) -> JobReconciler:
        """Reconcile a job that is new, or that another operator has left."""
        metadata = document["metadata"]
        path = JOBS.path(metadata["namespace"], metadata["name"])
        self.api.objects.setdefault(path, document)
        reconciler = JobReconciler(self.api.objects[path], self.context)
        self.tasks.append(asyncio.get_running_loop().create_task(reconciler.run()))
        return reconciler

    def object(self, name: str, namespace: str = "team") -> Document:
        """The object in the API server."""
        return self.api.objects[JOBS.path(namespace, name)]

    def edit(self, job: JobReconciler, **spec: Any) -> None:
        """A user's edit of the spec, as the watch reports it. None removes a field."""
        path = JOBS.path(job.owner.namespace, job.owner.name)
        old = self.api.objects[path]
        after = {name: one for name, one in {**old["spec"], **spec}.items() if one is not None}
        metadata = {**old["metadata"], "generation": old["metadata"]["generation"] + 1}
        job.update(self.api.keep(path, {**old, "metadata": metadata, "spec": after}))

    def annotate(self, job: JobReconciler, name: str, value: str) -> None:
        path = JOBS.path(job.owner.namespace, job.owner.name)
        old = self.api.objects[path]
        metadata = {**old["metadata"], "annotations": {name: value}}
        job.update(self.api.keep(path, {**old, "metadata": metadata}))

    def welcome(self, name: str, namespace: str = "team") -> wire.Welcome:
        """First message to an agent of the job."""
        return self.context.agent_server._routes[f"{namespace}/{name}"].welcome()

    async def status_when(
        self, name: str, what: str, condition: Callable[[Document], bool]
    ) -> Document:
        """The status of a job, as soon as the condition holds."""
        await eventually(
            lambda: "status" in self.object(name) and condition(self.object(name)["status"]), what
        )
        return dict(self.object(name)["status"])


@asynccontextmanager
async def running_operator(
    api: StatefulFakeApi, root: str = "", *, compact_at_bytes: int | None = None
) -> AsyncIterator[FakeOperator]:
    """An operator that stops at the end; training would go on."""
    async with cluster_of(api) as cluster:
        operator = FakeOperator(api, cluster, root, compact_at_bytes)
        informing = asyncio.create_task(operator.feed.run())
        try:
            yield operator
        finally:
            for task in (*operator.tasks, informing):
                task.cancel()
            await asyncio.wait([*operator.tasks, informing])
            await operator.context.agent_server.close()
            for task in operator.tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    task.result()
