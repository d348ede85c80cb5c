"""What people write into a TrainingJob while it runs -> requests to its controller.

Owns: telling which wishes are new: size, suspend, and the annotations for cancel, chaos and
checkpoint. Must not: decide whether a wish can be granted; the controller says no in words.

Spec and state are compared whenever the object changes, so a wish made while no operator ran is
granted by the next one. Annotations that are acts, not states (chaos, checkpoint) are removed
before they are carried out: an operator that dies in between forgets a rehearsal instead of doing
it twice.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS
from holdfast.orchestrator.kube.event_recorder import EventRecorder
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime.job_runtime import JobRuntime

from .status import ConditionState

Document = dict[str, Any]
CHAOS_ARGUMENTS = ("rank", "node", "hold_s", "by")

log = logging.getLogger("holdfast.operator")


class SpecSync:
    """Of one running job."""

    def __init__(
        self, owner: Owner, cluster: KubeClient, assembly: JobRuntime, events: EventRecorder
    ) -> None:
        self._owner, self._cluster = owner, cluster
        self._assembly, self._events = assembly, events
        self._refused_generation = 0
        self._adjusted = 0
        """Generation of the object that was followed last: said once, however it turned out."""
        self._acted_version = 0
        """Of the object, without the act that was carried out last: older ones may still hold it.
        Resource versions of one kind of object are ordered integers."""
        self.refusal = ""
        """Why the spec, as it stands, is not followed; empty: it is."""

    async def follow(self, document: Document, job: TrainingJob) -> None:
        """Raises ApiError."""
        annotations = document["metadata"].get("annotations") or {}
        state = self._assembly.driver.controller.state
        if state.terminal:
            return
        if names.CANCEL in annotations and state.intent != "cancel":
            await self._perform("cancel", by=annotations[names.CANCEL])
            return
        generation = int(document["metadata"]["generation"])
        if self._refused_generation != generation:
            self.refusal = ""
            if job.spec.nodes.max != state.target_nodes:
                await self._perform("resize", generation, nodes=job.spec.nodes.max, by="its spec")
            if self._adjusted != generation and _adjustable(job) != _adjustable(state.job):
                self._adjusted = generation
                await self._perform("adjust", generation, by="its spec", **_adjustable(job))
            if job.spec.suspend and state.intent == "run":
                await self._perform("suspend", generation, by="its spec")
            elif not job.spec.suspend and state.intent == "suspend":
                await self._perform("resume", generation, by="its spec")
        for name in (names.CHAOS, names.CHECKPOINT):
            if name in annotations and _version(document) > self._acted_version:
                await self._act(name, annotations[name])

    def refuse(self, document: Document, text: str) -> None:
        """The spec became one that no job can have."""
        generation = int(document["metadata"]["generation"])
        if generation != self._refused_generation:
            self._refused_generation, self.refusal = generation, text
            self._events.record("Warning", "InvalidSpec", f"the job goes on as it was: {text}")

    async def _act(self, name: str, text: str) -> None:
        body = {"metadata": {"annotations": {name: None}}}
        after = await self._cluster.patch(JOBS, self._owner.namespace, self._owner.name, body)
        self._acted_version = _version(after)
        if name == names.CHECKPOINT:
            await self._perform("checkpoint", by=text)
            return
        try:
            wanted = json.loads(text)
            given = {key: wanted[key] for key in CHAOS_ARGUMENTS if wanted.get(key) is not None}
            kind = str(wanted.get("kind", ""))
        except (ValueError, AttributeError, TypeError):
            self._events.record(
                "Warning", "Refused",
                f"annotation {name}: got {text!r}; expected JSON such as "
                f'{{"kind": "kill-worker", "rank": 1}}',
            )  # fmt: skip
            return
        await self._perform("chaos", kind=kind, **given)

    async def _perform(self, verb: str, generation: int = 0, **arguments: Any) -> None:
        """With `generation`: a wish of the spec, which is not repeated when it is refused."""
        try:
            reply = await self._assembly.control.perform(verb, arguments)
        except UserError as error:
            self._events.record("Warning", "Refused", f"{verb}: {error}")
            if generation:
                self._refused_generation, self.refusal = generation, f"{verb}: {error}"
            return
        by = arguments.get("by")
        text = f"{verb}: {reply.detail}" + (f" (asked for by {by})" if by else "")
        self._events.record("Normal", verb.capitalize(), text)


def held(document: Document) -> ConditionState:
    """Of a job with spec.suspend that was never started."""
    annotations = document["metadata"].get("annotations") or {}
    if names.CANCEL in annotations:
        who = annotations[names.CANCEL] or "somebody"
        return ConditionState("cancelled", "Cancelled", f"cancelled by {who}; nothing was started")
    return ConditionState("suspended", "Suspended", "spec.suspend is set; nothing was started")


def _adjustable(job: TrainingJob) -> Document:
    """What a running job follows beside its size; the CRD refuses changes of anything else."""
    recovery = job.spec.recovery.model_dump(mode="json", by_alias=True)
    nodes = job.spec.nodes
    return {"min_nodes": nodes.min, "spares": nodes.spares, "recovery": recovery}


def _version(document: Document) -> int:
    return int(document["metadata"]["resourceVersion"])
