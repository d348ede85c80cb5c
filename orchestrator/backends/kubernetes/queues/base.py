"""What an integration has to know of a job, and what it has to be able to do. Pure.

Owns: the gang of a job, its name, and how much its members ask for together. Must not: know any one
integration, or touch the API.

The gang is the nodes without which the job cannot train: spec.nodes.min of them, placed as a whole
or not at all. Nodes beyond that and spares come as room allows: that is what makes a job elastic,
and each of the systems knows it as a minimum of members.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.errors import Resource
from holdfast.orchestrator.kube.names import Owner

Document = dict[str, Any]

_UNITS = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "E": 1e18, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
    "Ei": 2.0**60,
}  # fmt: skip
"""Of quantities in a pod template, which may be written in all of Kubernetes' ways."""


@dataclass(frozen=True)
class PodGang:
    """The gang of one job."""

    owner: Owner
    size: int
    """Nodes that are placed together or not at all."""
    queue: str = ""
    priority_class: str = ""
    """Of the pods."""
    workload_priority_class: str = ""
    """Of the queue, where it has its own."""

    @property
    def name(self) -> str:
        return f"{self.owner.name}-gang"


def group_of(job: TrainingJob, owner: Owner) -> PodGang:
    wanted = job.spec.kubernetes
    template = wanted.pod_template.get("spec", {})
    return PodGang(
        owner=owner,
        size=job.spec.nodes.min,
        queue=job.spec.queue or "",
        priority_class=template.get("priorityClassName") or wanted.priority_class_name or "",
        workload_priority_class=wanted.workload_priority_class_name or "",
    )


class Integration(Protocol):
    """One system. Documents that are given are not changed."""

    title: str
    """As people call it."""
    apis: tuple[Resource, ...]
    """Of the object that it wants, or needs at least: the newest version first; the first that the
    cluster serves is used."""
    remedy: str
    """What to do where the cluster serves none of them."""

    def pod(self, pod: Document, group: PodGang, *, member: bool) -> Document:
        """The pod with what makes it known to the system. `member`: it belongs to the gang; only
        systems that count members exactly make a difference."""

    def extra(self, group: PodGang, api: Resource, pod: Document) -> Document | None:
        """The object that has to be there before the pods, owned by the TrainingJob. `pod`: what
        the pods of the job look like."""


def extra_document(group: PodGang, api: Resource, kind: str, spec: Document) -> Document:
    return {
        "apiVersion": f"{api.group}/{api.version}",
        "kind": kind,
        "metadata": {
            "name": group.name,
            "namespace": group.owner.namespace,
            "labels": {
                names.LABEL_JOB: group.owner.name,
                "app.kubernetes.io/managed-by": "holdfast",
            },
            "ownerReferences": [names.owner_reference(group.owner.name, group.owner.uid)],
        },
        "spec": spec,
    }


def with_metadata(
    pod: Document, *, labels: dict[str, str] | None = None, notes: dict[str, str] | None = None
) -> Document:
    """The pod with further labels and annotations (`notes`)."""
    metadata = dict(pod["metadata"])
    if labels:
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
    if notes:
        metadata["annotations"] = {**metadata.get("annotations", {}), **notes}
    return {**pod, "metadata": metadata}


def with_spec(pod: Document, **fields: Any) -> Document:
    return {**pod, "spec": {**pod["spec"], **fields}}


def resources_of(pod: Document, count: int) -> dict[str, str]:
    """What `count` such pods request: resource -> quantity.

    A limit without a request is a request, and init containers run before the others; see
    https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers
    """
    spec = pod["spec"]
    total: dict[str, float] = {}
    for container in spec["containers"]:
        for name, amount in _requests(container).items():
            total[name] = total.get(name, 0.0) + amount
    for container in spec.get("initContainers") or ():
        beside = container.get("restartPolicy") == "Always"
        for name, amount in _requests(container).items():
            have = total.get(name, 0.0)
            total[name] = have + amount if beside else max(have, amount)
    for name, amount in (spec.get("overhead") or {}).items():
        total[name] = total.get(name, 0.0) + _number(amount)
    return {name: _quantity(name, amount * count) for name, amount in sorted(total.items())}


def _requests(container: Document) -> dict[str, float]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: _number(amount) for name, amount in wanted.items()}


def _number(amount: Any) -> float:
    if isinstance(amount, int | float):
        return float(amount)
    text = str(amount)
    for length in (2, 1):
        if text[-length:] in _UNITS:
            return float(text[:-length]) * _UNITS[text[-length:]]
    return float(text)


def _quantity(name: str, amount: float) -> str:
    """CPU in thousandths, everything else whole."""
    thousandths = math.ceil(amount * 1000 - 1e-6)
    if name == "cpu" and thousandths % 1000:
        return f"{thousandths}m"
    return str(math.ceil(amount - 1e-9))
