"""The gang of a job, and the interface of an integration with a gang scheduler or queue. Pure.

The gang is the nodes without which the job cannot train: spec.nodes.min of them, scheduled as a
whole or not at all. Further nodes and spares are scheduled as capacity allows, which is what makes
a job elastic. Each of the systems expresses this as a minimum number of members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.kube.errors import Resource
from holdfast.orchestrator.kube.names import Document, Owner


@dataclass(frozen=True)
class PodGang:
    """The gang of one job."""

    owner: Owner
    size: int
    """Nodes that are scheduled together or not at all."""
    queue: str = ""
    workload_priority_class: str = ""

    @property
    def name(self) -> str:
        return f"{self.owner.name}-gang"


def gang_of(job: TrainingJob, owner: Owner) -> PodGang:
    kubernetes = job.spec.kubernetes
    return PodGang(
        owner=owner,
        size=job.spec.nodes.min,
        queue=job.spec.queue or "",
        workload_priority_class=kubernetes.workload_priority_class_name or "",
    )


class Integration(Protocol):
    """One system. Documents that are passed in are not changed."""

    title: str
    """Name for users."""
    apis: tuple[Resource, ...]
    """The kind of object that it needs, in each supported version, newest first. The first one that
    the cluster serves is used."""
    remedy: str
    """Fix for a cluster that serves none of them."""

    def pod(self, pod: Document, gang: PodGang, *, member: bool) -> Document:
        """The pod with the fields that the system reads. `member`: it belongs to the gang, which
        matters only to systems that count members exactly."""

    def pod_group(self, gang: PodGang, api: Resource) -> Document | None:
        """The object that has to exist before the pods, owned by the TrainingJob, or None."""


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
