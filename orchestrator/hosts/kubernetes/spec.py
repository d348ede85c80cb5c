"""Reads the job of a TrainingJob object, and checks what only jobs on a cluster need."""

from __future__ import annotations

from pathlib import PurePosixPath

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.crd import job_from_resource
from holdfast.orchestrator.api.v1alpha1.effects import without_effect
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings
from holdfast.orchestrator.backends.kubernetes.queues import selection
from holdfast.orchestrator.errors import Problem, SpecError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.kube.pod_fields import misspelt_fields

from . import storage_access


def owner_of(document: Document) -> Owner:
    metadata = document["metadata"]
    return Owner(metadata["namespace"], metadata["name"], metadata["uid"])


def read_job(document: Document, pods: PodSettings, known_path: str = "") -> TrainingJob:
    """`known_path`: where the job's checkpoints are already. Raises SpecError listing every wrong
    field. Annotations are left out: they are no part of the job, and kubectl keeps a copy of the
    whole document in one of them."""
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
    job = selection.with_queue_label(job)
    started = bool((document.get("status") or {}).get("jobId"))
    problems = [] if started else without_effect(job)
    problems += [
        *_problems(job, pods, known_path),
        *selection.problems(job),
        *template_problems(job),
    ]
    if problems:
        raise SpecError(problems)
    return job


def template_problems(job: TrainingJob) -> list[Problem]:
    """Misspelt fields of the pod template, and a container that stands for the workers by another
    name: it would be a sidecar."""
    containers = [
        container
        for container in job.spec.kubernetes.pod_template.get("spec", {}).get("containers") or ()
        if isinstance(container, dict)
    ]
    images = [str(container.get("name")) for container in containers if container.get("image")]
    no_worker = all(container.get("name") != names.CONTAINER for container in containers)
    problems = [
        Problem(
            "spec.kubernetes.podTemplate.spec.containers",
            f"{name} and no {names.CONTAINER}",
            f"{names.CONTAINER}, the training container",
            f"rename it to {names.CONTAINER}, or add `- name: {names.CONTAINER}` beside a sidecar",
        )
        for name in images[:1]
        if no_worker
    ]
    return problems + [
        Problem(
            f"spec.kubernetes.podTemplate.{field.path}",
            "an unknown field",
            "a field of a pod",
            f"did you mean {field.close}?",
        )
        for field in misspelt_fields(job.spec.kubernetes.pod_template)
    ]


def _problems(job: TrainingJob, pods: PodSettings, known_path: str) -> list[Problem]:
    problems = []
    if not (job.spec.image or pods.image):
        problems.append(
            Problem(
                "spec.image",
                "nothing",
                "a container image with Python, torch and Holdfast",
                "name one, or start the operator with --worker-image as the default of all jobs",
            )
        )
    if ".." in job.spec.working_directory.split("/"):
        got, expected = job.spec.working_directory, "a directory without .."
        fix = "write an absolute directory of the image, or one below the job's code"
        problems.append(Problem("spec.workingDirectory", got, expected, fix))
    path = job.spec.checkpoint.path
    if path is None and not (known_path or pods.checkpoint_root):
        problems.append(
            Problem(
                "spec.checkpoint.path",
                "nothing",
                "a URL (s3://bucket/prefix) or a directory that all pods and the operator share",
                "name one, or start the operator with --checkpoint-root for all jobs",
            )
        )
    elif path is not None and "://" not in path and not PurePosixPath(path).is_absolute():
        problems.append(
            Problem(
                "spec.checkpoint.path",
                path,
                "a URL or an absolute directory: on a cluster there is no spec file for a path to "
                "be relative to",
            )
        )
    else:
        problems += storage_access.problems(job, pods, known_path)
    return problems
