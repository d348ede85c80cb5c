"""Kueue: pods wait behind a scheduling gate until their queue has quota for them. Pure.

Written to the published CRDs and KEP-976 (plain pods), with tests against these; not run against a
real Kueue. Source: https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/. The rules that matter:

* A pod group has a fixed size and is admitted as a whole. So the gang (nodes.min) is a pod group,
  and each further node is a single pod, which is requested after the gang is admitted: earlier it
  could take the quota that the gang waits for.
* The group keeps the quota of a failed pod for a replacement of the same role. By default the role
  is a hash of resources, affinity and so on. Pods of a job differ in their affinity, so all get the
  same role by an annotation, as Kueue's own controllers do.
* A pod that succeeded is not replaced. A deleted member stays, by a finalizer, until it has a
  replacement or the group is over. A released node and a job that is deleted or suspended in the
  queue have neither; finalizers.py removes their finalizer.
* A group is over when all its pods succeeded, or when all have ended and one has the annotation
  that none will be replaced. A finished job sets it, so that its quota is free while its pods stay
  for their logs.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.orchestrator.kube.errors import Resource
from holdfast.orchestrator.kube.names import Document

from .. import pod_conditions
from .base import PodGang, with_metadata, with_spec

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
MANAGED = "kueue.x-k8s.io/managed"
"""Label, and finalizer by which Kueue keeps pods until it has counted them."""
GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
COUNT_NOTE = "kueue.x-k8s.io/pod-group-total-count"
ROLE_NOTE = "kueue.x-k8s.io/role-hash"
ROLE = "main"
RETRIABLE_NOTE = "kueue.x-k8s.io/retriable-in-group"
GATE = "kueue.x-k8s.io/admission"

LOCAL_QUEUES = (
    Resource("kueue.x-k8s.io", "v1beta2", "localqueues"),
    Resource("kueue.x-k8s.io", "v1beta1", "localqueues"),
)


class Kueue:
    title = "Kueue"
    apis: tuple[Resource, ...] = LOCAL_QUEUES
    remedy = (
        "install Kueue (https://kueue.sigs.k8s.io) with its integration for pods, or choose "
        "another spec.kubernetes.gang"
    )

    def pod(self, pod: Document, gang: PodGang, *, member: bool) -> Document:
        """Sets the gate and the label like Kueue's webhook, so that a pod which the webhook misses
        does not bypass the queue."""
        labels = {QUEUE_LABEL: gang.queue, MANAGED: "true"}
        if gang.workload_priority_class:
            labels[PRIORITY_LABEL] = gang.workload_priority_class
        notes = {}
        if member:
            labels[GROUP_LABEL] = gang.name
            notes = {COUNT_NOTE: str(gang.size), ROLE_NOTE: ROLE}
        gates = [*pod["spec"].get("schedulingGates", ()), {"name": GATE}]
        unique = list({gate["name"]: gate for gate in gates}.values())
        return with_spec(with_metadata(pod, labels=labels, notes=notes), schedulingGates=unique)

    def pod_group(self, gang: PodGang, api: Resource) -> None:
        """Kueue makes its Workload itself, from the pods."""


def is_held(pod: Document) -> bool:
    """Kueue has not admitted it."""
    gates = pod["spec"].get("schedulingGates") or ()
    return any(gate["name"] == GATE for gate in gates) and not pod_conditions.is_terminating(pod)


def is_member(pod: Document) -> bool:
    return GROUP_LABEL in pod["metadata"].get("labels", {})


def members_wanted(pods: Mapping[str, Document], gang: PodGang) -> int:
    """Members that the gang lacks, as Kueue counts them. `pods`: all of the job.

    A member that is deleted and still runs counts until it has ended. Kueue deletes the newest pod
    of a group with too many.
    """
    return max(0, gang.size - sum(map(_counts, pods.values())))


def _counts(pod: Document) -> bool:
    never_ran = pod_conditions.is_terminating(pod) and not pod_conditions.node_name(pod)
    return is_member(pod) and _phase(pod) != "Failed" and not never_ran


def is_ending(pod: Document) -> bool:
    """A member that will soon be replaceable."""
    return pod_conditions.is_terminating(pod) and _counts(pod)


def succeeded_members(pods: Mapping[str, Document]) -> list[str]:
    """Members that succeeded while the job continues; they must be deleted to be replaceable."""
    return [
        name
        for name, pod in pods.items()
        if is_member(pod) and _phase(pod) == "Succeeded" and not pod_conditions.is_terminating(pod)
    ]


def _phase(pod: Document) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def finalizer_patch(pod: Document) -> Document | None:
    """The patch that releases a deleted member which has ended or never ran; None for other pods.
    Its quota stays with the group for a replacement."""
    finalizers = pod["metadata"].get("finalizers") or []
    if MANAGED not in finalizers or not (is_member(pod) and pod_conditions.is_terminating(pod)):
        return None
    if pod_conditions.node_name(pod) and not pod_conditions.is_over(pod):
        return None
    return {"metadata": {"finalizers": [name for name in finalizers if name != MANAGED]}}


NO_REPLACEMENT: Document = {"metadata": {"annotations": {RETRIABLE_NOTE: "false"}}}
"""The patch which declares that no pod of the group will be replaced."""
