"""One TrainingJob object: what the commands read of it, and the field or annotation that each
request becomes. The operator decides whether it grants a request.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1.crd import job_from_resource
from holdfast.orchestrator.cli import job_code
from holdfast.orchestrator.cli.client import extra_s, user
from holdfast.orchestrator.cli.output import duration
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.rank_assignment import check_resize
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError, Problem, SpecError, UserError
from holdfast.orchestrator.hosts.kubernetes.spec import owner_of
from holdfast.orchestrator.kube import answer_parts, names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import EVENTS, JOBS, PODS, ApiError, Conflict, Forbidden
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.observe.view import JobView

from ..base import LogSelector, Response, expect_not_ended
from . import code_upload
from .resource_view import nodes_of, operator_absence, status_written_ns, view_of_object
from .session import ClusterSession, annotation_of, events_selector, follow_job


async def pods_of(cluster: KubeClient, document: Document) -> list[Document]:
    """The pods of a job; none where the user may not list pods."""
    metadata = document["metadata"]
    try:
        found, _version = await cluster.list_all(
            PODS, metadata["namespace"], names.selector(metadata["name"])
        )
    except Forbidden:
        return []
    return found


class KubernetesJob:
    """The object as it was when the command found it."""

    def __init__(self, session: ClusterSession, document: Document) -> None:
        self._session, self._document = session, document
        metadata = document["metadata"]
        self._namespace: str = metadata["namespace"]
        self._name: str = metadata["name"]

    @property
    def name(self) -> str:
        return self._name

    def view(self) -> JobView:
        async def act(cluster: KubeClient, namespace: str) -> list[Document]:
            return await pods_of(cluster, self._document)

        view = self._object_view()
        view.nodes = nodes_of(self._document, self._session.run(act))
        return view

    def _object_view(self) -> JobView:
        """Without the pods."""
        return view_of_object(self._document, Clock().now_ns())

    def remarks(self, view: JobView) -> list[str]:
        absence = operator_absence(self._document, view.now_ns)
        if absence is None:
            return []
        since = duration((view.now_ns - absence.since_ns) / SECOND_NS)
        written_ns = status_written_ns(self._document)
        age = duration((view.now_ns - written_ns) / SECOND_NS)
        written = f" (its last status is {age} old)" if written_ns else ""
        hint = self._session.kubectl_hint("describe", "trainingjob", self.name)
        return [
            f"For {since} {absence.what}{written}. This is the last known state. Training goes on "
            f"without an operator, and requests wait for one. See {hint}"
        ]

    # -- requests ------------------------------------------------------------------------------
    def request(self, verb: str, **arguments: Any) -> Response:
        view = self._object_view()
        expect_not_ended(view, verb)
        match verb:
            case "resize":
                response = self._resize(int(arguments["nodes"]))
            case "suspend":
                response = self._suspend()
            case "resume" if self._document["spec"].get("suspend") or view.state != "suspended":
                response = self._resume()
            case "cancel":
                self._patch({"metadata": {"annotations": {names.CANCEL: user() or "a user"}}})
                response = Response("stopping all workers", {})
            case _:
                annotated = _AnnotatedRequest(self._session, self._document, verb, arguments)
                return self._session.run(annotated.perform)
        return self._with_absence(response)

    def _with_absence(self, response: Response) -> Response:
        """The response, which also names the absence of an operator."""
        absence = operator_absence(self._document, Clock().now_ns())
        if absence is None:
            return response
        text = f"{response.detail}, as soon as an operator runs again ({absence.what})"
        return Response(text, response.body)

    def again(self, directory: Path | None) -> Response:
        state = self._object_view().state
        if state in TERMINAL:
            fix = f"remove it with {self._session.hint('delete', self.name)}, and run it again"
            raise UserError(str(Problem("job", state, "a job that has not ended", fix)))
        code = job_code.edited(job_from_resource(self._document), directory or Path.cwd())

        async def act(cluster: KubeClient, namespace: str) -> None:
            before = str(self._document["spec"].get("code") or "")
            owner = owner_of(self._document)
            await code_upload.upload(cluster, owner, code)
            body = {"spec": {"code": code.name}}
            await cluster.patch(JOBS, self._namespace, self.name, body)
            await code_upload.delete_others(cluster, owner, (before, code.name))

        self._session.run(act)
        detail = f"{job_code.describe(code)}; a new generation starts with it"
        return self._with_absence(Response(detail, {"code": code.name}))

    def _resize(self, nodes: int) -> Response:
        before = int(self._document["spec"].get("nodes", {}).get("max", 1))
        try:
            problem = check_resize(job_from_resource(self._document), nodes)
        except SpecError:
            problem = None  # the operator reports what is wrong with the spec
        if problem:
            raise UserError(problem)
        self._patch({"spec": {"replicas": nodes}}, "scale")
        return Response(f"from {before} to {nodes} nodes", {"nodes": nodes})

    def _suspend(self) -> Response:
        self._patch({"spec": {"suspend": True}})
        return Response("workers stop, the newest state goes to storage, nodes are freed", {})

    def _resume(self) -> Response:
        if not self._document["spec"].get("suspend"):
            problem = Problem("job", self._object_view().state, "a suspended job")
            raise UserError(str(problem))
        self._patch({"spec": {"suspend": False}})
        return Response("asking for nodes", {})

    def _patch(self, body: Document, subresource: str = "") -> None:
        async def act(cluster: KubeClient, namespace: str) -> None:
            await cluster.patch(JOBS, self._namespace, self.name, body, subresource=subresource)

        self._session.run(act)

    # -- events and logs -----------------------------------------------------------------------
    def print_events(self, *, follow: bool, as_json: bool) -> None:
        from .output import print_events

        print_events(self._session, self._document, follow=follow, as_json=as_json)

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None:
        from .output import print_logs

        print_logs(self._session, self._document, wanted, follow=follow)

    # -- checkpoints ---------------------------------------------------------------------------
    def manifests(self) -> tuple[str, list[Manifest]] | None:
        return None

    @contextmanager
    def storage(self) -> Iterator[str]:
        path = self._object_view().checkpoint_path
        if "://" not in path:
            problem = Problem(
                f"checkpoints of job {self.name}",
                f"{path}, a directory of the cluster" if path else "no checkpoint path yet",
                "a URL that this machine can read, too",
                "mount the volume here and name the directory instead of the job",
            )
            raise UserError(str(problem))
        yield path

    # -- deletion ------------------------------------------------------------------------------
    def describe_deletion(self, keep: Path | None) -> str:
        view = self._object_view()
        if keep is not None:
            path = f" ({view.checkpoint_path})" if view.checkpoint_path else ""
            problem = Problem(
                "--keep-checkpoints",
                f"{keep} for a job of a cluster",
                f"nothing: the checkpoints{path} stay where they are",
                "leave it out",
            )
            raise UserError(str(problem))
        if view.state not in TERMINAL:
            raise UserError(
                f"job {self.name}: got a job that is {view.state}; expected one that is "
                f"{', '.join(TERMINAL[:-1])} or {TERMINAL[-1]}; end it with "
                f"{self._session.hint('cancel', self.name)}, or delete it as it is with "
                f"{self._session.kubectl_hint('delete', 'trainingjob', self.name)}"
            )
        return f"job {self.name} in namespace {self._namespace} with its pods and their logs"

    def delete(self, keep: Path | None) -> list[str]:
        uid = self._document["metadata"]["uid"]

        async def act(cluster: KubeClient, namespace: str) -> None:
            await cluster.delete(JOBS, self._namespace, self.name, uid=uid)

        self._session.run(act)
        path = self._object_view().checkpoint_path
        return [f"the checkpoints stay in {path}"] if path else []


# -- requests as annotations -----------------------------------------------------------------
ANNOTATIONS = {
    "chaos": names.CHAOS, "checkpoint": names.CHECKPOINT, "resume": names.RESUME,
    "stacks": names.INSPECT, "profile": names.INSPECT,
}  # fmt: skip
ACCEPT_TIMEOUT_S = 20.0
"""A running operator removes the annotation within a second; a standby replica that has to take
over first, within its lease."""
ANSWER_TIMEOUT_S = 5.0
"""For the Event with the operator's answer."""
NUM_WITHDRAWALS = 5


