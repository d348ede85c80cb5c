"""Kueue: pods that wait behind a gate until their queue has quota for them. Pure.

Owns: the names that Kueue looks at, and how a job's pods form groups. Must not: touch the API.

Source: https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/ and KEP-976 (plain pods). What decides:

* A pod group has one size, which cannot change, and is admitted as a whole. So the gang
  (nodes.min) is a pod group, and every node beyond it is a pod of its own, which is asked for only
  once the gang is admitted: before, such pods could take the quota that the gang waits for.
* The group keeps the quota of a pod that failed, for its replacement. A replacement counts only if
  its role is that of the lost pod; the role is normally a hash of resources, affinity and so on,
  and ours may differ (they keep away from blamed nodes), so all have one role, named in an
  annotation, as Kueue's own controllers do it.
* A pod that ended well is not replaced, and a deleted member stays, by a finalizer, until a
  replacement is there or the group is over. A node that was given back, and a job that is deleted
  or held in the queue, have neither: their finalizer is taken off (finalizers.py).
* A group is over when all its pods ended well, or when all have ended and one of them says that
  none will be replaced. A job that ends says so: its quota is free although pods stay for their
  logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.orchestrator.kube.errors import Resource

from .. import pod_conditions
from .base import Document, PodGang, with_metadata, with_spec

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

    def pod(self, pod: Document, group: PodGang, *, member: bool) -> Document:
        """The gate and the label are what Kueue's webhook would set: a pod that it does not see
        must not pass the queue by."""
        labels = {QUEUE_LABEL: group.queue, MANAGED: "true"}
        if group.workload_priority_class:
            labels[PRIORITY_LABEL] = group.workload_priority_class
        notes = {}
        if member:
            labels[GROUP_LABEL] = group.name
            notes = {COUNT_NOTE: str(group.size), ROLE_NOTE: ROLE}
        gates = [*pod["spec"].get("schedulingGates", ()), {"name": GATE}]
        unique = list({gate["name"]: gate for gate in gates}.values())
        return with_spec(with_metadata(pod, labels=labels, notes=notes), schedulingGates=unique)

    def extra(self, group: PodGang, api: Resource, pod: Document) -> None:
        """None: Kueue makes its Workload itself, from the pods."""


def is_held(pod: Document) -> bool:
    """Kueue has not admitted it."""
    gates = pod["spec"].get("schedulingGates") or ()
    return any(gate["name"] == GATE for gate in gates) and not pod_conditions.is_leaving(pod)


def is_member(pod: Document) -> bool:
    return GROUP_LABEL in pod["metadata"].get("labels", {})


def members_wanted(pods: Mapping[str, Document], group: PodGang) -> int:
    """So many are missing from the gang, as Kueue counts it. `pods`: all of the job.

    A member that is deleted and still runs has its place until it has ended: one more would be one
    too many, and Kueue deletes the newest of those.
    """
    return max(0, group.size - sum(map(_has_place, pods.values())))


def _has_place(pod: Document) -> bool:
    never_ran = pod_conditions.is_leaving(pod) and not pod_conditions.place(pod)
    return is_member(pod) and _phase(pod) != "Failed" and not never_ran


def is_ending(pod: Document) -> bool:
    """A member whose place will soon be free for its replacement."""
    return pod_conditions.is_leaving(pod) and _has_place(pod)


def spent(pods: Mapping[str, Document]) -> list[str]:
    """Members that ended well while the job goes on: only when they are deleted is their place in
    the gang free."""
    return [
        name
        for name, pod in pods.items()
        if is_member(pod) and _phase(pod) == "Succeeded" and not pod_conditions.is_leaving(pod)
    ]


def _phase(pod: Document) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def given_back(pod: Document) -> dict[str, Any] | None:
    """A patch that lets a deleted member of the gang go that does not run any more or never did;
    None: nothing is to be done. Its quota stays with the group, for a replacement."""
    finalizers = pod["metadata"].get("finalizers") or []
    if MANAGED not in finalizers or not (is_member(pod) and pod_conditions.is_leaving(pod)):
        return None
    if pod_conditions.place(pod) and not pod_conditions.is_over(pod):
        return None
    return {"metadata": {"finalizers": [name for name in finalizers if name != MANAGED]}}


NO_REPLACEMENT: dict[str, Any] = {"metadata": {"annotations": {RETRIABLE_NOTE: "false"}}}
"""A patch: no pod of the group will be replaced."""
