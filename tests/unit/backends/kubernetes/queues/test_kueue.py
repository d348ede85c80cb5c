"""Kueue's rules without Kueue: which pods are created when, and what happens to queued and ended
ones. tests/e2e/kubernetes/test_queued_jobs.py has the operator."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.backends.kubernetes.pods import pod_document
from holdfast.orchestrator.backends.kubernetes.queues import kueue, selection
from tests.unit.api.wrong_jobs import job, script
from tests.unit.backends.kubernetes.queue_fixtures import (
    OWNER,
    SETTINGS,
    Document,
    admit,
    kueue_pods,
    plain_pod,
    queue_of,
    training_job,
)


def test_the_gang_is_one_pod_group_and_further_nodes_are_single_pods() -> None:
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


def test_a_replacement_has_the_role_of_the_lost_pod_despite_other_affinity() -> None:
    """Kueue derives the role from affinity too, and a replacement excludes blamed nodes."""
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


def test_admitted_pods_become_nodes_and_further_pods_follow_the_gang() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    queue.opened({})

    first = queue.plan(6, {})
    assert (first.ready, first.create) == ((), 3)
    assert "queue team-a has not admitted the pods yet" in first.held

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


def test_no_pod_is_requested_twice_while_others_are_being_created() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pods = kueue_pods(queue, wanted, "llm-a")
    plan = queue.plan(6, pods, {"llm-a", "llm-b", "llm-c"})
    assert (plan.create, bool(plan.held)) == (0, True)


def test_a_suspended_job_leaves_the_queue_and_enters_it_again_later() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pods = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c")
    assert queue.surplus(pods) == []
    spec = wanted.spec.model_copy(update={"suspend": True})
    queue.follow(wanted.model_copy(update={"spec": spec}))
    assert queue.surplus(pods) == ["llm-a", "llm-b", "llm-c"]
    assert queue.plan(6, {}).create == 0
    changed = queue.changed
    queue.follow(wanted)
    assert changed.is_set()
    assert queue.plan(6, {}).create == 3


def test_a_smaller_job_takes_single_pods_out_of_the_queue() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    gang = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c")
    admit(*gang.values())
    single = {n: queue.decorate(plain_pod(wanted, n), gang) for n in ("llm-d", "llm-e", "llm-f")}
    assert queue.surplus(gang | single) == []
    nodes = wanted.spec.nodes.model_copy(update={"max": 4})
    spec = wanted.spec.model_copy(update={"nodes": nodes})
    queue.follow(wanted.model_copy(update={"spec": spec}))
    assert len(queue.surplus(gang | single)) == 2


def test_a_restarted_operator_recognizes_admitted_nodes() -> None:
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


def test_a_terminating_member_is_replaced_when_it_has_ended() -> None:
    """Earlier, Kueue would delete the replacement as one too many."""
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    gang = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c")
    admit(*gang.values())
    queue.opened(gang)
    drained = gang["llm-b"]
    drained["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    drained["spec"]["nodeName"] = "node-1"
    drained["status"] = {"phase": "Running"}
    assert queue.plan(1, gang).create == 0
    drained["status"] = {"phase": "Succeeded"}
    assert queue.plan(1, gang).create == 0
    del gang["llm-b"]
    assert queue.plan(1, gang).create == 1


def test_a_member_that_succeeded_is_deleted_so_that_it_can_be_replaced() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    gang = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c")
    gang["llm-b"]["status"] = {"phase": "Succeeded"}
    assert queue.succeeded_members(gang) == ["llm-b"]
    queue.stop()
    assert queue.succeeded_members(gang) == [], "pods of a finished job stay for their logs"


@pytest.mark.parametrize(
    ("state", "freed"),
    [
        ({"status": {"phase": "Succeeded"}, "spec": {"nodeName": "node-1"}}, True),
        ({"status": {"phase": "Failed"}, "spec": {"nodeName": "node-1"}}, True),
        ({"status": {"phase": "Running"}, "spec": {"nodeName": "node-1"}}, False),
        ({"status": {"phase": "Pending"}, "spec": {"schedulingGates": []}}, True),
    ],
    ids=["succeeded", "failed", "still runs", "never ran"],
)
def test_a_deleted_member_loses_its_finalizer_unless_it_runs(state: Document, freed: bool) -> None:
    wanted = training_job("kueue", "team-a")
    pod = kueue_pods(queue_of(wanted), wanted, "llm-a")["llm-a"] | state
    pod["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed", "example.com/other"]
    assert kueue.finalizer_patch(pod) is None, "it is not deleted"
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    patch = {"metadata": {"finalizers": ["example.com/other"]}}
    assert kueue.finalizer_patch(pod) == (patch if freed else None)


def test_a_finished_job_declares_that_no_pod_will_be_replaced() -> None:
    wanted = training_job("kueue", "team-a")
    queue = queue_of(wanted)
    pods = kueue_pods(queue, wanted, "llm-a", "llm-b", "llm-c", "llm-d")
    patches = queue.last_patches(pods)
    assert set(patches) == {"llm-a", "llm-b", "llm-c"}
    assert patches["llm-a"]["metadata"]["annotations"] == {
        "kueue.x-k8s.io/retriable-in-group": "false"
    }
    assert queue_of(training_job("native")).last_patches(pods) == {}


# -- the label of the job --------------------------------------------------------------------------
def labelled(labels: dict[str, str], **spec: Any) -> TrainingJob:
    document = job(script(**spec), "llm")
    document["metadata"]["labels"] = labels
    return selection.with_queue_label(job_from_mapping(document))


QUEUE = "kueue.x-k8s.io/queue-name"


def test_kueues_label_on_the_job_is_its_queue_and_makes_a_gang() -> None:
    found = labelled({QUEUE: "lq", "kueue.x-k8s.io/priority-class": "high"})
    assert (found.spec.queue, found.spec.kubernetes.gang) == ("lq", "kueue")
    assert found.spec.kubernetes.workload_priority_class_name == "high"
    assert selection.problems(found) == []
    queue = queue_of(found)
    decorated = queue.decorate(plain_pod(found), {})
    assert decorated["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "llm-gang"


@pytest.mark.parametrize(
    ("labels", "spec", "text"),
    [
        ({QUEUE: "lq"}, {"kubernetes": {"gang": "native"}}, "none with spec.kubernetes.gang"),
        ({QUEUE: "lq"}, {"queue": "other"}, "the same queue as spec.queue (other)"),
        ({}, {"kubernetes": {"podTemplate": {"metadata": {"labels": {QUEUE: "lq"}}}}},
         "each pod would be admitted on its own"),
    ],
    ids=["another-gang", "another-queue", "on-the-pods-only"],
)  # fmt: skip
def test_a_label_that_contradicts_the_spec_is_refused(
    labels: dict[str, str], spec: dict[str, Any], text: str
) -> None:
    (problem,) = selection.problems(labelled(labels, **spec))
    assert QUEUE in problem.field and text in str(problem)
