"""The state of pods in the words that users read."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.backends.kubernetes import pod_conditions

Document = dict[str, Any]


def pod(phase: str = "Running", node: str = "n1", **status: Any) -> Document:
    return {
        "metadata": {"name": "p"},
        "spec": {"nodeName": node},
        "status": {"phase": phase, **status},
    }


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "worker", "image": "train:1", "state": state}]}


def disrupted(reason: str, message: str = "") -> dict[str, Any]:
    one = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return {"conditions": [one]}


ENDS = {
    "out of memory": (
        pod("Failed", **container(terminated={"exitCode": 137, "reason": "OOMKilled"})),
        "OOMKilled on n1: the pod used more memory than its limit; raise spec.resources.memory",
    ),
    "killed": (
        pod("Failed", **container(terminated={"exitCode": 137, "reason": "Error"})),
        "its agent was ended by SIGKILL on n1",
    ),
    "an error, with its last words": (
        pod("Failed", **container(terminated={"exitCode": 1, "message": "no\n torch"})),
        "its agent ended with exit code 1 on n1: no torch",
    ),
    "not a program": (
        pod("Failed", **container(terminated={"exitCode": 128, "reason": "StartError",
                                              "message": "python: not found"})),
        "its container could not be started on n1: python: not found",
    ),
    "evicted by the kubelet": (
        pod("Failed", reason="Evicted", message="The node was low on resource: memory."),
        "evicted on n1 by its kubelet: The node was low on resource: memory.",
    ),
    "node shutdown": (
        pod("Failed", reason="Terminated", message="Pod was terminated in response to imminent "
            "node shutdown."),
        "its Kubernetes node n1 was shut down: Pod was terminated in response to imminent",
    ),
    "preempted": (
        pod("Failed", **disrupted("PreemptionByScheduler", "default-scheduler: preempting")),
        "its pod on n1 is gone: preempted by a pod of higher priority: default-scheduler",
    ),
    "preempted, with the container's exit code": (
        pod("Failed", **container(terminated={"exitCode": 143}),
            **disrupted("PreemptionByScheduler")),
        "its agent was ended by SIGTERM on n1; preempted by a pod of higher priority",
    ),
    "deadline of the template": (
        pod("Failed", reason="DeadlineExceeded"),
        "its pod on n1 was active for longer than activeDeadlineSeconds of its template",
    ),
    "finished": (
        pod("Succeeded", **container(terminated={"exitCode": 0})),
        "its agent ended with exit code 0 on n1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("document", "text"), ENDS.values(), ids=ENDS)
def test_an_end_is_one_sentence(document: Document, text: str) -> None:
    assert pod_conditions.is_over(document)
    assert pod_conditions.end(document).startswith(text)
    assert pod_conditions.problem(document) is None


def test_a_deleted_pod_that_was_running_has_a_reason() -> None:
    document = pod(**container(running={}))
    assert not pod_conditions.is_over(document)
    assert pod_conditions.end(document, deleted=True) == "its pod on n1 was deleted"


def test_a_pod_of_a_lost_kubernetes_node_has_a_reason() -> None:
    document = pod(**container(running={}), **disrupted("DeletionByPodGC"))
    assert "its Kubernetes node is gone" in pod_conditions.end(document, deleted=True)


PROBLEMS = {
    "no capacity": (
        pod("Pending", "", conditions=[{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}]),
        "Unschedulable",
        "the scheduler finds no node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    ),
    "held back": (
        pod("Pending", "", conditions=[{
            "type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]),
        "SchedulingGated",
        "held back by a scheduling gate: a queue has not admitted it",
    ),
    "image": (
        pod("Pending", **container(waiting={
            "reason": "ImagePullBackOff", "message": 'Back-off pulling image "train:1"'})),
        "ImagePullBackOff",
        'image train:1 cannot be pulled: Back-off pulling image "train:1"',
    ),
    "a secret that is missing": (
        pod("Pending", **container(waiting={
            "reason": "CreateContainerConfigError", "message": 'secret "x" not found'})),
        "CreateContainerConfigError",
        'worker cannot be started: secret "x" not found',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("document", "code", "text"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_pod_that_does_not_start_has_a_reason(document: Document, code: str, text: str) -> None:
    assert pod_conditions.problem(document) == (code, text)
    assert not pod_conditions.is_over(document)
    assert text in pod_conditions.not_started(document, 120)


def test_a_pod_whose_image_is_being_pulled_has_no_problem() -> None:
    assert (
        pod_conditions.problem(pod("Pending", **container(waiting={"reason": "ContainerCreating"})))
        is None
    )


def test_a_disruption_is_known_before_the_pod_ends() -> None:
    document = pod(**container(running={}), **disrupted("EvictionByEvictionAPI", "Eviction API"))
    assert pod_conditions.disruption(document) == "evicted, by a drain for example: Eviction API"
    assert pod_conditions.disruption(pod(**container(running={}))) == ""
