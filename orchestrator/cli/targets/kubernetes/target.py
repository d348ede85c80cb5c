"""Finds, lists, creates and watches jobs of a Kubernetes cluster: TrainingJob objects in a
namespace. Commands only use the API server, so users need rights on TrainingJobs and, where code is
uploaded, on ConfigMaps.

`run` creates the object and never changes an existing one: a name that is in use by mistake must
not change another user's job. An existing object with the same spec is watched instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.orchestrator import tasks
from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_to_mapping, load_job
from holdfast.orchestrator.api.v1alpha1.crd import job_from_resource
from holdfast.orchestrator.api.v1alpha1.remarks import remarks
from holdfast.orchestrator.cli import job_code
from holdfast.orchestrator.cli.code_files import Code
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.cli.launch_sizes import not_taken_along
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import SpecError, UserError
from holdfast.orchestrator.hosts.kubernetes.code_store import ClusterCodeStore
from holdfast.orchestrator.hosts.kubernetes.spec import owner_of, template_problems
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import (
    ACCESS_REVIEWS,
    JOBS,
    ApiError,
    Conflict,
    Forbidden,
    NotFound,
    Resource,
    TooBusy,
    Unreachable,
)
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.observe.view import JobView

from ..base import Launch, RunResult, Target, exit_code, first_free, name_taken
from ..remote_job import RemoteJob
from .job import KubernetesTransport, pods_of
from .resource_view import is_refused, nodes_of, operator_absence, view_of_object
from .session import ClusterSession, follow_job

if TYPE_CHECKING:
    from .output import LinesOfRank0

Begin = Callable[[KubeClient, str], Awaitable[Document]]
NAMESPACES = Resource("", "v1", "namespaces", namespaced=False)
CHANGED_BY = dict.fromkeys(("checkpoint", "suspend", "resume", "cancel"), "") | {"resize": "scale"}
"""Verb of a request -> subresource of the TrainingJob that it patches; empty: the object."""
OPERATOR_CHECK_INTERVAL_S = 5.0
LAST_LINES_S = 6.0
"""Limit for the last lines of a job that has ended; its pods go soon."""


class KubernetesTarget(Target):
    """One namespace of a cluster."""

    def __init__(
        self,
        namespace: str | None,
        context: str | None,
        kubeconfig: Path | None,
        *,
        plugin: bool = False,
    ) -> None:
        self._session = ClusterSession(namespace, context, kubeconfig, plugin=plugin)
        self._searched = namespace or ""

    def find(self, name: str) -> RemoteJob:
        document = self._session.run(self._get(name))
        return RemoteJob(KubernetesTransport(self._session, document))

    def _get(self, name: str) -> Begin:
        return lambda cluster, namespace: _get(cluster, namespace, name, self._session)

    def views(self) -> list[JobView]:
        async def act(cluster: KubeClient, namespace: str) -> list[Document]:
            self._searched = namespace
            jobs, _version = await cluster.list_all(JOBS, namespace)
            if not jobs:
                await _check_namespace(cluster, namespace)
            return jobs

        now_ns = Clock().now_ns()
        return [view_of_object(document, now_ns) for document in self._session.run(act)]

    def empty_message(self) -> str:
        start = self._session.hint("run", "FILE")
        return f"no jobs in namespace {self._searched}; start one with {start}"

    def command(self, *words: str) -> str:
        return self._session.hint(*words).strip("`")

    def can_read(self, path: str) -> bool:
        return "://" in path  # other paths are directories in the pods

    def rejections(self) -> dict[str, str]:
        async def may(cluster: KubeClient, namespace: str, subresource: str) -> bool:
            attributes = {
                "verb": "patch", "group": JOBS.group, "resource": JOBS.plural,
                "subresource": subresource, "namespace": namespace,
            }  # fmt: skip
            review = {"spec": {"resourceAttributes": attributes}}
            answer = await cluster.create(ACCESS_REVIEWS, "", review)
            return bool(answer["status"]["allowed"])

        async def act(cluster: KubeClient, namespace: str) -> dict[str, str]:
            rights = dict.fromkeys(CHANGED_BY.values())
            try:
                allowed = await asyncio.gather(*(may(cluster, namespace, r) for r in rights))
            except Forbidden:
                return {}  # the API server decides when it is asked for the change
            missing = [right for right, has in zip(rights, allowed, strict=True) if not has]
            return {
                verb: f"patch {JOBS.plural}{right and '/'}{right}"
                for verb, right in CHANGED_BY.items()
                if right in missing
            }

        return self._session.run(act)

    def free_name(self, wanted: str) -> str:
        async def act(cluster: KubeClient, namespace: str) -> set[str]:
            jobs, _version = await cluster.list_all(JOBS, namespace)
            return {job["metadata"]["name"] for job in jobs}

        used = self._session.run(act)
        return first_free(wanted, used)

    # -- run -----------------------------------------------------------------------------------
    def run(self, launch: Launch, display: Display) -> RunResult:
        name, create = self._creation(launch, display)
        return self._watched(name, create, display, only_new=False)

    def submit(self, launch: Launch, display: Display) -> dict[str, str]:
        name, create = self._creation(launch, display)
        self._session.run(create)
        return {"job": name}

    def _creation(self, launch: Launch, display: Display) -> tuple[str, Begin]:
        """The name of a job, and what creates it. Raises UserError and SpecError."""
        file = launch.file
        job, code = job_code.with_code(load_job(file), launch.directory, str(file))
        if problems := template_problems(job):
            raise SpecError(problems)
        launch.show()

        return job.name, lambda cluster, namespace: self._create(
            cluster, namespace, job, code, display
        )

    def attach(self, name: str, display: Display) -> RunResult:
        return self._watched(name, self._get(name), display, only_new=True)

    def _watched(self, name: str, begin: Begin, display: Display, *, only_new: bool) -> RunResult:
        from .output import LinesOfRank0

        lines = LinesOfRank0(self._session, display)
        watcher = _Watcher(self._session, display, lines, only_new=only_new)

        async def act(cluster: KubeClient, namespace: str) -> JobView:
            document = await begin(cluster, namespace)
            watcher.started = True
            return await watcher.watch(cluster, document)

        with display, lines:
            try:
                view = self._session.run(act)
            except KeyboardInterrupt:
                if watcher.started:
                    display.note(
                        f"Ctrl-C: job {name} continues in the cluster. Watch it again with "
                        f"{self._session.hint('attach', name)}; end it with "
                        f"{self._session.hint('cancel', name)}"
                    )
                return RunResult(None, 130)
        return RunResult(view, exit_code(view))

    async def _create(
        self,
        cluster: KubeClient,
        namespace: str,
        job: TrainingJob,
        code: Code | None,
        display: Display,
    ) -> Document:
        """The object of a new job, or of one with the same spec. Raises UserError."""
        body = job_to_mapping(job)
        namespace = self._namespace(namespace, job)
        body["metadata"]["namespace"] = namespace
        try:
            created = await cluster.create(JOBS, namespace, body)
            if code is not None:
                await self._upload(cluster, created, code)
            for note in [*job_code.notes(job, code), *remarks(job), *not_taken_along(job)]:
                display.note(note)
            return created
        except NotFound:
            await _check_namespace(cluster, namespace)
            raise
        except Conflict as error:
            if not error.exists:
                raise
        existing = await cluster.get(JOBS, namespace, job.name)
        state = str((existing.get("status") or {}).get("state") or "pending")
        if state not in TERMINAL and _has_spec(existing, job):
            display.note(f"job {job.name}: already runs in namespace {namespace}; watching it")
            return existing
        raise self._name_in_use(namespace, job.name, state)

    async def _upload(self, cluster: KubeClient, created: Document, code: Code) -> None:
        """A job without its code is removed again. Raises ApiError."""
        owner = owner_of(created)
        try:
            await ClusterCodeStore(cluster, owner).upload(code.name, code.archive)
        except BaseException:
            with suppress(ApiError):
                await cluster.delete(JOBS, owner.namespace, owner.name, uid=owner.uid)
            raise

    def _namespace(self, chosen: str, job: TrainingJob) -> str:
        """The namespace of the file, if it has one. Raises UserError when --namespace differs."""
        if "namespace" not in job.metadata.model_fields_set:
            return chosen
        own = job.metadata.namespace
        if self._session.namespace not in (None, own):
            expected, fix = f"{own}, the metadata.namespace of the file", "leave one of them out"
            raise UserError.of("--namespace", str(self._session.namespace), expected, fix)
        return own

    def _name_in_use(self, namespace: str, name: str, state: str) -> UserError:
        if state in TERMINAL:
            fix = f"remove it with {self._session.hint('delete', name)}"
        else:
            fix = (
                f"watch it with {self._session.hint('attach', name)}, give it edited code "
                f"with {self._session.hint('again', name)}, change its spec with "
                f"{self._session.kubectl_hint('apply', '-f', 'FILE')}"
            )
        return name_taken(name, f"namespace {namespace} ({state})", fix)


class _Watcher:
    """Shows a job until it ends."""

    def __init__(
        self, session: ClusterSession, display: Display, lines: LinesOfRank0, *, only_new: bool
    ) -> None:
        """`only_new`: show no lines of rank 0 from before."""
        self._session, self._display = session, display
        self._lines, self._only_new = lines, only_new
        self._clock = Clock()
        self._latest: Document = {}
        self._pods: list[Document] = []
        self._pods_key: list[Any] = []
        self.started = False

    async def watch(self, cluster: KubeClient, document: Document) -> JobView:
        """The last view. Raises JobDeleted."""
        self._latest = document
        checking = asyncio.create_task(self._check_operator(document["metadata"]["name"]))
        lines = asyncio.create_task(self._lines.follow(cluster, document, only_new=self._only_new))
        try:
            async for latest in follow_job(cluster, document, self._display.note):
                self._latest = latest
                view = view_of_object(latest, self._clock.now_ns())
                view.nodes = nodes_of(latest, await self._current_pods(cluster, latest))
                self._display.show(view)
                if view.state in TERMINAL or is_refused(latest):
                    await asyncio.wait([lines], timeout=LAST_LINES_S)
                    return view
        finally:
            await tasks.end([checking, lines])
        raise AssertionError("a watch does not end")

    async def _current_pods(self, cluster: KubeClient, document: Document) -> list[Document]:
        """Listed again only when the nodes in the status have changed."""
        status = document.get("status") or {}
        key = [status.get(name) for name in ("state", "generation", "nodes")]
        if key != self._pods_key:
            try:
                self._pods = await pods_of(cluster, document)
                self._pods_key = key
            except (Unreachable, TooBusy):
                pass  # the next change of the status tries again
        return self._pods

    async def _check_operator(self, name: str) -> None:
        """Note once that no operator handles the job, and once that one does again."""
        noted = False
        while True:
            await asyncio.sleep(OPERATOR_CHECK_INTERVAL_S)
            absence = operator_absence(self._latest, self._clock.now_ns())
            if absence is not None and not noted:
                hint = self._session.kubectl_hint("describe", "trainingjob", name)
                self._display.note(f"job {name}: {absence.what}; does it run? See {hint}")
            elif absence is None and noted:
                self._display.note(f"job {name}: the operator is back")
            noted = absence is not None


async def _get(cluster: KubeClient, namespace: str, name: str, session: ClusterSession) -> Document:
    """Raises UserError, naming the jobs of the namespace."""
    try:
        return await cluster.get(JOBS, namespace, name)
    except NotFound as error:
        # A cluster without the CRD answers "page not found" or "could not find the resource".
        if "not found" not in error.message or "page not found" in error.message:
            raise
    try:
        jobs, _version = await cluster.list_all(JOBS, namespace)
    except ApiError:
        expected = f"one that exists in namespace {namespace}"
    else:
        if not jobs:
            await _check_namespace(cluster, namespace)
        names = sorted(job["metadata"]["name"] for job in jobs)
        expected = f"one of {', '.join(names)}" if names else "a job"
        expected += f" in namespace {namespace}" if names else f"; namespace {namespace} has none"
    raise UserError.of("job", name, expected, f"see {session.hint('status')}")


async def _check_namespace(cluster: KubeClient, namespace: str) -> None:
    """Raises UserError when the namespace does not exist and the user may read it."""
    try:
        await cluster.get(NAMESPACES, "", namespace)
    except NotFound:
        fix = "see `kubectl get namespaces`"
        got = f"{namespace}, which does not exist"
        raise UserError.of("--namespace", got, "a namespace of the cluster", fix) from None
    except ApiError:
        return


def _has_spec(document: Document, job: TrainingJob) -> bool:
    try:
        return job_from_resource(document).spec == job.spec
    except SpecError:
        return False
