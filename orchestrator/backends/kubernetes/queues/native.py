"""Gang scheduling of Kubernetes itself: a PodGroup of scheduling.k8s.io. Pure.

Owns: the names and fields of that API. Must not: touch the API.

Source: k8s.io/api/scheduling: v1alpha2 (Kubernetes 1.36, off unless the gates GenericWorkload and
GangScheduling and the API version are switched on) and v1beta1 (1.37). Both have the same PodGroup
as far as it is used here; a Workload, from which PodGroups can be made, is not needed. The API of
1.35 (v1alpha1, pods with a workloadRef) was replaced without a way over, and is not supported.

In v1alpha2 the number of members cannot be changed, and a PodGroup stays while pods refer to it:
when nodes.min of a running job becomes smaller, its further nodes are placed by themselves.
"""

from __future__ import annotations

from holdfast.orchestrator.kube.errors import Resource

from .base import Document, PodGang, extra_document, with_spec


class Native:
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

    def pod(self, pod: Document, group: PodGang, *, member: bool) -> Document:
        return with_spec(pod, schedulingGroup={"podGroupName": group.name})

    def extra(self, group: PodGang, api: Resource, pod: Document) -> Document:
        policy = {"gang": {"minCount": group.size}}
        return extra_document(group, api, "PodGroup", {"schedulingPolicy": policy})
