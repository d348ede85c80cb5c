"""TrainingJob object -> the job that the runtime knows, and what the cluster demands beyond the
spec.

Owns: that reading and its complaints. Must not: touch the API.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.crd import job_from_resource
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings
from holdfast.orchestrator.backends.kubernetes.queues import selection
from holdfast.orchestrator.errors import Problem, SpecError
from holdfast.orchestrator.kube.names import Owner

Document = dict[str, Any]


def owner_of(document: Document) -> Owner:
    metadata = document["metadata"]
    return Owner(metadata["namespace"], metadata["name"], metadata["uid"])


def read_job(document: Document, pods: PodSettings, place: str = "") -> TrainingJob:
    """`place`: where its checkpoints are already. Raises SpecError listing every wrong field.
    Annotations stay behind: they are no part of the job, and kubectl keeps a copy of the whole
    document in one of them."""
    metadata = document["metadata"]
    kept = {key: metadata[key] for key in ("name", "namespace", "labels") if key in metadata}
    job = job_from_resource(
        {
            "apiVersion": document.get("apiVersion"),
            "kind": document.get("kind"),
            "metadata": kept,
            "spec": document.get("spec"),
        }
    )
    problems = [*_problems(job, pods, place), *selection.problems(job)]
    if problems:
        raise SpecError(problems)
    return job


def _problems(job: TrainingJob, pods: PodSettings, place: str) -> list[Problem]:
    found = []
    if not (job.spec.image or pods.image):
        found.append(
            Problem(
                "spec.image",
                "nothing",
                "a container image with Python, torch and Holdfast",
                "name one, or give the operator one for all jobs (--worker-image)",
            )
        )
    path = job.spec.checkpoint.path
    if path is None and not (place or pods.checkpoint_root):
        found.append(
            Problem(
                "spec.checkpoint.path",
                "nothing",
                "a URL (s3://bucket/prefix) or a directory that all pods and the operator share",
                "name one, or give the operator one for all jobs (--checkpoint-root)",
            )
        )
    elif path is not None and "://" not in path and not PurePosixPath(path).is_absolute():
        found.append(
            Problem(
                "spec.checkpoint.path",
                path,
                "a URL or an absolute directory: in a cluster there is no spec file that it could "
                "be relative to",
            )
        )
    return found


def checkpoint_path(job: TrainingJob, pods: PodSettings, place: str = "") -> str:
    """Where the job's checkpoints are. `place`: where they are already, of a job that has begun:
    they do not move when the operator gets another root."""
    if job.spec.checkpoint.path is not None:
        return job.spec.checkpoint.path
    return place or "/".join([pods.checkpoint_root.rstrip("/"), job.metadata.namespace, job.name])
