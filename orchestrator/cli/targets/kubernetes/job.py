"""One TrainingJob object: what the commands read of it, and the field or annotation that each
request becomes. The operator decides whether it grants a request."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.crd import job_from_resource
from holdfast.orchestrator.backends.kubernetes.pods import agent_command
from holdfast.orchestrator.cli.code_files import Code
from holdfast.orchestrator.cli.output import duration
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.rank_assignment import check_resize
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError, Problem, SpecError, UserError
from holdfast.orchestrator.hosts.kubernetes.code_store import ClusterCodeStore
from holdfast.orchestrator.hosts.kubernetes.spec import owner_of
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import JOBS, PODS, Conflict, Forbidden, NotFound, TooBusy
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.protocol.messages import Reply
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.control_api import view_body
from holdfast.orchestrator.runtime.observe.view import JobView

from ..remote_job import ControllerGone, LogSelector, expect_ended, extra_s
from .resource_view import nodes_of, operator_absence, status_written_ns, view_of_object
from .session import ClusterSession, annotation_of, follow_job


async def pods_of(cluster: KubeClient, document: Document) -> list[Document]:
    """The pods of a job; none where the user may not list pods."""
    metadata = document["metadata"]
    try:
        pods, _version = await cluster.list_all(
            PODS, metadata["namespace"], names.selector(metadata["name"])
        )
    except Forbidden:
        return []
    return pods


class KubernetesTransport:
    """The object as it was when the command found it: fields and annotations change the job, and a
    command in a pod asks its controller."""

    def __init__(self, session: ClusterSession, document: Document) -> None:
        self._session, self._document = session, document
        metadata = document["metadata"]
        self._namespace: str = metadata["namespace"]
        self.name: str = metadata["name"]

    @property
    def job(self) -> TrainingJob:
        return job_from_resource(self._document)

    def command(self, *words: str) -> str:
        return self._session.hint(*words).strip("`")

    def recorded(self) -> JobView:
        view = self._object_view()
        pods = self._session.run(lambda cluster, _: pods_of(cluster, self._document))
        view.nodes = nodes_of(self._document, pods)
        return view

    def has_ended(self) -> bool:
        return self._object_view().state in TERMINAL

    def _object_view(self) -> JobView:
        """The job's view without its pods."""
        return view_of_object(self._document, Clock().now_ns())

    def remark(self, view: JobView) -> str:
        absence = operator_absence(self._document, view.now_ns)
        assert absence is not None
        since = duration((view.now_ns - absence.since_ns) / SECOND_NS)
        written_ns = status_written_ns(self._document)
        age = duration((view.now_ns - written_ns) / SECOND_NS)
        written = f" (its last status is {age} old)" if written_ns else ""
        hint = self._session.kubectl_hint("describe", "trainingjob", self.name)
        return (
            f"For {since} {absence.what}{written}. This is the last known state. Training "
            f"continues without an operator, and requests wait for one. See {hint}"
        )

    # -- requests ------------------------------------------------------------------------------
    def perform(self, verb: str, arguments: dict[str, Any]) -> Reply:
        if verb == "status":
            return Reply(ok=True, body=view_body(self.recorded()))
        if self.has_ended():
            raise ControllerGone(f"job {self.name}: has ended")
        spec = self._document["spec"]
        match verb:
            case "resize":
                return self._resize(int(arguments["nodes"]))
            case "suspend":
                detail = "workers stop, the newest state goes to storage, nodes are freed"
                return self._change({"suspend": True}, detail)
            case "resume" if spec.get("suspend"):
                return self._change({"suspend": False}, "asking for nodes")
            case "resume" if self._object_view().state != "suspended":
                problem = Problem("job", self._object_view().state, "a suspended job")
                return Reply(ok=False, detail=str(problem))
            case "again":
                before = str(spec.get("code") or "")
                detail = "a new generation starts with it"
                return self._change({"code": arguments["code"]}, detail, before=before)
            case "cancel":
                self._patch(
                    {"metadata": {"annotations": {names.CANCEL: arguments["by"] or "a user"}}}
                )
                return self._with_absence("stopping all workers")

        async def act(cluster: KubeClient, namespace: str) -> Reply:
            if verb in REQUESTS:
                kubectl = self._session.kubectl_hint("describe", "trainingjob", self.name)
                hint = f"does an operator run? See {kubectl}"
                return await demand(cluster, self._document, verb, arguments, hint)
            return await ask(cluster, self._document, verb, arguments)

        return self._session.run(act)

    def _change(self, spec: Document, detail: str, **body: Any) -> Reply:
        self._patch({"spec": spec})
        return self._with_absence(detail, **body)

    def _with_absence(self, detail: str, **body: Any) -> Reply:
        """The reply, which also names the absence of an operator."""
        absence = operator_absence(self._document, Clock().now_ns())
        if absence is not None:
            detail = f"{detail}, as soon as an operator runs again ({absence.what})"
        return Reply(ok=True, detail=detail, body=body)

    def check_code(self) -> bool:
        return True

    def upload(self, code: Code) -> None:
        self._session.run(lambda cluster, _: self._code(cluster).upload(code.name, code.archive))

    def delete_code_except(self, *kept: str) -> None:
        self._session.run(lambda cluster, _: self._code(cluster).delete_others(*kept))

    def _code(self, cluster: KubeClient) -> ClusterCodeStore:
        return ClusterCodeStore(cluster, owner_of(self._document))

    def _resize(self, nodes: int) -> Reply:
        before = int(self._document["spec"].get("nodes", {}).get("max", 1))
        try:
            problem = check_resize(self.job, nodes)
        except SpecError:
            problem = None  # the operator reports what is wrong with the spec
        if problem:
            return Reply(ok=False, detail=problem)
        self._patch({"spec": {"replicas": nodes}}, "scale")
        return self._with_absence(f"from {before} to {nodes} nodes", nodes=nodes)

    def _patch(self, body: Document, subresource: str = "") -> None:
        key = (self._namespace, self.name)
        self._session.run(
            lambda cluster, _: cluster.patch(JOBS, *key, body, subresource=subresource)
        )

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
            raise UserError.of(
                f"checkpoints of job {self.name}",
                f"{path}, a directory of the cluster" if path else "no checkpoint path yet",
                "a URL that this machine can read, too",
                "mount the volume here and name the directory instead of the job",
            )
        yield path

    # -- deletion ------------------------------------------------------------------------------
    def describe_deletion(self, keep: Path | None) -> str:
        view = self._object_view()
        if keep is not None:
            path = f" ({view.checkpoint_path})" if view.checkpoint_path else ""
            raise UserError.of(
                "--keep-checkpoints",
                f"{keep} for a job of a cluster",
                f"nothing: the checkpoints{path} stay where they are",
                "leave it out",
            )
        kubectl = self._session.kubectl_hint("delete", "trainingjob", self.name)
        end = f"{self._session.hint('cancel', self.name)}, or delete it with {kubectl}"
        expect_ended(view, end)
        return f"job {self.name} in namespace {self._namespace} with its pods and their logs"

    def delete(self, keep: Path | None) -> list[str]:
        key, uid = (self._namespace, self.name), self._document["metadata"]["uid"]
        self._session.run(lambda cluster, _: cluster.delete(JOBS, *key, uid=uid))
        path = self._object_view().checkpoint_path
        return [f"the checkpoints stay in {path}"] if path else []


