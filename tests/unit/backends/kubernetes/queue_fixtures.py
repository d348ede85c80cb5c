"""Jobs and pods for the tests of gang schedulers and queues."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings, pod_document
from holdfast.orchestrator.backends.kubernetes.queues.admission import Admission
from holdfast.orchestrator.kube.names import Owner
from tests.unit.api.wrong_jobs import job, script

Document = dict[str, Any]
OWNER = Owner("research", "llm", "0b5e")
SETTINGS = PodSettings(endpoint="operator:7077", image="worker:1")
NODES = {"min": 3, "max": 6}


def training_job(gang: str, queue: str | None = None, **kubernetes: Any) -> TrainingJob:
    spec = script(
        nodes=NODES,
        resources={"cpu": 0.5, "memory": "1Gi"},
        kubernetes={"gang": gang, **kubernetes},
        **({"queue": queue} if queue else {}),
    )
    return job_from_mapping(job(spec, "llm"))


def queue_of(wanted: TrainingJob) -> Admission:
    """Queue without a cluster: these tests send no requests."""
    return Admission(wanted, OWNER, cluster=None)  # type: ignore[arg-type]


def plain_pod(wanted: TrainingJob, name: str = "llm-a") -> Document:
    return pod_document(wanted, OWNER, SETTINGS, name)


def kueue_pods(queue: Admission, wanted: TrainingJob, *names: str) -> dict[str, Document]:
    """Pods of one request, while there are no others."""
    return {
        name: queue.decorate(plain_pod(wanted, name), {}, index) for index, name in enumerate(names)
    }


def admit(*pods: Document) -> None:
    """Remove the gate, as Kueue does."""
    for pod in pods:
        pod["spec"]["schedulingGates"] = []
        pod["status"] = {"phase": "Pending"}
