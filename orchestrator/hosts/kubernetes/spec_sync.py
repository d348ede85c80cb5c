"""Turns edits of a running TrainingJob object into requests to its controller: size, code, suspend,
and the annotations of cancel and of other requests. The controller decides whether it grants one.

Spec and state are compared whenever the object changes, so an edit that was made while no operator
ran is applied by the next one. The annotation of a request is removed before it is carried out: an
operator that ends in between drops a fault injection instead of repeating it.
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.status import RequestStatus
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import JOBS
from holdfast.orchestrator.kube.event_recorder import EventRecorder
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime.code_sender import CodeMissing
from holdfast.orchestrator.runtime.job_runtime import JobRuntime

from .code_store import ClusterCodeStore
from .status import ConditionState

REQUESTS = {
    "checkpoint": (),
    "chaos": ("kind", "rank", "node", "hold_s"),
    "resume": ("start_over",),
}
"""Verb of a request in an annotation -> its arguments."""
EXAMPLE = '{"verb": "chaos", "arguments": {"kind": "kill-worker", "rank": 1}, "by": "me"}'
BY_SPEC = "the spec"
MAX_ID, MAX_MESSAGE = 64, 4096
"""Characters in the status: the CRD rejects all of a status with a longer text."""


class SpecSync:
    """Keeps one running job's spec in step with its object."""

    def __init__(
        self,
        owner: Owner,
        cluster: KubeClient,
        runtime: JobRuntime,
        events: EventRecorder,
        code: ClusterCodeStore,
    ) -> None:
        self._owner, self._cluster, self._code = owner, cluster, code
        self._runtime, self._events = runtime, events
        self._refused_generation = 0
        self._adjusted_generation = 0
        """Generation of the object whose adjustable fields were requested last; they are requested
        once, whatever the answer is."""
        self._handled_version = 0
        """Resource version of the object without the annotation that was carried out last. Older
        versions may still hold it. Resource versions of one kind are ordered integers."""
        self.refusal = ""
        """Reason why the current spec is not applied; empty: it is."""
        self.answer: RequestStatus | None = None

    async def apply(self, document: Document, job: TrainingJob) -> None:
        """Raises ApiError."""
        annotations = document["metadata"].get("annotations") or {}
        state = self._runtime.state
        if state.terminal:
            return
        if names.CANCEL in annotations and state.intent != "cancel":
            await self._request("cancel", by=annotations[names.CANCEL])
            return
        generation = int(document["metadata"]["generation"])
        if self._refused_generation != generation:
            self.refusal = ""
            if job.spec.nodes.max != state.target_nodes:
                await self._request_spec("resize", generation, nodes=job.spec.nodes.max)
            if self._adjusted_generation != generation and _adjustable(job) != _adjustable(
                state.job
            ):
                self._adjusted_generation = generation
                await self._request_spec("adjust", generation, **_adjustable(job))
            if job.spec.code != state.job.spec.code:
                await self._request_code(generation, job.spec.code)
            if job.spec.suspend and state.intent == "run":
                await self._request_spec("suspend", generation)
            elif not job.spec.suspend and state.intent == "suspend" and state.hold is None:
                await self._request_spec("resume", generation)
        if names.REQUEST in annotations and _version(document) > self._handled_version:
            await self._carry_out(annotations[names.REQUEST])

    def reject(self, document: Document, text: str) -> None:
        """The spec has become invalid."""
        generation = int(document["metadata"]["generation"])
        if generation != self._refused_generation:
            self._refused_generation, self.refusal = generation, text
            text = f"training continues with the previous spec: {text}"
            self._events.record("Warning", "InvalidSpec", text)

    async def _carry_out(self, text: str) -> None:
        """Remove the annotation and request what it asks for."""
        body = {"metadata": {"annotations": {names.REQUEST: None}}}
        after = await self._cluster.patch(JOBS, self._owner.namespace, self._owner.name, body)
        self._handled_version = _version(after)
        try:
            wanted = json.loads(text)
            verb, args = wanted["verb"], dict(wanted.get("arguments") or {})
            arguments = {name: args[name] for name in REQUESTS[verb] if args.get(name) is not None}
            by, number = str(wanted.get("by", "")), str(wanted.get("id", ""))
        except (ValueError, AttributeError, TypeError, LookupError, RecursionError):
            text = f"annotation {names.REQUEST}: got {text[:80]!r}; expected JSON such as {EXAMPLE}"
            self._events.record("Warning", "Refused", text)
            return
        answer = await self._request(verb, by=by, **arguments)
        self.answer = answer.model_copy(update={"id": number[:MAX_ID]})

    async def _request_code(self, generation: int, code: str | None) -> None:
        """Training continues with the old code until the new one is there."""
        if code is not None:
            try:
                await self._code.part(code, 0)
            except CodeMissing as error:
                self._refused_generation, self.refusal = generation, f"spec.code: {error}"
                self._events.record("Warning", "Refused", self.refusal)
                return
        await self._request_spec("again", generation, code=code or "")

    async def _request_spec(self, verb: str, generation: int, **arguments: Any) -> None:
        """A request of the spec is not repeated when it was refused."""
        answer = await self._request(verb, by=BY_SPEC, **arguments)
        if not answer.accepted:
            self._refused_generation, self.refusal = generation, f"{verb}: {answer.message}"

    async def _request(self, verb: str, **arguments: Any) -> RequestStatus:
        try:
            reply = await self._runtime.control.perform(verb, arguments)
        except UserError as error:
            self._events.record("Warning", "Refused", f"{verb}: {error}")
            return RequestStatus(message=str(error)[:MAX_MESSAGE])
        by = f" (requested by {arguments['by']})" if arguments.get("by") else ""
        self._events.record("Normal", verb.capitalize(), f"{verb}: {reply.detail}{by}")
        step = reply.body.get("step")
        return RequestStatus(accepted=True, message=reply.detail[:MAX_MESSAGE], step=step)


def suspended_before_start(document: Document) -> ConditionState:
    """The condition of a job with spec.suspend that was never started."""
    annotations = document["metadata"].get("annotations") or {}
    if names.CANCEL in annotations:
        by = annotations[names.CANCEL] or "a user"
        return ConditionState("cancelled", "Cancelled", f"cancelled by {by}; nothing was started")
    return ConditionState("suspended", "Suspended", "spec.suspend is set; nothing was started")


def _adjustable(job: TrainingJob) -> Document:
    """Fields that a running job follows besides its size; the CRD rejects changes of others."""
    recovery = job.spec.recovery.model_dump(mode="json", by_alias=True)
    nodes, elasticity = job.spec.nodes, job.spec.elasticity
    return {
        "min_nodes": nodes.min,
        "spares": nodes.spares,
        "recovery": recovery,
        "elasticity": elasticity if isinstance(elasticity, str) else list(elasticity),
    }


def _version(document: Document) -> int:
    return int(document["metadata"]["resourceVersion"])
