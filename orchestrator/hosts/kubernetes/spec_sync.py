"""Turns edits of a running TrainingJob object into requests to its controller: size, code, suspend,
and the annotations for cancel, chaos, checkpoint, resume and questions. The controller decides
whether it grants one.

Spec and state are compared whenever the object changes, so an edit that was made while no operator
ran is applied by the next one. The other annotations are removed before they are carried
out: an operator that ends in between drops a fault injection instead of repeating it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from contextlib import suppress
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.kube import answer_parts, names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import JOBS, ApiError
from holdfast.orchestrator.kube.event_recorder import EventRecorder
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime.code_sender import CodeMissing
from holdfast.orchestrator.runtime.job_runtime import JobRuntime

from .code_store import ClusterCodeStore
from .status import ConditionState

CHAOS_ARGUMENTS = ("rank", "node", "hold_s", "by")
BY_SPEC = "the spec"
QUESTIONS = ("stacks", "profile")
MAX_ANSWER_CHARS = 240_000
"""Of a question's answer in an annotation: the API server takes 256 KiB of them. A longer one is in
ConfigMaps."""


class SpecSync:
    """Of one running job."""

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
        self._answering: set[asyncio.Task[None]] = set()
        self.refusal = ""
        """Why the current spec is not applied; empty: it is."""

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
        for name in (names.CHAOS, names.CHECKPOINT, names.RESUME, names.INSPECT):
            if name in annotations and _version(document) > self._handled_version:
                await self._carry_out(name, annotations[name])

    def reject(self, document: Document, text: str) -> None:
        """The spec has become invalid."""
        generation = int(document["metadata"]["generation"])
        if generation != self._refused_generation:
            self._refused_generation, self.refusal = generation, text
            text = f"training goes on with the previous spec: {text}"
            self._events.record("Warning", "InvalidSpec", text)

    async def _carry_out(self, name: str, text: str) -> None:
        """Remove an annotation and request what it asks for."""
        body = {"metadata": {"annotations": {name: None}}}
        after = await self._cluster.patch(JOBS, self._owner.namespace, self._owner.name, body)
        self._handled_version = _version(after)
        if name == names.CHECKPOINT:
            await self._request("checkpoint", by=text)
            return
        if name == names.INSPECT:  # a profile takes a while, and edits of the spec must not wait
            task = asyncio.get_running_loop().create_task(self._answer(text))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        try:
            wanted = json.loads(text)
            if name == names.RESUME:
                start_over = wanted.get("start_over") is True
                await self._request("resume", start_over=start_over, by=str(wanted.get("by", "")))
                return
            given = {key: wanted[key] for key in CHAOS_ARGUMENTS if wanted.get(key) is not None}
            kind = str(wanted.get("kind", ""))
        except (ValueError, AttributeError, TypeError, RecursionError):
            verb, example = "chaos", '{"kind": "kill-worker", "rank": 1}'
            if name == names.RESUME:
                verb, example = "resume", '{"start_over": false, "by": "me"}'
            text = f"annotation {name}: got {text!r}; expected JSON such as {example}"
            self._events.record("Warning", "Refused", text, {names.REQUEST: verb})
            return
        await self._request("chaos", kind=kind, **given)

    async def _answer(self, text: str) -> None:
        """A question: its answer is an annotation of an Event that names the question's id."""
        try:
            asked = json.loads(text)
            verb, arguments = asked["verb"], dict(asked.get("arguments") or {})
            if verb not in QUESTIONS:
                raise ValueError(verb)
            by, number = str(asked.get("by", "")), str(asked.get("id", ""))
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            example = '{"verb": "stacks", "arguments": {"ranks": [0]}, "by": "me", "id": "1"}'
            problem = f"annotation {names.INSPECT}: got {text!r}; expected JSON such as {example}"
            self._events.record("Warning", "Refused", problem, {names.REQUEST: "inspect"})
            return
        annotations = {names.REQUEST: number}
        try:
            reply = await self._runtime.control.perform(verb, arguments)
            packed = await asyncio.to_thread(_packed, reply.body)
            text, parts = base64.b64encode(packed).decode(), 0
            if len(text) <= MAX_ANSWER_CHARS:
                annotations[names.ANSWER] = text
            else:
                parts = await answer_parts.write(self._cluster, self._owner, number, packed)
                annotations[names.ANSWER_PARTS] = str(parts)
        except HoldfastError as error:  # ApiError, too
            self._events.record("Warning", "Refused", f"{verb}: {error}", annotations)
            return
        # With the id, which makes the message unlike that of any other Event: it would be counted.
        detail = f"{verb}: {reply.detail} (requested by {by}, {number})"
        self._events.record("Normal", verb.capitalize(), detail, annotations)
        if parts:
            await asyncio.sleep(answer_parts.KEPT_S)
            with suppress(ApiError):  # they go with the job
                await answer_parts.clear(self._cluster, self._owner, number, parts)

    def close(self) -> None:
        """Answer no question any more."""
        for task in self._answering:
            task.cancel()

    async def _request_code(self, generation: int, code: str | None) -> None:
        """Training goes on with the old code until the new one is there."""
        if code is not None:
            try:
                await self._code.part(code, 0)
            except CodeMissing as error:
                self._refused_generation, self.refusal = generation, f"spec.code: {error}"
                self._events.record("Warning", "Refused", self.refusal, {names.REQUEST: "again"})
                return
        await self._request_spec("again", generation, code=code or "")

    async def _request_spec(self, verb: str, generation: int, **arguments: Any) -> None:
        """A request of the spec is not repeated when it was refused."""
        refusal = await self._request(verb, by=BY_SPEC, **arguments)
        if refusal:
            self._refused_generation, self.refusal = generation, refusal

    async def _request(self, verb: str, **arguments: Any) -> str:
        """Returns why the controller refused; empty: it did not. The command line finds the answer
        by the annotations of the Event."""
        annotations = {names.REQUEST: verb}
        try:
            reply = await self._runtime.control.perform(verb, arguments)
        except UserError as error:
            self._events.record("Warning", "Refused", f"{verb}: {error}", annotations)
            return f"{verb}: {error}"
        if "step" in reply.body:
            annotations[names.STEP] = str(reply.body["step"])
        by = f" (requested by {arguments['by']})" if arguments.get("by") else ""
        self._events.record("Normal", verb.capitalize(), f"{verb}: {reply.detail}{by}", annotations)
        return ""


def _packed(body: Document) -> bytes:
    return zlib.compress(json.dumps(body).encode(), 9)


def suspended_before_start(document: Document) -> ConditionState:
    """The condition of a job with spec.suspend that was never started."""
    annotations = document["metadata"].get("annotations") or {}
    if names.CANCEL in annotations:
        by = annotations[names.CANCEL] or "a user"
        return ConditionState("cancelled", "Cancelled", f"cancelled by {by}; nothing was started")
    return ConditionState("suspended", "Suspended", "spec.suspend is set; nothing was started")


def _adjustable(job: TrainingJob) -> Document:
    """What a running job follows besides its size; the CRD refuses changes of anything else."""
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
