"""A TrainingJob object for the command line: the JobView of its status, the nodes of its pods, and
whether an operator handles it. Pure."""

from __future__ import annotations

import datetime
from typing import NamedTuple

from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.hosts.kubernetes.status import BUSY, condition, view_of
from holdfast.orchestrator.kube.client import Document
from holdfast.orchestrator.kube.names import FIELD_MANAGER, LABEL_GENERATION, LABEL_RANK
from holdfast.orchestrator.runtime.observe.view import JobView, NodeState, NodeView, WorkerView

RESPONSE_S = 15.0
"""An operator acts on a new or changed object within this time, however busy it is."""
STATUS_TIMEOUT_S = 60.0
"""Age at which a status is stale: while workers run, the status changes every few seconds."""


class OperatorAbsence(NamedTuple):
    """No operator seems to handle the job."""

    what: str
    since_ns: int


def view_of_object(document: Document, now_ns: int) -> JobView:
    """The view of a job's object. Fields that only a newer operator knows are left out."""
    view = view_of(document, now_ns)
    view.num_incidents = max((incident.number for incident in view.incidents), default=0)
    view.controller_alive = operator_absence(document, now_ns) is None
    return view


def operator_absence(document: Document, now_ns: int) -> OperatorAbsence | None:
    """Operator's absence: it should have written something by now, and has not."""
    metadata, status = document["metadata"], document.get("status") or {}
    state = status.get("state")
    if state in TERMINAL:
        return None
    if not state:
        created_ns = time_ns(metadata.get("creationTimestamp"))
        what = "the operator has not looked at this job yet"
        late = now_ns - created_ns > RESPONSE_S * SECOND_NS
        return OperatorAbsence(what, created_ns) if late else None
    changed_ns, written_ns = spec_changed_ns(document), status_written_ns(document)
    behind = int(status.get("observedGeneration") or 0) < int(metadata.get("generation") or 0)
    if behind and now_ns - changed_ns > RESPONSE_S * SECOND_NS:
        what = "the operator has not acted on the last change of the spec"
        return OperatorAbsence(what, changed_ns)
    if state in BUSY and written_ns and now_ns - written_ns > STATUS_TIMEOUT_S * SECOND_NS:
        return OperatorAbsence("no operator has looked at this job", written_ns)
    return None


def is_refused(document: Document) -> bool:
    """The job cannot start until the spec or the cluster is changed."""
    metadata, accepted = document["metadata"], condition(document, "Accepted")
    return accepted.get("status") == "False" and accepted.get("observedGeneration") == metadata.get(
        "generation"
    )


def status_written_ns(document: Document) -> int:
    """Time of the operator's last change of the status; 0: never."""
    return max(
        (
            time_ns(entry.get("time"))
            for entry in document["metadata"].get("managedFields") or ()
            if entry.get("subresource") == "status" and entry.get("manager") == FIELD_MANAGER
        ),
        default=0,
    )


def spec_changed_ns(document: Document) -> int:
    """Time of the last change of anything but the status by others than the operator."""
    metadata = document["metadata"]
    times = [
        time_ns(entry.get("time"))
        for entry in metadata.get("managedFields") or ()
        if entry.get("subresource") != "status" and entry.get("manager") != FIELD_MANAGER
    ]
    return max([*times, time_ns(metadata.get("creationTimestamp"))])


def nodes_of(document: Document, pods: list[Document]) -> list[NodeView]:
    """The nodes of a job by its pods, in the order of their ranks; those without ranks last."""
    status = document.get("status") or {}
    per_node = int(document["spec"].get("workersPerNode") or 1)
    nodes = []
    for pod in pods:
        first = _first_rank(pod, status)
        node = NodeView(name=pod["metadata"]["name"], state=_node_state(pod, status, first))
        machine = pod.get("spec", {}).get("nodeName") or ""
        address = pod.get("status", {}).get("podIP") or ""
        node.address = f"{address} on {machine}" if address and machine else address or machine
        if node.state == "member" and status.get("state") == "running" and first is not None:
            node.workers = [
                WorkerView(rank=first + local, local_rank=local, state="running")
                for local in range(per_node)
            ]
        nodes.append((first is None, first or 0, node.name, node))
    return [node for *_key, node in sorted(nodes, key=lambda entry: entry[:3])]


def _first_rank(pod: Document, status: Document) -> int | None:
    """First rank in the current generation; None: the pod has no ranks."""
    labels = pod["metadata"].get("labels") or {}
    rank = labels.get(LABEL_RANK, "")
    current = labels.get(LABEL_GENERATION) == str(status.get("generation", ""))
    return int(rank) if current and rank.isdigit() else None


def _node_state(pod: Document, status: Document, first_rank: int | None) -> NodeState:
    phase = pod.get("status", {}).get("phase")
    if pod["metadata"].get("deletionTimestamp") or phase in ("Succeeded", "Failed"):
        return "lost"
    if first_rank is not None:
        return "member"
    has_spares = bool((status.get("nodes") or {}).get("spares"))
    return "spare" if phase == "Running" and has_spares else "joining"


def time_ns(text: str | None) -> int:
    """A time of the API in nanoseconds; 0 for none."""
    return int(datetime.datetime.fromisoformat(text).timestamp() * SECOND_NS) if text else 0
