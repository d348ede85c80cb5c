"""Jobs of a Kubernetes cluster: TrainingJob objects in a namespace.

Owns: finding, listing, creating and watching them. Must not: speak to an operator; everything goes
through the API server, so that rights on TrainingJobs are all that a user needs.

`run` creates the object and never changes one that is there: whoever takes a name that is in use by
mistake must not change somebody else's job. The very same job is watched instead.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_to_mapping, load_job
from holdfast.orchestrator.api.v1alpha1.crd import job_from_resource
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.cli.render import FINISHED
from holdfast.orchestrator.errors import Problem, SpecError, UserError
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import (
    JOBS,
    ApiError,
    Conflict,
    NotFound,
    Resource,
    TooBusy,
    Unreachable,
)
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.observe.view import JobView

from ..base import RunResult
from .job import KubernetesJob, pods_of
from .resource_view import neglect, nodes_of, view_of_object
from .session import ClusterSession
from .watch import follow

Document = dict[str, Any]
NAMESPACES = Resource("", "v1", "namespaces", namespaced=False)
LOOK_EVERY_S = 5.0
"""While nothing changes: whether an operator is there at all."""


class KubernetesTarget:
    """One namespace of a cluster."""

    def __init__(
        self,
        namespace: str | None,
        context: str | None,
        kubeconfig: Path | None,
        *,
        plugin: bool = False,
    ) -> None:
        self._link = ClusterSession(namespace, context, kubeconfig, plugin=plugin)
        self._searched = namespace or ""

    def find(self, name: str) -> KubernetesJob:
        async def act(cluster: KubeClient, namespace: str) -> Document:
            return await _get(cluster, namespace, name, self._link)

        return KubernetesJob(self._link, self._link.run(act))

    def views(self) -> list[JobView]:
        async def act(cluster: KubeClient, namespace: str) -> list[Document]:
            self._searched = namespace
            found, _version = await cluster.list_all(JOBS, namespace)
            if not found:
                await _check_namespace(cluster, namespace)
            return found

        now_ns = Clock().now_ns()
        return [view_of_object(document, now_ns) for document in self._link.run(act)]

    def nothing(self) -> str:
        start = self._link.hint("run", "FILE")
        return f"no jobs in namespace {self._searched}; start one with {start}"

    def command(self, *words: str) -> str:
        return self._link.hint(*words).strip("`")

    def reads(self, path: str) -> bool:
        return "://" in path  # anything else is a directory of the pods

    def ending(self) -> AbstractContextManager[None]:
        return nullcontext()

    # -- run -----------------------------------------------------------------------------------
    def run(self, file: Path | None, attach: str | None, display: Display) -> RunResult:
        job = load_job(file) if file is not None else None
        name = job.name if job is not None else str(attach)
        watcher = _Watcher(self._link, display)

        async def act(cluster: KubeClient, namespace: str) -> JobView:
            if job is not None:
                document = await self._create(cluster, namespace, job, display)
            else:
                document = await _get(cluster, namespace, name, self._link)
            watcher.started = True
            return await watcher.watch(cluster, document)

        with display:
            try:
                view = self._link.run(act)
            except KeyboardInterrupt:
                if watcher.started:
                    display.note(
                        f"Ctrl-C: job {name} goes on in the cluster. Watch it again with "
                        f"{self._link.hint('run', '--attach', name)}; end it with "
                        f"{self._link.hint('cancel', name)}"
                    )
                return RunResult(None, 130)
        return RunResult(view, 0 if view.state == "succeeded" else 1)

    async def _create(
        self, cluster: KubeClient, namespace: str, job: TrainingJob, display: Display
    ) -> Document:
        """The object of a new job, or of the very same one. Raises UserError."""
        body = job_to_mapping(job)
        namespace = self._namespace(namespace, job)
        body["metadata"]["namespace"] = namespace
        try:
            return await cluster.create(JOBS, namespace, body)
        except NotFound:
            await _check_namespace(cluster, namespace)
            raise
        except Conflict as error:
            if not error.exists:
                raise
        there = await cluster.get(JOBS, namespace, job.name)
        state = str((there.get("status") or {}).get("state") or "pending")
        if state not in FINISHED and _same(there, job):
            display.note(f"job {job.name}: runs in namespace {namespace} already; watching it")
            return there
        raise UserError(str(self._taken(namespace, job.name, state)))

    def _namespace(self, chosen: str, job: TrainingJob) -> str:
        """The file's own, unless somebody asks for another one: then that is a contradiction."""
        if "namespace" not in job.metadata.model_fields_set:
            return chosen
        own = job.metadata.namespace
        if self._link.namespace not in (None, own):
            fix = "leave one of them out"
            got = f"{self._link.namespace}"
            expected = f"{own}, as metadata.namespace of the file says"
            raise UserError(str(Problem("--namespace", got, expected, fix)))
        return own

    def _taken(self, namespace: str, name: str, state: str) -> Problem:
        got = f"{name}, which exists in namespace {namespace} and is {state}"
        if state in FINISHED:
            fix = f"remove it with {self._link.hint('delete', name)}"
        else:
            fix = (
                f"watch it with {self._link.hint('run', '--attach', name)}, change it with "
                f"{self._link.kubectl_hint('apply', '-f', 'FILE')}"
            )
        return Problem(
            "metadata.name", got, "a name that is free", f"{fix}, or choose another metadata.name"
        )


