"""Gang scheduling of Kubernetes, the integration that a spec chooses, its problems, and
spec.managedBy. Pure."""

from __future__ import annotations

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Problem
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.errors import Resource
from holdfast.orchestrator.kube.names import Document

from .base import Integration, PodGang, with_spec
from .kueue import PRIORITY_LABEL, QUEUE_LABEL, Kueue

MANAGER = "holdfast.dev/operator"
"""Holdfast's name in spec.managedBy."""


class Native:
    """Gang scheduling of Kubernetes itself, tested against a real scheduler. The PodGroup names the
    minimum of members; the scheduler binds its pods when that many fit.

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

    def pod_group(self, gang: PodGang, api: Resource) -> Document:
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
            "spec": {"schedulingPolicy": {"gang": {"minCount": gang.size}}},
        }


def integration_of(job: TrainingJob) -> Integration | None:
    """None for a cluster without gang scheduling."""
    match job.spec.kubernetes.gang:
        case "kueue":
            return Kueue()
        case "native":
            return Native()
        case "none":
            return None


def with_queue_label(job: TrainingJob) -> TrainingJob:
    """The job with Kueue's labels as its fields: the way of Job, JobSet and RayJob. The labels
    alone, copied to pods, would make each pod a workload of its own."""
    labels, spec = job.metadata.labels, job.spec
    if QUEUE_LABEL not in labels:
        return job
    kubernetes = spec.kubernetes.model_copy(
        update={
            "gang": "kueue" if spec.kubernetes.gang == "none" else spec.kubernetes.gang,
            "workload_priority_class_name": spec.kubernetes.workload_priority_class_name
            or labels.get(PRIORITY_LABEL),
        }
    )
    queue = spec.queue or labels[QUEUE_LABEL]
    update = {"kubernetes": kubernetes, "queue": queue}
    return job.model_copy(update={"spec": spec.model_copy(update=update)})


def _label_problems(job: TrainingJob) -> list[Problem]:
    """Kueue's label says something else than the spec, or only the pods have it."""
    gang, queue = job.spec.kubernetes.gang, job.spec.queue
    labels = job.metadata.labels
    field = f"metadata.labels.{QUEUE_LABEL}"
    if QUEUE_LABEL in labels and gang != "kueue":
        expected = f"none with spec.kubernetes.gang {gang}"
        return [Problem(field, labels[QUEUE_LABEL], expected, "remove the label or the gang")]
    if QUEUE_LABEL in labels and queue != labels[QUEUE_LABEL]:
        fix = "leave one of them out"
        return [Problem(field, labels[QUEUE_LABEL], f"the same queue as spec.queue ({queue})", fix)]
    of_pods = (job.spec.kubernetes.pod_template.get("metadata") or {}).get("labels") or {}
    if QUEUE_LABEL in of_pods and gang != "kueue":
        field = f"spec.kubernetes.podTemplate.metadata.labels.{QUEUE_LABEL}"
        expected = "none: each pod would be admitted on its own"
        return [Problem(field, of_pods[QUEUE_LABEL], expected, "set the label on the job")]
    return []


def problems(job: TrainingJob) -> list[Problem]:
    """Combinations that work on no cluster."""
    gang, queue = job.spec.kubernetes.gang, job.spec.queue
    problems_of_job = _label_problems(job)
    if queue and gang != "kueue" and not problems_of_job:
        problems_of_job.append(
            Problem(
                "spec.queue",
                queue,
                f"none with spec.kubernetes.gang {gang}, which has no queues",
                "set kubernetes.gang to kueue, or remove the queue",
            )
        )
    if gang == "kueue" and not queue:
        problems_of_job.append(
            Problem(
                "spec.queue",
                "nothing",
                "the name of a LocalQueue of the job's namespace, because kubernetes.gang is kueue",
                "`kubectl get localqueues` lists them",
            )
        )
    priority = job.spec.kubernetes.workload_priority_class_name
    if priority and gang != "kueue":
        problems_of_job.append(
            Problem(
                "spec.kubernetes.workloadPriorityClassName",
                priority,
                f"nothing with kubernetes.gang {gang}: only Kueue has such classes",
                "use priorityClassName, or set kubernetes.gang to kueue",
            )
        )
    return problems_of_job


def has_other_manager(document: Document) -> bool:
    """Another controller manages the job, as with managedBy of a batch/v1 Job; the operator ignores
    it."""
    return (document.get("spec") or {}).get("managedBy") not in (None, MANAGER)
