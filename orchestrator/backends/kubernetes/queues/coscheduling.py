"""The coscheduling plugin of scheduler-plugins: a PodGroup with a minimum of members. Pure.

Owns: the names and fields that the plugin looks at. Must not: touch the API.

Source: https://github.com/kubernetes-sigs/scheduler-plugins/tree/master/pkg/coscheduling. Pods wait
within the scheduler until minMember of them have a place. Where the plugin runs in a second
scheduler, spec.kubernetes.podTemplate.spec.schedulerName says so.
"""

from __future__ import annotations

from holdfast.orchestrator.kube.errors import Resource

from .base import Document, PodGang, extra_document, resources_of, with_metadata

GROUP_LABEL = "scheduling.x-k8s.io/pod-group"


class Coscheduling:
    title = "coscheduling (scheduler-plugins)"
    apis: tuple[Resource, ...] = (Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups"),)
    remedy = (
        "install scheduler-plugins with the plugin Coscheduling "
        "(https://scheduler-plugins.sigs.k8s.io), or choose another spec.kubernetes.gang"
    )

    def pod(self, pod: Document, group: PodGang, *, member: bool) -> Document:
        return with_metadata(pod, labels={GROUP_LABEL: group.name})

    def extra(self, group: PodGang, api: Resource, pod: Document) -> Document:
        """minResources lets the plugin see early that there is no room for the gang."""
        needs = resources_of(pod, group.size)
        spec = {"minMember": group.size, "minResources": needs}
        return extra_document(group, api, "PodGroup", spec)