class NoOperator(HoldfastError):
    """No operator has accepted a request."""


class _AnnotatedRequest:
    """A fault injection, a checkpoint, the resume of a job that holds, or a question: an annotation
    that the operator removes. Its answer is an Event with annotations of its own. A request that no
    operator accepts is withdrawn, so that it does not surprise a user much later."""

    def __init__(
        self, session: ClusterSession, document: Document, verb: str, arguments: dict[str, Any]
    ) -> None:
        self._session, self._document, self._verb = session, document, verb
        self._arguments = arguments
        metadata = document["metadata"]
        self._key: tuple[str, str] = (metadata["namespace"], metadata["name"])
        self._name: str = metadata["name"]
        self._selector = events_selector(document)
        self._annotation = ANNOTATIONS[verb]
        by, number = user() or "a user", secrets.token_hex(4)
        self._value = by
        self._asks = self._annotation == names.INSPECT
        self._answers = number if self._asks else verb
        """What the annotation of its answer says."""
        if self._asks:
            given = {"verb": verb, "arguments": arguments, "by": by, "id": number}
            self._value = json.dumps(given)
        elif verb != "checkpoint":
            self._value = json.dumps({**arguments, "by": by, "id": number})

    async def perform(self, cluster: KubeClient, namespace: str) -> Response:
        """Raises UserError when the operator refuses, NoOperator when none accepts the request."""
        waiting = annotation_of(self._document, self._annotation)
        if waiting is not None:
            got = f"another one that waits for the operator ({waiting})"
            raise UserError(str(Problem(self._verb, got, "none", self._hint())))
        version = await self._events_version(cluster)
        await cluster.patch(JOBS, *self._key, self._body(self._value))
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                await self._until_accepted(cluster)
        except TimeoutError:
            if await self._withdraw(cluster):
                raise NoOperator(
                    f"job {self._name}: {self._verb}: no operator accepted the request within "
                    f"{ACCEPT_TIMEOUT_S:.0f} s, so it was withdrawn; {self._hint()}"
                ) from None
        body = {key: value for key, value in self._arguments.items() if key != "kind"}
        answer = await self._answer(cluster, version)
        if answer is None and self._asks:
            raise HoldfastError(
                f"job {self._name}: {self._verb}: the operator has accepted the question and has "
                f"not answered; it answers with an Event, which this user may have no right to list"
            )
        if answer is None:
            return Response("the operator has accepted the request; see `kubectl describe`", body)
        text = str(answer.get("message", "")).removeprefix(f"{self._verb}: ")
        if answer.get("reason") == "Refused":
            raise UserError(f"job {self._name}: {text}")
        if (packed := annotation_of(answer, names.ANSWER)) is not None:
            return Response(text, json.loads(zlib.decompress(base64.b64decode(packed))))
        if (parts := annotation_of(answer, names.ANSWER_PARTS)) is not None:
            found = await answer_parts.read(cluster, *self._key, self._answers, int(parts))
            return Response(text, json.loads(zlib.decompress(found)))
        step = annotation_of(answer, names.STEP)
        if step is not None:
            body["step"] = int(step)
        return Response(text, body)

    async def _until_accepted(self, cluster: KubeClient) -> None:
        async for document in follow_job(cluster, self._document):
            if annotation_of(document, self._annotation) != self._value:
                return

    async def _withdraw(self, cluster: KubeClient) -> bool:
        """False: the operator accepted the request at the last moment."""
        for _attempt in range(NUM_WITHDRAWALS):
            document = await cluster.find(JOBS, *self._key)
            if document is None or annotation_of(document, self._annotation) != self._value:
                return False
            body = self._body(None)
            body["metadata"]["resourceVersion"] = document["metadata"]["resourceVersion"]
            try:
                await cluster.patch(JOBS, *self._key, body)
            except Conflict:
                continue
            return True
        raise HoldfastError(
            f"job {self._name}: {self._verb}: no operator accepted the request, and it could not "
            f"be withdrawn: remove the annotation {self._annotation} yourself"
        )

    async def _events_version(self, cluster: KubeClient) -> str:
        """The resource version from which to watch for the answer; empty: the user may not list
        Events."""
        try:
            _events, version = await cluster.list_all(EVENTS, self._key[0], fields=self._selector)
        except Forbidden:
            return ""
        return version

    async def _answer(self, cluster: KubeClient, version: str) -> Document | None:
        """The operator's Event; None: there is none in time."""
        if not version:
            return None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S + extra_s(self._verb, self._arguments)):
                watch = cluster.watch(EVENTS, version, self._key[0], fields=self._selector)
                async for kind, event in watch:
                    answers = annotation_of(event, names.REQUEST) == self._answers
                    if answers and kind in ("ADDED", "MODIFIED"):
                        return event
        except (TimeoutError, ApiError):
            pass
        return None

    def _body(self, value: str | None) -> Document:
        return {"metadata": {"annotations": {self._annotation: value}}}

    def _hint(self) -> str:
        hint = self._session.kubectl_hint("describe", "trainingjob", self._name)
        return f"does an operator run? See {hint}"