class _Watcher:
    """Shows a job until it ends."""

    def __init__(self, link: ClusterSession, display: Display) -> None:
        self._link, self._display = link, display
        self._clock = Clock()
        self._latest: Document = {}
        self._pods: list[Document] = []
        self._pods_about: list[Any] = []
        self.started = False

    async def watch(self, cluster: KubeClient, document: Document) -> JobView:
        """The last view. Raises Gone when the object is deleted."""
        self._latest = document
        looking = asyncio.create_task(self._look_for_operator(document["metadata"]["name"]))
        try:
            async for seen in follow(cluster, document, self._display.note):
                self._latest = seen
                view = view_of_object(seen, self._clock.now_ns())
                view.nodes = nodes_of(seen, await self._pods_now(cluster, seen))
                self._display.show(view)
                if view.state in FINISHED:
                    return view
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        raise AssertionError("a watch does not end by itself")

    async def _pods_now(self, cluster: KubeClient, document: Document) -> list[Document]:
        """Listed anew only when the status says that nodes have come or gone."""
        status = document.get("status") or {}
        about = [status.get(key) for key in ("state", "generation", "nodes")]
        if about != self._pods_about:
            try:
                self._pods = await pods_of(cluster, document)
                self._pods_about = about
            except (Unreachable, TooBusy):
                pass  # the picture is a little old; the next change tries again
        return self._pods

    async def _look_for_operator(self, name: str) -> None:
        """Say it once when nobody seems to look after the job, and when somebody does again."""
        told = False
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            missing = neglect(self._latest, self._clock.now_ns())
            if missing is not None and not told:
                where = self._link.kubectl_hint("describe", "trainingjob", name)
                self._display.note(f"job {name}: {missing.what}; does it run? See {where}")
            elif missing is None and told:
                self._display.note(f"job {name}: the operator is there again")
            told = missing is not None


# -- what is there ----------------------------------------------------------------------------
async def _get(cluster: KubeClient, namespace: str, name: str, link: ClusterSession) -> Document:
    """Raises UserError, naming the jobs that there are."""
    try:
        return await cluster.get(JOBS, namespace, name)
    except NotFound as error:
        if not _about_object(error):
            raise
    try:
        found, _version = await cluster.list_all(JOBS, namespace)
    except ApiError:
        known = f"one that exists in namespace {namespace}"
    else:
        if not found:
            await _check_namespace(cluster, namespace)
        names = sorted(one["metadata"]["name"] for one in found)
        known = f"one of {', '.join(names)}" if names else "a job"
        known += f" in namespace {namespace}" if names else f"; namespace {namespace} has none"
    raise UserError(str(Problem("job", name, known, f"see {link.hint('status')}")))


def _about_object(error: NotFound) -> bool:
    """It is this object that is missing, not the kind of it."""
    return "not found" in error.message and "page not found" not in error.message


async def _check_namespace(cluster: KubeClient, namespace: str) -> None:
    """Raises UserError when there is none of this name, as far as we may know."""
    try:
        await cluster.get(NAMESPACES, "", namespace)
    except NotFound:
        fix = "see `kubectl get namespaces`"
        got = f"{namespace}, which does not exist"
        problem = Problem("--namespace", got, "a namespace of the cluster", fix)
        raise UserError(str(problem)) from None
    except ApiError:
        return


def _same(document: Document, job: TrainingJob) -> bool:
    try:
        return job_from_resource(document).spec == job.spec
    except SpecError:
        return False
