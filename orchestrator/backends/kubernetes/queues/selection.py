"""The integration that a spec chooses, its problems, and spec.managedBy. Pure."""

from __future__ import annotations

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Problem
from holdfast.orchestrator.kube.names import Document

from .base import Integration
from .kueue import Kueue
from .pod_groups import Coscheduling, Native, Volcano

MANAGER = "holdfast.dev/operator"
"""Holdfast's name in spec.managedBy."""
WITH_QUEUES = ("kueue", "volcano")


def integration_of(job: TrainingJob) -> Integration | None:
    """None for a cluster without gang scheduling."""
    match job.spec.kubernetes.gang:
        case "kueue":
            return Kueue()
        case "volcano":
            return Volcano()
        case "coscheduling":
            return Coscheduling()
        case "native":
            return Native()
        case "none":
            return None


def problems(job: TrainingJob) -> list[Problem]:
    """Combinations that work on no cluster."""
    gang, queue = job.spec.kubernetes.gang, job.spec.queue
    found = []
    if queue and gang not in WITH_QUEUES:
        found.append(
            Problem(
                "spec.queue",
                queue,
                f"none with spec.kubernetes.gang {gang}, which has no queues",
                "set kubernetes.gang to kueue or volcano, or remove the queue",
            )
        )
    if gang == "kueue" and not queue:
        found.append(
            Problem(
                "spec.queue",
                "nothing",
                "the name of a LocalQueue of the job's namespace, because kubernetes.gang is kueue",
                "`kubectl get localqueues` lists them",
            )
        )
    priority = job.spec.kubernetes.workload_priority_class_name
    if priority and gang != "kueue":
        found.append(
            Problem(
                "spec.kubernetes.workloadPriorityClassName",
                priority,
                f"nothing with kubernetes.gang {gang}: only Kueue has such classes",
                "use priorityClassName, or set kubernetes.gang to kueue",
            )
        )
    return found


def has_other_manager(document: Document) -> bool:
    """Another controller manages the job, as with managedBy of a batch/v1 Job; the operator ignores
    it."""
    return (document.get("spec") or {}).get("managedBy") not in (None, MANAGER)
