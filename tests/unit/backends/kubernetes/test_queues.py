"""Gangs and queues without a cluster: what becomes of pods, what a spec may say, what is asked for
when. Owns the pure parts; tests/e2e/kubernetes has the published APIs."""

from __future__ import annotations

import copy

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.backends.kubernetes.queues.base import PodGang, group_of, resources_of
from holdfast.orchestrator.backends.kubernetes.queues.selection import (
    has_other_manager,
    integration_of,
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


# -- what becomes of a pod ---------------------------------------------------------------------
def test_without_a_gang_system_a_pod_stays_as_it_is() -> None:
    wanted = training_job("none")
    pod = plain_pod(wanted)
    assert queue_of(wanted).decorate(copy.deepcopy(pod), {}) == pod


@pytest.mark.parametrize("gang", ["kueue", "volcano", "coscheduling", "native"])
def test_a_decorated_pod_is_a_new_document_with_all_that_it_had(gang: str) -> None:
    wanted = training_job(gang, "team-a" if gang in ("kueue", "volcano") else None)
    pod = plain_pod(wanted)
    before = copy.deepcopy(pod)
    made = queue_of(wanted).decorate(pod, {})
    assert pod == before
    assert made != before
    for part in ("labels", "ownerReferences", "name"):
        have, had = made["metadata"][part], before["metadata"][part]
        assert have == had or had.items() <= have.items()
    assert before["spec"].items() <= made["spec"].items()


def test_volcano_gets_its_scheduler_unless_the_template_names_another() -> None:
    wanted = training_job("volcano", "team-a")
    made = queue_of(wanted).decorate(plain_pod(wanted), {})
    assert made["spec"]["schedulerName"] == "volcano"
    assert made["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "llm-gang"
    named = training_job("volcano", podTemplate={"spec": {"schedulerName": "volcano-2"}})
    assert queue_of(named).decorate(plain_pod(named), {})["spec"]["schedulerName"] == "volcano-2"


def test_a_pod_group_asks_for_what_its_members_need_together() -> None:
    wanted = training_job("volcano", "team-a", priorityClassName="high")
    integration = integration_of(wanted)
    assert integration is not None
    group = group_of(wanted, OWNER)
    made = integration.extra(group, integration.apis[0], plain_pod(wanted))
    assert made is not None
    assert made["spec"] == {
        "minMember": 3,
        "minResources": {"cpu": "1500m", "memory": str(3 * 2**30)},
        "queue": "team-a",
        "priorityClassName": "high",
    }
    assert made["metadata"]["ownerReferences"][0]["uid"] == OWNER.uid


def test_resources_count_limits_init_containers_and_all_ways_of_writing() -> None:
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
    assert resources_of(pod, 2) == {
        "cpu": "6",
        "memory": str(2 * (1536 + 64)),
        "nvidia.com/gpu": "16",
    }


# -- what a spec may say -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (
            training_job("none", "team-a"),
            "spec.queue: got team-a; expected none with spec.kubernetes.gang none, which has no "
            "queues; set kubernetes.gang to kueue or volcano, or remove the queue",
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
            training_job("volcano", workloadPriorityClassName="high"),
            "spec.kubernetes.workloadPriorityClassName: got high; expected nothing with "
            "kubernetes.gang volcano",
        ),
    ],
    ids=["a queue and no gang", "a queue and native", "Kueue without", "priority"],
)
def test_a_queue_that_fits_nowhere_is_refused_in_words(wanted: TrainingJob, told: str) -> None:
    [problem] = problems(wanted)
    assert told in str(problem)


@pytest.mark.parametrize("gang", ["none", "coscheduling", "native", "volcano"])
def test_a_gang_without_a_queue_has_no_problem(gang: str) -> None:
    assert problems(training_job(gang)) == []


@pytest.mark.parametrize(
    ("manager", "left"),
    [(None, False), ("holdfast.dev/operator", False), ("kueue.x-k8s.io/multikueue", True)],
)
def test_a_job_of_another_manager_is_ignored(manager: str | None, left: bool) -> None:
    document = job(script(**({"managedBy": manager} if manager else {})))
    assert has_other_manager(document) is left


# -- what is said of those that wait -----------------------------------------------------------
def unschedulable(pod: Document, text: str) -> Document:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": text,
    }
    return {**pod, "status": {"phase": "Pending", "conditions": [condition]}}


def test_a_pod_behind_the_gate_is_queued_and_not_in_trouble() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pod = kueue_pods(queue, wanted, "llm-a")["llm-a"]
    found = queue.trouble(pod)
    assert found is not None
    assert found.code == "Queued"
    assert found.text == (
        "queued: Kueue's queue team-a has not admitted them yet "
        "(kubectl get workloads -n research says why)"
    )
    assert queue.waits(pod)
    admit(pod)
    assert queue.trouble(pod) is None


def test_a_gang_that_finds_no_place_is_queued_and_the_scheduler_is_quoted() -> None:
    wanted = training_job("volcano", "team-a")
    queue = queue_of(wanted)
    pod = unschedulable(queue.decorate(plain_pod(wanted), {}), "0/2 nodes are available")
    found = queue.trouble(pod)
    assert found is not None
    assert found == (
        "Queued",
        "queued: Volcano places 3 nodes together (queue team-a); the scheduler finds no place: "
        "0/2 nodes are available",
    )
    assert queue.waits(pod)
    silent = {**pod, "status": {"phase": "Pending"}}
    found = queue.trouble(silent)
    assert found is not None
    assert found.text == "queued: Volcano places 3 nodes together (queue team-a)"
    placed = {**silent, "spec": {**pod["spec"], "nodeName": "node-1"}}
    assert queue.trouble(placed) is None
    assert not queue.waits(placed)


def test_what_kueue_has_admitted_goes_the_way_of_any_pod() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pod = kueue_pods(queue, wanted, "llm-a")["llm-a"]
    admit(pod)
    pod = unschedulable(pod, "0/2 nodes are available")
    assert queue.trouble(pod) is None
    assert not queue.waits(pod)


def test_on_a_plain_cluster_a_pod_without_a_place_is_in_trouble() -> None:
    wanted = training_job("none")
    queue = queue_of(wanted)
    pod = unschedulable(plain_pod(wanted), "0/2 nodes are available")
    assert queue.trouble(pod) is None
    assert not queue.waits(pod)


def test_a_smaller_minimum_makes_a_smaller_gang() -> None:
    wanted = training_job("volcano")
    queue = queue_of(wanted)
    smaller = job_from_mapping(
        job(script(nodes={"min": 1, "max": 6}, kubernetes={"gang": "volcano"}), "llm")
    )
    queue.follow(smaller)
    assert queue.group == PodGang(OWNER, 1)
