"""Gangs and queues without a cluster: what becomes of pods, what a spec may say, what is asked for
when. Owns the pure parts; tests/e2e/kubernetes has the published APIs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from orchestrator.backends.kubernetes.pods import Owner, PodSettings, pod_document
from orchestrator.backends.kubernetes.queues import kueue
from orchestrator.backends.kubernetes.queues.base import Group, group_of, resources_of
from orchestrator.backends.kubernetes.queues.choice import (
    integration_of,
    is_left_alone,
    problems,
)
from orchestrator.backends.kubernetes.queues.queue import Queue
from orchestrator.protocol.spec import TrainingJob, job_from_mapping
from tests.unit.protocol.wrong_jobs import job, script

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


def queue_of(wanted: TrainingJob) -> Queue:
    """Without a cluster: nothing here asks one."""
    return Queue(wanted, OWNER, cluster=None)  # type: ignore[arg-type]


def plain_pod(wanted: TrainingJob, name: str = "llm-a") -> Document:
    return pod_document(wanted, OWNER, SETTINGS, name)


def kueue_pods(queue: Queue, wanted: TrainingJob, *names: str) -> dict[str, Document]:
    """Pods as they are made together, while there are no others."""
    return {
        name: queue.decorate(plain_pod(wanted, name), {}, index) for index, name in enumerate(names)
    }


def admit(*pods: Document) -> None:
    """What Kueue does: it takes the gate off."""
    for pod in pods:
        pod["spec"]["schedulingGates"] = []
        pod["status"] = {"phase": "Pending"}


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
def test_a_job_of_another_manager_is_left_alone(manager: str | None, left: bool) -> None:
    document = job(script(**({"managedBy": manager} if manager else {})))
    assert is_left_alone(document) is left


# -- Kueue: which nodes, when ------------------------------------------------------------------
def test_the_gang_is_one_pod_group_and_further_nodes_are_pods_of_their_own() -> None:
    wanted = training_job("kueue", "team-a", workloadPriorityClassName="high")
    queue = queue_of(wanted)
    pods = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c", "llm-d")
    assert [kueue.is_member(pod) for pod in pods.values()] == [True, True, True, False]
    first, last = pods["llm-a"], pods["llm-d"]
    labels = {
        "kueue.x-k8s.io/queue-name": "team-a",
        "kueue.x-k8s.io/managed": "true",
        "kueue.x-k8s.io/priority-class": "high",
    }
    assert labels.items() <= first["metadata"]["labels"].items()
    assert labels.items() <= last["metadata"]["labels"].items()
    assert first["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "llm-gang"
    assert first["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "3"
    assert "kueue.x-k8s.io/pod-group-total-count" not in last["metadata"]["annotations"]
    for pod in pods.values():
        assert pod["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]


def test_a_replacement_has_the_role_of_what_it_replaces_wherever_it_must_not_go() -> None:
    """Kueue derives the role from affinity too, and ours keeps away from blamed nodes."""
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pods = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c")
    pods["llm-a"]["status"] = {"phase": "Failed"}
    blamed = pod_document(wanted, OWNER, SETTINGS, "llm-e", {"llm-a": "node-7"})
    replacement = queue.decorate(blamed, pods)
    assert replacement["spec"]["affinity"] != pods["llm-b"]["spec"]["affinity"]
    note = "kueue.x-k8s.io/role-hash"
    roles = {pod["metadata"]["annotations"][note] for pod in (*pods.values(), replacement)}
    assert roles == {"main"}


def test_the_core_hears_of_nodes_when_they_are_admitted_and_growth_comes_after_the_gang() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    queue.opened({})

    first = queue.plan(6, {})
    assert (first.ready, first.create) == ((), 3)
    assert "queue team-a has not admitted them yet" in first.held

    gang = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c")
    waiting = queue.plan(6, gang)
    assert (waiting.ready, waiting.create) == ((), 0)
    assert waiting.held

    admit(*gang.values())
    assert queue.plan(6, gang).ready == ("llm-a", "llm-b", "llm-c")

    growth = queue.plan(3, gang)
    assert growth.create == 3
    single = {"llm-d": queue.decorate(plain_pod(wanted, "llm-d"), gang)}
    assert not kueue.is_member(single["llm-d"])
    assert queue.plan(3, gang | single).create == 2
    admit(single["llm-d"])
    assert queue.plan(3, gang | single).ready == ("llm-d",)


def test_nothing_is_asked_for_twice_while_pods_are_on_their_way() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pods = kueue_pods(queue, wanted, "llm-a")
    plan = queue.plan(6, pods, {"llm-a", "llm-b", "llm-c"})
    assert (plan.create, bool(plan.held)) == (0, True)


def test_a_job_that_is_held_gives_its_places_in_the_queue_up_and_asks_again_later() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pods = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c")
    assert queue.unwanted(pods) == []
    spec = wanted.spec.model_copy(update={"suspend": True})
    queue.follow(wanted.model_copy(update={"spec": spec}))
    assert queue.unwanted(pods) == ["llm-a", "llm-b", "llm-c"]
    assert queue.plan(6, {}).create == 0
    changed = queue.changed
    queue.follow(wanted)
    assert changed.is_set()
    assert queue.plan(6, {}).create == 3


def test_a_job_that_became_smaller_takes_single_nodes_out_of_the_queue() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    gang = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c")
    admit(*gang.values())
    single = {n: queue.decorate(plain_pod(wanted, n), gang) for n in ("llm-d", "llm-e", "llm-f")}
    assert queue.unwanted(gang | single) == []
    nodes = wanted.spec.nodes.model_copy(update={"max": 4})
    spec = wanted.spec.model_copy(update={"nodes": nodes})
    queue.follow(wanted.model_copy(update={"spec": spec}))
    assert len(queue.unwanted(gang | single)) == 2


def test_an_operator_that_starts_anew_knows_admitted_nodes_from_waiting_ones() -> None:
    wanted = training_job("kueue", "team-a")
    before = queue_of(wanted)
    gang = kueue_pods(before, wanted, "llm-a", "llm-b", "llm-c")
    admit(*gang.values())
    single = {"llm-d": before.decorate(plain_pod(wanted, "llm-d"), gang)}

    queue = queue_of(wanted)
    queue.opened(gang | single)
    assert queue.plan(2, gang | single).create == 1
    admit(single["llm-d"])
    assert queue.plan(2, gang | single).ready == ("llm-d",)


def test_a_lost_member_of_the_gang_is_replaced_in_the_gang() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    gang = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c")
    admit(*gang.values())
    queue.opened(gang)
    gang["llm-b"]["status"] = {"phase": "Failed"}
    assert queue.plan(4, gang).create == 1
    assert kueue.is_member(queue.decorate(plain_pod(wanted, "llm-f"), gang))


def test_a_node_that_was_given_back_frees_its_place_and_a_failed_one_waits_for_its_heir() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pod = kueue_pods(queue, wanted, "llm-a")["llm-a"]
    pod["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed", "example.com/other"]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    pod["status"] = {"phase": "Succeeded"}
    assert queue.given_back(pod) == {"metadata": {"finalizers": ["example.com/other"]}}
    pod["status"] = {"phase": "Failed"}
    assert queue.given_back(pod) is None
    pod["status"] = {"phase": "Running"}
    assert queue.given_back(pod) is None


def test_at_its_end_a_job_says_that_no_pod_will_be_replaced() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pods = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c", "llm-d")
    patches = queue.last_patches(pods)
    assert set(patches) == {"llm-a", "llm-b", "llm-c"}
    assert patches["llm-a"]["metadata"]["annotations"] == {
        "kueue.x-k8s.io/retriable-in-group": "false"
    }
    assert queue_of(training_job("volcano")).last_patches(pods) == {}


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
    assert queue.group == Group(OWNER, 1)