# -- requests and questions ------------------------------------------------------------------
REQUESTS = ("chaos", "checkpoint", "resume")
"""Verbs that become an annotation; the others are questions."""
ACCEPT_TIMEOUT_S = 20.0
"""A running operator answers within a second; a standby replica that has to take over first, within
its lease."""
MAX_ASKED_PODS = 3
"""A pod that has just ended cannot be asked."""


async def demand(
    cluster: KubeClient, document: Document, verb: str, arguments: dict[str, Any], hint: str
) -> Reply:
    """A fault injection, a checkpoint, or the resume of a job that holds: an annotation that the
    operator removes, and whose answer is in the status. A request that no operator accepts is
    withdrawn, so that it does not surprise a user much later. `hint`: what shows the operator."""
    key = (document["metadata"]["namespace"], document["metadata"]["name"])
    if (waiting := annotation_of(document, names.REQUEST)) is not None:
        got = f"another request that waits for the operator ({waiting})"
        raise UserError.of(verb, got, "none", hint)
    number, by = secrets.token_hex(4), arguments["by"]
    fields = {name: value for name, value in arguments.items() if name != "by"}
    value = json.dumps({"verb": verb, "arguments": fields, "by": by, "id": number})
    await cluster.patch(JOBS, *key, _annotated(value))
    try:
        async with asyncio.timeout(ACCEPT_TIMEOUT_S):
            answer = await _answer_in_status(cluster, document, number)
    except TimeoutError:
        what = "an operator has accepted the request and has not answered"
        if await _withdraw(cluster, key, value):
            limit = f"{ACCEPT_TIMEOUT_S:.0f} s"
            what = f"no operator accepted the request within {limit}, so it was withdrawn"
        raise HoldfastError(f"job {key[1]}: {verb}: {what}; {hint}") from None
    body = {name: value for name, value in fields.items() if name != "kind"}
    body |= {"step": answer["step"]} if "step" in answer else {}
    message = str(answer.get("message", ""))
    if not answer.get("accepted"):
        return Reply(ok=False, detail=f"{verb}: {message}")
    return Reply(ok=True, detail=message, body=body)


