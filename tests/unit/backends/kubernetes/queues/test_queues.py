"""Gang schedulers and queues without a cluster: decorated pods, PodGroups, valid specs."""

from __future__ import annotations

import copy

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.backends.kubernetes.placement import requests_of
from holdfast.orchestrator.backends.kubernetes.queues.base import PodGang, gang_of
from holdfast.orchestrator.backends.kubernetes.queues.selection import (
    Native,
    has_other_manager,
    problems,
)
from tests.unit.api.wrong_jobs import job, script
from tests.unit.backends.kubernetes.queue_fixtures import (
    OWNER,
    Document,
    admit,
    kueue_pods,
    plain_pod,
    queue_of,
    training_job,
)


# -- pods and PodGroups ------------------------------------------------------------------------
def test_without_a_gang_system_a_pod_stays_as_it_is() -> None:
    wanted = training_job("none")
    pod = plain_pod(wanted)
    assert queue_of(wanted).decorate(copy.deepcopy(pod), {}) == pod


@pytest.mark.parametrize("gang", ["kueue", "native"])
def test_decorating_adds_fields_to_a_copy_of_the_pod(gang: str) -> None:
    wanted = training_job(gang, "team-a" if gang == "kueue" else None)
    pod = plain_pod(wanted)
    before = copy.deepcopy(pod)
    made = queue_of(wanted).decorate(pod, {})
    assert pod == before
    assert made != before
    for part in ("labels", "ownerReferences", "name"):
        have, had = made["metadata"][part], before["metadata"][part]
        assert have == had or had.items() <= have.items()
    assert before["spec"].items() <= made["spec"].items()


def test_a_pod_group_names_the_gang_and_its_owner() -> None:
    wanted = training_job("native")
    pod = queue_of(wanted).decorate(plain_pod(wanted), {})
    assert pod["spec"]["schedulingGroup"] == {"podGroupName": "llm-gang"}
    made = Native().pod_group(gang_of(wanted, OWNER), Native.apis[0])
    assert made["metadata"]["name"] == "llm-gang"
    assert made["metadata"]["ownerReferences"][0]["uid"] == OWNER.uid
    assert made["spec"] == {"schedulingPolicy": {"gang": {"minCount": 3}}}


def test_requests_count_limits_and_init_containers_in_any_notation() -> None:
    pod = {
        "spec": {
            "containers": [
                {"name": "a", "resources": {"limits": {"nvidia.com/gpu": "8", "cpu": 2}}},
                {"name": "b", "resources": {"requests": {"cpu": "250m", "memory": "1e3"}}},
                {"name": "c"},
            ],
            "initContainers": [
                {"name": "first", "resources": {"requests": {"memory": "1.5Ki"}}},
                {
                    "name": "beside",
                    "restartPolicy": "Always",
                    "resources": {"requests": {"cpu": "750m"}},
                },
            ],
            "overhead": {"memory": "64"},
        }
    }
    assert requests_of(pod["spec"]) == {"cpu": 3, "memory": 1536 + 64, "nvidia.com/gpu": 8}


# -- valid specs -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            training_job("none", "team-a"),
            "spec.queue: got team-a; expected none with spec.kubernetes.gang none, which has no "
            "queues; set kubernetes.gang to kueue, or remove the queue",
        ),
        (
            training_job("native", "team-a"),
            "spec.queue: got team-a; expected none with spec.kubernetes.gang native",
        ),
        (
            training_job("kueue"),
            "spec.queue: got nothing; expected the name of a LocalQueue of the job's namespace",
        ),
        (
            training_job("native", workloadPriorityClassName="high"),
            "spec.kubernetes.workloadPriorityClassName: got high; expected nothing with "
            "kubernetes.gang native",
        ),
    ],
    ids=["a queue and no gang", "a queue and native", "Kueue without", "priority"],
)
def test_a_queue_that_does_not_fit_is_refused(wanted: TrainingJob, message: str) -> None:
    [problem] = problems(wanted)
    assert message in str(problem)


@pytest.mark.parametrize("gang", ["none", "native"])
def test_a_gang_without_a_queue_has_no_problem(gang: str) -> None:
    assert problems(training_job(gang)) == []


@pytest.mark.parametrize(
    ("manager", "left"),
    [(None, False), ("holdfast.dev/operator", False), ("kueue.x-k8s.io/multikueue", True)],
)
def test_a_job_of_another_manager_is_ignored(manager: str | None, left: bool) -> None:
    document = job(script(**({"managedBy": manager} if manager else {})))
    assert has_other_manager(document) is left


# -- pods that wait ----------------------------------------------------------------------------
def unschedulable(pod: Document, text: str) -> Document:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": text,
    }
    return {**pod, "status": {"phase": "Pending", "conditions": [condition]}}


def test_a_gated_pod_is_queued() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pod = kueue_pods(queue, wanted, "llm-a")["llm-a"]
    found = queue.problem(pod)
    assert found is not None
    assert found.code == "Queued"
    assert found.text == (
        "queued: Kueue's queue team-a has not admitted the pods yet "
        "(kubectl get workloads -n research shows why)"
    )
    assert queue.waits(pod)
    admit(pod)
    assert queue.problem(pod) is None


def test_an_unschedulable_gang_is_queued_and_the_scheduler_is_quoted() -> None:
    wanted = training_job("native")
    queue = queue_of(wanted)
    pod = unschedulable(queue.decorate(plain_pod(wanted), {}), "0/2 nodes are available")
    found = queue.problem(pod)
    assert found is not None
    assert found == (
        "Queued",
        "queued: gang scheduling of Kubernetes schedules 3 nodes together; "
        "the scheduler finds no node: 0/2 nodes are available",
    )
    assert queue.waits(pod)
    silent = {**pod, "status": {"phase": "Pending"}}
    found = queue.problem(silent)
    assert found is not None
    assert found.text == "queued: gang scheduling of Kubernetes schedules 3 nodes together"
    bound = {**silent, "spec": {**pod["spec"], "nodeName": "node-1"}}
    assert queue.problem(bound) is None
    assert not queue.waits(bound)


def test_a_pod_that_kueue_has_admitted_is_treated_like_any_other() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pod = kueue_pods(queue, wanted, "llm-a")["llm-a"]
    admit(pod)
    pod = unschedulable(pod, "0/2 nodes are available")
    assert queue.problem(pod) is None
    assert not queue.waits(pod)


def test_without_a_gang_system_an_unschedulable_pod_is_not_queued() -> None:
    wanted = training_job("none")
    queue = queue_of(wanted)
    pod = unschedulable(plain_pod(wanted), "0/2 nodes are available")
    assert queue.problem(pod) is None
    assert not queue.waits(pod)


def test_a_smaller_minimum_makes_a_smaller_gang() -> None:
    wanted = training_job("native")
    queue = queue_of(wanted)
    smaller = job_from_mapping(
        job(script(nodes={"min": 1, "max": 6}, kubernetes={"gang": "native"}), "llm")
    )
    queue.follow(smaller)
    assert queue.gang == PodGang(OWNER, 1)
