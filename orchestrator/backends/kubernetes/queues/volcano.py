"""Volcano: a PodGroup with a minimum of members and what they need, its scheduler and queues. Pure.

Owns: the names and fields that Volcano looks at. Must not: touch the API.

Source: https://volcano.sh/en/docs/podgroup/ and the types of scheduling.volcano.sh/v1beta1. The
scheduler begins with a PodGroup when its queue has room for minResources, and binds its pods when
minMember of them have a place; pods beyond that follow one by one.
"""

from __future__ import annotations

from holdfast.orchestrator.kube.errors import Resource

from .base import Document, PodGang, extra_document, resources_of, with_metadata, with_spec

GROUP_NAME = "scheduling.k8s.io/group-name"
"""Annotation of a pod: its PodGroup."""
SCHEDULER = "volcano"


class Volcano:
    title = "Volcano"
    apis: tuple[Resource, ...] = (Resource("scheduling.volcano.sh", "v1beta1", "podgroups"),)
    remedy = "install Volcano (https://volcano.sh), or choose another spec.kubernetes.gang"

    def pod(self, pod: Document, group: PodGang, *, member: bool) -> Document:
        """A scheduler that the template names stays: Volcano can run under another name."""
        named = with_metadata(pod, notes={GROUP_NAME: group.name})
        return with_spec(named, schedulerName=pod["spec"].get("schedulerName") or SCHEDULER)

    def extra(self, group: PodGang, api: Resource, pod: Document) -> Document:
        spec: Document = {"minMember": group.size, "minResources": resources_of(pod, group.size)}
        if group.queue:
            spec["queue"] = group.queue
        if group.priority_class:
            spec["priorityClassName"] = group.priority_class
        return extra_document(group, api, "PodGroup", spec)
