"""TrainingJob object -> what the command line shows of it. Pure.

Owns: the way back from `.status` to a JobView for people, and telling whether an operator looks
after the object. Must not: touch the API or read a clock.
"""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from holdfast.orchestrator.api.v1alpha1.status import TrainingJobStatus
from holdfast.orchestrator.hosts.kubernetes.status import BUSY, FINISHED, view_of
from holdfast.orchestrator.kube.names import FIELD_MANAGER, LABEL_GENERATION, LABEL_RANK
from holdfast.orchestrator.runtime.observe.view import JobView, NodeState, NodeView, WorkerView

NS = 1_000_000_000
TAKE_UP_S = 15.0
"""An operator that runs has acted on a new or changed object by then, however busy."""
SILENCE_S = 60.0
"""While workers run, the status changes every few seconds."""

Document = dict[str, Any]


class Neglect(NamedTuple):
    """Nobody seems to look after the job."""

    what: str
    since_ns: int


def view_of_object(document: Document, now_ns: int) -> JobView:
    """All that the object tells. What a newer operator writes and we do not know is left out."""
    status = document.get("status") or {}
    known = _known(status, TrainingJobStatus)
    view = view_of({**document, "status": known}, now_ns)
    view.num_incidents = max((one.number for one in view.incidents), default=0)
    if status.get("state"):
        view.reason = _longest(str(status.get("reason") or ""), status)
    view.controller_alive = neglect(document, now_ns) is None
    return view


def neglect(document: Document, now_ns: int) -> Neglect | None:
    """Whether an operator should have written something by now, and has not."""
    metadata, status = document["metadata"], document.get("status") or {}
    state = status.get("state")
    if state in FINISHED:
        return None
    asked_ns, told_ns = asked_at(document), told_at(document)
    if not state:
        made_ns = time_ns(metadata.get("creationTimestamp"))
        what = "the operator has not looked at this job yet"
        return Neglect(what, made_ns) if now_ns - made_ns > TAKE_UP_S * NS else None
    behind = int(status.get("observedGeneration") or 0) < int(metadata.get("generation") or 0)
    if behind and now_ns - asked_ns > TAKE_UP_S * NS:
        return Neglect("the operator has not acted on the last change of the spec", asked_ns)
    if state in BUSY and told_ns and now_ns - told_ns > SILENCE_S * NS:
        return Neglect("the operator has not written anything", told_ns)
    return None


def told_at(document: Document) -> int:
    """When the operator last changed the status; 0: never."""
    return max(
        (
            time_ns(entry.get("time"))
            for entry in document["metadata"].get("managedFields") or ()
            if entry.get("subresource") == "status" and entry.get("manager") == FIELD_MANAGER
        ),
        default=0,
    )


def asked_at(document: Document) -> int:
    """When somebody last changed anything but the status."""
    metadata = document["metadata"]
    times = [
        time_ns(entry.get("time"))
        for entry in metadata.get("managedFields") or ()
        if entry.get("subresource") != "status" and entry.get("manager") != FIELD_MANAGER
    ]
    return max([*times, time_ns(metadata.get("creationTimestamp"))])


def nodes_of(document: Document, pods: list[Document]) -> list[NodeView]:
    """The job's nodes, in the order of their ranks, as far as its pods tell."""
    status = document.get("status") or {}
    found = []
    for pod in sorted(pods, key=lambda pod: (_first_rank(pod, status), pod["metadata"]["name"])):
        state = _node_state(pod, status)
        node = NodeView(name=pod["metadata"]["name"], state=state)
        where = pod.get("spec", {}).get("nodeName") or ""
        address = pod.get("status", {}).get("podIP") or ""
        node.address = f"{address} on {where}" if address and where else address or where
        if state == "member" and status.get("state") == "running":
            first = _first_rank(pod, status)
            count = int(document["spec"].get("workersPerNode") or 1)
            node.workers = [
                WorkerView(rank=first + local, local_rank=local, state="running")
                for local in range(count)
            ]
        found.append(node)
    return found


NO_RANK = 10**9


def _first_rank(pod: Document, status: Document) -> int:
    """In the current generation."""
    labels = pod["metadata"].get("labels") or {}
    rank = labels.get(LABEL_RANK, "")
    current = labels.get(LABEL_GENERATION) == str(status.get("generation", ""))
    return int(rank) if current and rank.isdigit() else NO_RANK


def _node_state(pod: Document, status: Document) -> NodeState:
    phase = pod.get("status", {}).get("phase")
    if pod["metadata"].get("deletionTimestamp") or phase in ("Succeeded", "Failed"):
        return "lost"
    if _first_rank(pod, status) != NO_RANK:
        return "member"
    has_spares = bool((status.get("nodes") or {}).get("spares"))
    return "spare" if phase == "Running" and has_spares else "joining"


def time_ns(text: str | None) -> int:
    """Of a time as the API writes it; 0 for none."""
    return int(datetime.datetime.fromisoformat(text).timestamp() * NS) if text else 0


def _longest(reason: str, status: Document) -> str:
    """A condition's message says what the reason says, and why pods do not start."""
    messages = [str(one.get("message", "")) for one in status.get("conditions") or ()]
    return max((m for m in messages if m.startswith(reason)), key=len, default=reason)


def _known(value: Any, model: type[BaseModel]) -> Document:
    """Without fields that this version of the model does not have."""
    made = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key not in value:
            continue
        inner = next((one for one in _models(field.annotation)), None)
        child = value[key]
        if inner is not None and isinstance(child, dict):
            child = _known(child, inner)
        elif inner is not None and isinstance(child, list):
            child = [_known(one, inner) for one in child]
        made[key] = child
    return made


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
