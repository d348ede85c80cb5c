"""Gang schedulers that read a PodGroup: Volcano, coscheduling, and Kubernetes itself. Pure.

The PodGroup names the minimum of members; a scheduler binds its pods when that many fit.
"""

from __future__ import annotations

import math
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.errors import Resource
from holdfast.orchestrator.kube.names import Document

from .base import PodGang, with_metadata, with_spec


class Volcano:
    """Written to the published CRDs, with tests against these; not run against a real Volcano.

    Source: https://volcano.sh/en/docs/podgroup/ and the types of scheduling.volcano.sh/v1beta1. The
    scheduler starts with a PodGroup when its queue has capacity for minResources.
    """

    title = "Volcano"
    apis: tuple[Resource, ...] = (Resource("scheduling.volcano.sh", "v1beta1", "podgroups"),)
    remedy = "install Volcano (https://volcano.sh), or choose another spec.kubernetes.gang"

    def pod(self, pod: Document, gang: PodGang, *, member: bool) -> Document:
        """A scheduler that the template names stays: Volcano may run under another name."""
        named = with_metadata(pod, notes={"scheduling.k8s.io/group-name": gang.name})
        return with_spec(named, schedulerName=pod["spec"].get("schedulerName") or "volcano")

    def pod_group(self, gang: PodGang, api: Resource, pod: Document) -> Document:
        spec: Document = {"minMember": gang.size, "minResources": requests_of(pod, gang.size)}
        if gang.queue:
            spec["queue"] = gang.queue
        if gang.priority_class:
            spec["priorityClassName"] = gang.priority_class
        return _pod_group(gang, api, spec)


class Coscheduling:
    """Written to the published CRDs, with tests against these; not run against the real plugin.

    Source: https://github.com/kubernetes-sigs/scheduler-plugins/tree/master/pkg/coscheduling. Where
    the plugin runs in a second scheduler, the podTemplate's spec.schedulerName names that one.
    """

    title = "coscheduling (scheduler-plugins)"
    apis: tuple[Resource, ...] = (Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups"),)
    remedy = (
        "install scheduler-plugins with the plugin Coscheduling "
        "(https://scheduler-plugins.sigs.k8s.io), or choose another spec.kubernetes.gang"
    )

    def pod(self, pod: Document, gang: PodGang, *, member: bool) -> Document:
        return with_metadata(pod, labels={"scheduling.x-k8s.io/pod-group": gang.name})

    def pod_group(self, gang: PodGang, api: Resource, pod: Document) -> Document:
        """With minResources the plugin sees early that there is no capacity for the gang."""
        needs = requests_of(pod, gang.size)
        return _pod_group(gang, api, {"minMember": gang.size, "minResources": needs})


class Native:
    """Gang scheduling of Kubernetes itself, tested against a real scheduler.

    Source: k8s.io/api/scheduling: v1alpha2 (Kubernetes 1.36, off unless the gates GenericWorkload
    and GangScheduling and the API version are switched on) and v1beta1 (1.37). A PodGroup is the
    same in both as far as it is used here; a Workload, from which PodGroups can be made, is not
    needed. v1alpha1 of Kubernetes 1.35 (pods with a workloadRef) is not supported: it was replaced
    without a migration.

    In v1alpha2 the minimum cannot be changed, and a PodGroup stays while pods refer to it. When
    nodes.min of a running job becomes smaller, its further pods are scheduled individually.
    """

    title = "gang scheduling of Kubernetes"
    apis: tuple[Resource, ...] = (
        Resource("scheduling.k8s.io", "v1beta1", "podgroups"),
        Resource("scheduling.k8s.io", "v1alpha2", "podgroups"),
    )
    remedy = (
        "it takes Kubernetes 1.36 or newer with the feature gates GenericWorkload and "
        "GangScheduling on API server and scheduler and, in 1.36, the API server's "
        "--runtime-config=scheduling.k8s.io/v1alpha2=true; switch them on, or choose another "
        "spec.kubernetes.gang"
    )

    def pod(self, pod: Document, gang: PodGang, *, member: bool) -> Document:
        return with_spec(pod, schedulingGroup={"podGroupName": gang.name})

    def pod_group(self, gang: PodGang, api: Resource, pod: Document) -> Document:
        return _pod_group(gang, api, {"schedulingPolicy": {"gang": {"minCount": gang.size}}})


def _pod_group(gang: PodGang, api: Resource, spec: Document) -> Document:
    owner = gang.owner
    return {
        "apiVersion": f"{api.group}/{api.version}",
        "kind": "PodGroup",
        "metadata": {
            "name": gang.name,
            "namespace": owner.namespace,
            "labels": {
                names.LABEL_JOB: owner.name,
                "app.kubernetes.io/managed-by": "holdfast",
            },
            "ownerReferences": [names.owner_reference(owner.name, owner.uid)],
        },
        "spec": spec,
    }


def requests_of(pod: Document, count: int) -> dict[str, str]:
    """What `count` such pods request: resource -> quantity.

    A limit without a request is a request, and init containers run before the others; see
    https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers
    """
    spec, total = pod["spec"], dict[str, Decimal]()
    zero = Decimal(0)
    for container in spec["containers"]:
        for name, amount in _requests(container).items():
            total[name] = total.get(name, zero) + amount
    for container in spec.get("initContainers") or ():
        is_sidecar = container.get("restartPolicy") == "Always"
        for name, amount in _requests(container).items():
            before = total.get(name, zero)
            total[name] = before + amount if is_sidecar else max(before, amount)
    for name, text in (spec.get("overhead") or {}).items():
        amount = parse_quantity(text)  # type: ignore[no-untyped-call]
        total[name] = total.get(name, zero) + amount
    return {name: _quantity(name, amount * count) for name, amount in sorted(total.items())}


def _requests(container: Document) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    requests = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {
        name: parse_quantity(text)  # type: ignore[no-untyped-call]
        for name, text in requests.items()
    }


def _quantity(name: str, amount: Decimal) -> str:
    """CPU in millicores, everything else as a whole number."""
    millicores = math.ceil(amount * 1000)
    if name == "cpu" and millicores % 1000:
        return f"{millicores}m"
    return str(math.ceil(amount))
