"""One TrainingJob object: what the commands read of it and write into it.

Owns: which field or annotation each wish becomes. Must not: wait for more than that a wish is
noticed, or grant any; the operator does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1.crd import job_from_resource
from holdfast.orchestrator.cli.client import user
from holdfast.orchestrator.cli.output import duration
from holdfast.orchestrator.cli.render import FINISHED
from holdfast.orchestrator.core.rank_assignment import check_resize
from holdfast.orchestrator.errors import Problem, SpecError, UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS, PODS, Forbidden
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.observe.view import JobView

from ..base import LogSelector, Response
from .resource_view import NS, neglect, nodes_of, told_at, view_of_object
from .session import ClusterSession

Document = dict[str, Any]


async def pods_of(cluster: KubeClient, document: Document) -> list[Document]:
    """Of one job; none where this person may not see them: the job's object tells enough."""
    metadata = document["metadata"]
    try:
        found, _version = await cluster.list_all(
            PODS, metadata["namespace"], names.selector(metadata["name"])
        )
    except Forbidden:
        return []
    return found


class KubernetesJob:
    """As it was when it was found; `view` and the requests speak of that object only."""

    def __init__(self, link: ClusterSession, document: Document) -> None:
        self._link, self._document = link, document
        metadata = document["metadata"]
        self._namespace: str = metadata["namespace"]
        self._name: str = metadata["name"]

    @property
    def name(self) -> str:
        return self._name

    def view(self) -> JobView:
        async def act(cluster: KubeClient, namespace: str) -> list[Document]:
            return await pods_of(cluster, self._document)

        view = self._told()
        view.nodes = nodes_of(self._document, self._link.run(act))
        return view

    def _told(self) -> JobView:
        """What the object alone says."""
        return view_of_object(self._document, Clock().now_ns())

    def remarks(self, view: JobView) -> list[str]:
        missing = neglect(self._document, view.now_ns)
        if missing is None:
            return []
        since = duration((view.now_ns - missing.since_ns) / 1e9)
        told_ns = told_at(self._document)
        last = f", it last wrote {duration((view.now_ns - told_ns) / NS)} ago" if told_ns else ""
        look = self._link.kubectl_hint("describe", "trainingjob", self.name)
        return [
            f"For {since} {missing.what}{last}: this is what stands in the cluster. Training goes "
            f"on without it, wishes wait for it. Does it run? See {look}"
        ]

    # -- wishes --------------------------------------------------------------------------------
    def request(self, verb: str, **arguments: Any) -> Response:
        state = self._told().state
        if state in FINISHED:
            raise UserError(str(Problem("job", state, "a job that has not ended")))
        match verb:
            case "resize":
                answer = self._resize(int(arguments["nodes"]))
            case "suspend":
                answer = self._hold(True)
            case "resume":
                answer = self._hold(False)
            case "cancel":
                answer = self._cancel()
            case _:
                from .annotated_requests import perform

                return perform(self._link, self._document, verb, arguments)
        return self._with_doubts(answer)

    def _resize(self, nodes: int) -> Response:
        before = int(self._document["spec"].get("nodes", {}).get("max", 1))
        try:
            problem = check_resize(job_from_resource(self._document), nodes)
        except SpecError:
            problem = None  # the operator says what is wrong with it
        if problem:
            raise UserError(problem)
        self._patch({"spec": {"replicas": nodes}}, "scale")
        return Response(f"from {before} to {nodes} nodes", {"nodes": nodes})

    def _hold(self, wanted: bool) -> Response:
        held = bool(self._document["spec"].get("suspend"))
        if not wanted and not held:
            raise UserError(str(Problem("job", self._told().state, "a suspended job")))
        self._patch({"spec": {"suspend": wanted}})
        if wanted:
            return Response("the newest state goes to storage, then nodes are freed", {})
        return Response("asking for nodes", {})

    def _cancel(self) -> Response:
        self._patch({"metadata": {"annotations": {names.CANCEL: user() or "somebody"}}})
        return Response("stopping all workers", {})

    def _patch(self, body: Document, subresource: str = "") -> None:
        async def act(cluster: KubeClient, namespace: str) -> None:
            await cluster.patch(JOBS, self._namespace, self.name, body, subresource=subresource)

        self._link.run(act)

    def _with_doubts(self, answer: Response) -> Response:
        """A wish waits in the object; say so where nobody seems to read it."""
        missing = neglect(self._document, Clock().now_ns())
        if missing is None:
            return answer
        text = f"{answer.detail}, as soon as an operator runs again ({missing.what})"
        return Response(text, answer.body)

    # -- what it did ---------------------------------------------------------------------------
    def print_events(self, *, follow: bool, as_json: bool) -> None:
        from .events import print_events

        print_events(self._link, self._document, follow=follow, as_json=as_json)

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None:
        from .logs import print_logs

        print_logs(self._link, self._document, wanted, follow=follow)

    # -- checkpoints ---------------------------------------------------------------------------
    def manifests(self) -> tuple[str, list[Manifest]] | None:
        return None

    @contextmanager
    def storage(self) -> Iterator[str]:
        path = self._told().checkpoint_path
        if "://" not in path:
            got = (
                f"{path or 'no place yet'}, a directory of the cluster" if path else "no place yet"
            )
            raise UserError(
                str(
                    Problem(
                        f"checkpoints of job {self.name}",
                        got,
                        "a URL that can be read from here too",
                        "mount that volume here and name the directory instead of the job",
                    )
                )
            )
        yield path

    # -- its end -------------------------------------------------------------------------------
    def deleting(self, keep: Path | None) -> str:
        view = self._told()
        if keep is not None:
            where = f" ({view.checkpoint_path})" if view.checkpoint_path else ""
            raise UserError(
                str(
                    Problem(
                        "--keep-checkpoints",
                        f"{keep} for a job of a cluster",
                        f"nothing: its checkpoints{where} stay where they are",
                        "leave it out",
                    )
                )
            )
        if view.state not in FINISHED:
            raise UserError(
                f"job {self.name}: got a job that is {view.state}; expected one that is "
                f"{', '.join(FINISHED[:-1])} or {FINISHED[-1]}; end it with "
                f"{self._link.hint('cancel', self.name)}, or delete it as it is with "
                f"{self._link.kubectl_hint('delete', 'trainingjob', self.name)}"
            )
        return f"job {self.name} of namespace {self._namespace} with its pods and their logs"

    def delete(self, keep: Path | None) -> list[str]:
        uid = self._document["metadata"]["uid"]

        async def act(cluster: KubeClient, namespace: str) -> None:
            await cluster.delete(JOBS, self._namespace, self.name, uid=uid)

        self._link.run(act)
        path = self._told().checkpoint_path
        return [f"its checkpoints stay in {path}"] if path else []
