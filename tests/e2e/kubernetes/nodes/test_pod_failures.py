"""Pods that do not start, are killed by the kernel or edited: messages on real kubelets."""

from __future__ import annotations

import pytest

from tests.e2e.kubernetes.jobs import ENDLESS, Job, example
from tests.e2e.kubernetes.rig.kubectl import Document, Kubectl
from tests.e2e.kubernetes.rig.operator import Operator
from tests.e2e.kubernetes.rig.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NOWHERE = "registry.invalid/none/none:1"


def messages(status: Document) -> str:
    """The messages of the status."""
    conditions = [one.get("message", "") for one in status.get("conditions") or ()]
    incidents = [
        f"{one['title']} {one.get('decision', '')}" for one in status.get("incidents") or ()
    ]
    return "\n".join([*conditions, *incidents])


def test_an_image_that_cannot_be_pulled_is_named(
    operator: Operator, cluster_namespace: Kubectl
) -> None:
    job = Job(cluster_namespace, example("pictureless", ENDLESS, image=NOWHERE))
    status = job.wait(
        lambda s: f"image {NOWHERE} cannot be pulled" in messages(s), "to name the image"
    )
    assert status["state"] == "pending", messages(status)
    job.delete()


def test_a_pod_above_its_memory_limit_names_the_field_to_raise(
    operator: Operator, cluster_namespace: Kubectl
) -> None:
    job = Job(
        cluster_namespace, example("narrow", ENDLESS, resources={"cpu": 0.1, "memory": "8Mi"})
    )

    def names_the_limit() -> bool:
        return "OOMKilled" in messages(job.status()) and "spec.resources.memory" in messages(
            job.status()
        )

    until(names_the_limit, "the status to name the memory limit", timeout_s=120, last=job.report)
    job.delete()


def test_a_pod_whose_label_is_removed_is_replaced_and_ends(
    operator: Operator, cluster_namespace: Kubectl
) -> None:
    job = Job(cluster_namespace, example("edited", ENDLESS))
    job.wait_running(4)
    before = job.wait_steps(2)
    edited = job.pods()[-1]["metadata"]["name"]
    cluster_namespace.run("label", "pod", edited, "holdfast.dev/job-")
    job.wait(lambda s: s["generation"] > before["generation"], "to go on without it")
    job.wait_running(4)
    job.wait_steps(2)
    assert edited not in {pod["metadata"]["name"] for pod in job.pods()}
    assert all(one["stepsLost"] <= 1 for one in job.incidents_after(before)), job.report()

    def over() -> bool:
        pod = cluster_namespace.get("pod", edited)
        return pod is None or pod["status"]["phase"] in ("Succeeded", "Failed")

    until(over, f"{edited} to end", timeout_s=120, last=job.report)
    job.delete()