async def _answer_in_status(cluster: KubeClient, document: Document, number: str) -> Document:
    async for latest in follow_job(cluster, document):
        answer: Document = (latest.get("status") or {}).get("request") or {}
        if answer.get("id") == number:
            return answer
    raise AssertionError("a watch does not end")


async def _withdraw(cluster: KubeClient, key: tuple[str, str], value: str) -> bool:
    """False: the operator accepted the request at the last moment."""
    while True:
        document = await cluster.find(JOBS, *key)
        if document is None or annotation_of(document, names.REQUEST) != value:
            return False
        body = _annotated(None)
        body["metadata"]["resourceVersion"] = document["metadata"]["resourceVersion"]
        with suppress(Conflict):
            await cluster.patch(JOBS, *key, body)
            return True


def _annotated(value: str | None) -> Document:
    return {"metadata": {"annotations": {names.REQUEST: value}}}


async def ask(
    cluster: KubeClient, document: Document, verb: str, arguments: dict[str, Any]
) -> Reply:
    """Answer of the controller to a question from a pod of the job. Raises Forbidden where the user
    may not run commands in pods, HoldfastError without an answer."""
    metadata = document["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    pods, _version = await cluster.list_all(PODS, namespace, names.selector(name))
    running = [
        pod
        for pod in pods
        if (pod.get("status") or {}).get("phase") == "Running"
        and not pod["metadata"].get("deletionTimestamp")
    ]
    # Pods that train come first: one of the others may have an agent that only starts.
    running.sort(key=lambda pod: names.LABEL_RANK not in (pod["metadata"].get("labels") or {}))
    question = json.dumps({"verb": verb, "arguments": arguments})
    if not running:
        state = str((document.get("status") or {}).get("state") or "pending")
        raise UserError.of("job", f"{name}, which is {state}", "one with a running pod")
    why = ""
    for pod in running[:MAX_ASKED_PODS]:
        timeout_s = ACCEPT_TIMEOUT_S + extra_s(verb, arguments)
        command = [*agent_command(pod), "--ask", question]
        try:
            done = await cluster.execute(namespace, pod["metadata"]["name"], command, timeout_s)
        except (NotFound, TooBusy) as error:
            why = str(error)
            continue
        if done.succeeded:
            return msgspec.json.decode(done.stdout, type=Reply)
        why = f"pod {pod['metadata']['name']}: {done.stderr.decode(errors='replace').strip()}"
    raise HoldfastError(f"job {name}: {verb}: {why}")
