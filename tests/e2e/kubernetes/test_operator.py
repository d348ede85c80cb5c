"""The operator at a real API server without nodes: the objects that it creates, reports, repairs
and deletes. Pods are never scheduled; nodes/test_training.py has training."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.kubernetes.conftest import fresh
from tests.e2e.kubernetes.replica import Replica, leading
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.kubectl import Kubectl, Refused, condition
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.kubernetes.unschedulable import (
    BOUND_S,
    Plane,
    gone,
    job,
    message_of,
    names_of,
    pods,
    reason_of,
    wait_message,
    wait_pods,
    wait_reason,
)

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def jobs(plane: Plane) -> Iterator[Kubectl]:
    """A namespace with the restricted standard."""
    for kubectl in fresh(plane.kubectl()):
        label = "pod-security.kubernetes.io/enforce=restricted"
        kubectl.run("label", "namespace", kubectl.namespace, label)
        yield kubectl


@pytest.fixture(scope="module")
def small(plane: Plane) -> Iterator[Kubectl]:
    """A namespace with a quota of one pod."""
    for kubectl in fresh(plane.kubectl()):
        kubectl.run("create", "quota", "small", "--hard=pods=1")
        kubectl.wait("quota", "small", lambda q: "used" in (q or {}).get("status", {}), "counted")
        yield kubectl


@pytest.fixture(scope="module")
def operator(
    plane: Plane, jobs: Kubectl, small: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    yield from leading(plane.kubeconfig, tmp_path_factory, jobs.namespace, small.namespace)


# -- a job's objects ---------------------------------------------------------------------------
def test_an_applied_job_gets_pods_a_secret_a_journal_and_a_status(
    jobs: Kubectl, operator: Replica
) -> None:
    jobs.apply(job("simple"))
    found = wait_pods(jobs, "simple", 2)
    owner = jobs.json("get", "trainingjob", "simple")["metadata"]
    for pod in found:
        assert pod["metadata"]["ownerReferences"][0]["uid"] == owner["uid"]
        assert pod["spec"]["restartPolicy"] == "Never"
        arguments = pod["spec"]["containers"][0]["args"]
        assert f"{jobs.namespace}/simple" in arguments
        assert f"127.0.0.1:{operator.agents_port}" in arguments
    secret = jobs.json("get", "secret", "simple-agents")
    assert set(secret["data"]) == {"token", "tls.crt", "tls.key"}
    assert secret["metadata"]["ownerReferences"][0]["uid"] == owner["uid"]
    assert jobs.json("get", "configmap", "simple-journal")["binaryData"]
    document = wait_reason(jobs, "simple", "Unschedulable")
    status = document["status"]
    assert status["state"] == "pending"
    assert status["nodes"] == {"ready": 0, "desired": 2, "summary": "0/2", "spares": 0}
    assert status["observedGeneration"] == document["metadata"]["generation"]
    assert "the scheduler finds no node" in message_of(document)
    assert {one["type"] for one in status["conditions"]} == {
        "Ready", "Progressing", "Suspended", "Succeeded", "Failed", "Accepted",
    }  # fmt: skip
    gone(jobs, "simple")


def test_deleting_a_job_leaves_nothing(jobs: Kubectl, operator: Replica) -> None:
    jobs.apply(job("brief"))
    wait_pods(jobs, "brief", 2)
    gone(jobs, "brief")
    for kind in ("pods", "secrets", "configmaps"):
        until(
            lambda kind=kind: not jobs.list(kind, "holdfast.dev/job=brief"),
            f"no {kind} to be left",
            timeout_s=BOUND_S,
        )


def test_a_new_job_of_the_same_name_starts_from_the_beginning(
    jobs: Kubectl, operator: Replica
) -> None:
    jobs.apply(job("again"))
    first = names_of(wait_pods(jobs, "again", 2))
    gone(jobs, "again")
    jobs.apply(job("again"))
    operator.until(lambda: len(names_of(pods(jobs, "again")) - first) == 2, "two new pods")
    gone(jobs, "again")


# -- requests ----------------------------------------------------------------------------------
def test_scaling_a_job_changes_its_pods(jobs: Kubectl, operator: Replica) -> None:
    jobs.apply(job("scaled"))
    wait_pods(jobs, "scaled", 2)
    jobs.run("scale", "trainingjob/scaled", "--replicas=4")
    wait_pods(jobs, "scaled", 4)
    document = jobs.wait(
        "trainingjob", "scaled",
        lambda d: (d or {}).get("status", {}).get("nodes", {}).get("desired") == 4, "wants four",
    )  # fmt: skip
    assert document["status"]["selector"] == "holdfast.dev/job=scaled,holdfast.dev/role=node"
    gone(jobs, "scaled")


def test_a_suspended_job_starts_nothing_and_one_suspended_later_releases_its_pods(
    jobs: Kubectl, operator: Replica
) -> None:
    jobs.apply(job("held", suspend=True))
    jobs.run("wait", "--for=condition=Suspended", "trainingjob/held", "--timeout=90s")
    assert pods(jobs, "held") == []
    assert jobs.get("secret", "held-agents") is None
    jobs.run("patch", "trainingjob", "held", "--type=merge", '--patch={"spec":{"suspend":false}}')
    wait_pods(jobs, "held", 2)
    jobs.run("patch", "trainingjob", "held", "--type=merge", '--patch={"spec":{"suspend":true}}')
    jobs.run("wait", "--for=condition=Suspended", "trainingjob/held", "--timeout=90s")
    wait_pods(jobs, "held", 0)
    gone(jobs, "held")


def test_a_job_that_never_started_can_be_cancelled(jobs: Kubectl, operator: Replica) -> None:
    jobs.apply(job("unborn", suspend=True))
    jobs.run("wait", "--for=condition=Suspended", "trainingjob/unborn", f"--timeout={BOUND_S}s")
    jobs.run("annotate", "trainingjob", "unborn", "holdfast.dev/cancel=ann")
    found = jobs.wait("trainingjob", "unborn", lambda d: condition(d, "Failed") == "True", "failed")
    assert message_of(found, "Failed") == "cancelled by ann; nothing was started"
    gone(jobs, "unborn")


def test_a_cancelled_job_fails_names_the_user_and_is_deleted_after_its_ttl(
    jobs: Kubectl, operator: Replica
) -> None:
    jobs.apply(job("cancelled", ttlSecondsAfterFinished=3))
    wait_pods(jobs, "cancelled", 2)
    jobs.run("annotate", "trainingjob", "cancelled", "holdfast.dev/cancel=ann")
    document = jobs.wait(
        "trainingjob", "cancelled", lambda d: condition(d, "Failed") == "True", "failed"
    )
    assert reason_of(document, "Failed") == "Cancelled"
    assert "cancel requested by ann" in message_of(document, "Failed")
    assert document["status"]["completionTime"]
    jobs.wait("trainingjob", "cancelled", lambda d: d is None, "to be deleted")


def test_an_impossible_fault_injection_is_refused_with_an_event(
    jobs: Kubectl, operator: Replica
) -> None:
    jobs.apply(job("quiet"))
    wait_pods(jobs, "quiet", 2)
    wanted = json.dumps({"verb": "chaos", "arguments": {"kind": "kill-worker", "rank": 0}})
    jobs.run("annotate", "trainingjob", "quiet", f"holdfast.dev/request={wanted}")
    jobs.wait(
        "trainingjob", "quiet",
        lambda d: "holdfast.dev/request" not in ((d or {})["metadata"].get("annotations") or {}),
        "to have its annotation consumed",
    )  # fmt: skip

    def reported() -> bool:
        events = jobs.list("events", "holdfast.dev/job=quiet")
        return any(one["reason"] == "Refused" and "no workers" in one["message"] for one in events)

    operator.until(reported, "an event with the reason")
    gone(jobs, "quiet")


# -- refusals ----------------------------------------------------------------------------------
def test_requirements_beyond_the_schema_are_reported_in_a_condition(
    jobs: Kubectl, operator: Replica
) -> None:
    document = job("imageless")
    del document["spec"]["image"]
    jobs.apply(document)
    found = jobs.wait(
        "trainingjob", "imageless", lambda d: condition(d, "Accepted") == "False", "refused"
    )
    assert condition(found, "Failed") == "False", "it may still start"
    assert reason_of(found, "Accepted") == "InvalidSpec"
    assert message_of(found, "Accepted").startswith("spec.image: got nothing; expected a container")
    assert pods(jobs, "imageless") == []
    gone(jobs, "imageless")


def test_an_invalid_pod_template_is_refused_with_the_servers_message(
    jobs: Kubectl, operator: Replica
) -> None:
    template = {"spec": {"containers": [{"name": "worker", "resources": {"limits": {"cpu": "x"}}}]}}
    jobs.apply(job("odd", kubernetes={"podTemplate": template}))
    refused = jobs.wait(
        "trainingjob", "odd", lambda d: condition(d, "Accepted") == "False", "refused"
    )
    assert reason_of(refused, "Accepted") == "Refused"
    assert message_of(refused, "Accepted").startswith("spec.kubernetes.podTemplate: ")
    assert "quantities must match" in message_of(refused, "Accepted")
    assert pods(jobs, "odd") == []
    gone(jobs, "odd")


def test_a_link_on_the_checkpoint_volume_leads_to_no_other_job(
    jobs: Kubectl, operator: Replica
) -> None:
    """A job has planted links in its directory and, by a pod of the user's own, beside it."""
    namespace = operator.storage / jobs.namespace
    (namespace / "plant").mkdir(parents=True)
    (namespace / "victim").mkdir()
    (namespace / "plant/evil").symlink_to("../victim")
    (namespace / "linked").symlink_to("victim")
    jobs.apply(job("evil", checkpoint={"path": f"{namespace}/plant/evil"}))
    jobs.apply(job("linked"))
    for name, reason, text in (
        ("evil", "InvalidSpec", f"got {namespace}/plant/evil; expected a path that the operator"),
        ("linked", "Refused", f"got {namespace}/linked (a symbolic link, which is not followed"),
    ):
        found = jobs.wait(
            "trainingjob", name, lambda d: condition(d, "Accepted") == "False", "rejected"
        )
        assert reason_of(found, "Accepted") == reason
        assert f"spec.checkpoint.path: {text}" in message_of(found, "Accepted")
        assert pods(jobs, name) == []
        gone(jobs, name)
    assert list((namespace / "victim").iterdir()) == []


def test_a_server_side_apply_of_an_unknown_field_of_the_pod_template_is_refused(
    jobs: Kubectl,
) -> None:
    template = {"spec": {"somethingElse": {"a": 1}}}
    path = r"\.spec\.kubernetes\.podTemplate\.spec\.somethingElse: field not declared"
    with pytest.raises(Refused, match=path):
        jobs.apply(job("typo", kubernetes={"podTemplate": template}))


def test_a_quota_that_is_too_small_leaves_no_pods_and_is_reported(
    small: Kubectl, operator: Replica
) -> None:
    small.apply(job("crowded", nodes={"min": 2, "max": 2}))
    found = wait_reason(small, "crowded", "NoRoom")
    assert "2 pods were requested and none was created" in message_of(found)
    assert "exceeded quota: small" in message_of(found)
    until(lambda: pods(small, "crowded") == [], "no pod to be left", timeout_s=BOUND_S)
    small.run("delete", "quota", "small")
    wait_pods(small, "crowded", 2)
    gone(small, "crowded")


def test_a_quota_between_minimum_and_maximum_is_used_up_without_churn(
    small: Kubectl, operator: Replica
) -> None:
    small.run("create", "quota", "middle", "--hard=pods=3")
    small.wait("quota", "middle", lambda q: "used" in (q or {}).get("status", {}), "counted")
    small.apply(job("elastic", nodes={"min": 2, "max": 4}))
    kept = names_of(wait_pods(small, "elastic", 3))
    refusal = "1 pod was requested and none was created: "
    wait_message(small, "elastic", refusal)
    assert names_of(pods(small, "elastic")) == kept
    small.run("delete", "quota", "middle")
    assert kept < names_of(wait_pods(small, "elastic", 4))
    gone(small, "elastic")


def test_jobs_without_a_controller_are_in_the_metrics_until_they_are_deleted(
    jobs: Kubectl, operator: Replica
) -> None:
    imageless = job("refused")
    del imageless["spec"]["image"]
    jobs.apply(imageless)
    jobs.apply(job("unstarted", suspend=True))
    jobs.apply(job("ended"))
    wait_pods(jobs, "ended", 2)
    jobs.run("annotate", "trainingjob", "ended", "holdfast.dev/cancel=ann")
    expected = {"refused": "pending", "unstarted": "suspended", "ended": "cancelled"}

    def states() -> dict[str, str]:
        """Job -> state, of jobs with a single series."""
        page = operator.get("/metrics")[1]
        labels = rf'\{{job="(.*?)",namespace="{jobs.namespace}",(?:state="(\w+)")?.*?\}} (.*)'
        series = re.findall(rf"^holdfast_\w+{labels}$", page, re.MULTILINE)
        count = Counter(name for name, _state, _value in series)
        return {
            name: state
            for name, state, value in series
            if count[name] == 1 and float(value) == 1 and name in expected
        }

    until(lambda: states() == expected, "their states", timeout_s=BOUND_S, last=states)
    for name in expected:
        gone(jobs, name)
    until(lambda: states() == {}, "no states", timeout_s=BOUND_S, last=states)


# -- repair ------------------------------------------------------------------------------------
def test_a_deleted_pod_is_a_lost_node_and_is_replaced(jobs: Kubectl, operator: Replica) -> None:
    jobs.apply(job("robbed"))
    first = names_of(wait_pods(jobs, "robbed", 2))
    victim = sorted(first)[0]
    jobs.run("delete", "pod", victim)
    until(
        lambda: len(names_of(pods(jobs, "robbed")) - {victim}) == 2,
        "a replacement",
        timeout_s=BOUND_S,
    )
    gone(jobs, "robbed")


def test_a_deleted_secret_is_restored_before_the_next_pod_needs_it(
    jobs: Kubectl, operator: Replica
) -> None:
    jobs.apply(job("bare"))
    first = names_of(wait_pods(jobs, "bare", 2))
    before = jobs.json("get", "secret", "bare-agents")["data"]
    jobs.run("delete", "secret", "bare-agents")
    jobs.run("delete", "pod", sorted(first)[0])
    jobs.wait("secret", "bare-agents", lambda d: d is not None, "to be made again")
    assert jobs.json("get", "secret", "bare-agents")["data"] == before
    gone(jobs, "bare")


def test_a_deleted_journal_is_written_again_from_memory(jobs: Kubectl, operator: Replica) -> None:
    jobs.apply(job("amnesic"))
    wait_pods(jobs, "amnesic", 2)
    before = jobs.json("get", "configmap", "amnesic-journal")["binaryData"]
    jobs.run("delete", "configmap", "amnesic-journal")
    jobs.run("scale", "trainingjob/amnesic", "--replicas=3")
    wait_pods(jobs, "amnesic", 3)
    after = jobs.json("get", "configmap", "amnesic-journal")["binaryData"]
    assert before.items() <= after.items()
    gone(jobs, "amnesic")


def test_an_edited_status_is_overwritten(jobs: Kubectl, operator: Replica) -> None:
    jobs.apply(job("edited"))
    wait_pods(jobs, "edited", 2)
    wait_reason(jobs, "edited", "Unschedulable")
    lie = '{"status": {"state": "succeeded", "worldSize": 99, "traceback": "a lie"}}'
    jobs.run(
        "patch", "trainingjob", "edited", "--subresource=status", "--type=merge", f"--patch={lie}"
    )
    found = jobs.wait(
        "trainingjob", "edited",
        lambda d: (d or {})["status"]["state"] == "pending" and "traceback" not in d["status"],
        "to tell the truth again",
    )  # fmt: skip
    assert found["status"]["worldSize"] == 0
    gone(jobs, "edited")


def bind(kubectl: Kubectl, pod: str, node: str) -> None:
    """Bind the pod as a scheduler does."""
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/binding"
    kubectl.run("create", f"--raw={path}", "--filename=-", stdin=json.dumps(binding))


def test_a_pod_is_force_deleted_only_when_its_kubernetes_node_is_gone(
    jobs: Kubectl, operator: Replica
) -> None:
    silent = f"silent-{jobs.namespace}"
    jobs.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": silent}})
    jobs.apply(job("stuck", recovery={"terminationGraceSeconds": 0}))
    lost, kept = sorted(names_of(wait_pods(jobs, "stuck", 2)))
    bind(jobs, lost, "never-was")
    bind(jobs, kept, silent)
    jobs.run("patch", "trainingjob", "stuck", "--type=merge", '--patch={"spec":{"suspend":true}}')
    jobs.wait("pod", lost, lambda d: d is None, "to be removed")
    # Kubernetes removes it only after 40 s.
    assert f"{lost}: deleted by force" in operator.log.read_text()
    found = jobs.json("get", "pod", kept)
    assert found["metadata"]["deletionTimestamp"], "asked to end, as its kubelet may still do"
    jobs.run("patch", "trainingjob", "stuck", "--type=merge", '--patch={"spec":{"suspend":false}}')
    for pod in wait_pods(jobs, "stuck", 2):
        (term,) = pod["spec"]["affinity"]["nodeAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["preference"]["matchFields"][0]["values"] == [silent], "it may be dead"
    jobs.run("delete", "node", silent)
    jobs.wait("pod", kept, lambda d: d is None, "to be removed")
    gone(jobs, "stuck")


def test_a_deleted_job_leaves_no_pod_on_a_kubernetes_node_that_is_gone(
    jobs: Kubectl, operator: Replica
) -> None:
    jobs.apply(job("ghostly"))
    pods = names_of(wait_pods(jobs, "ghostly", 2))
    for pod in pods:
        bind(jobs, pod, "never-was")
    jobs.run("delete", "trainingjob", "ghostly", "--timeout=60s")
    for pod in pods:
        jobs.wait("pod", pod, lambda d: d is None, "to be removed")
        assert f"{pod}: deleted by force" in operator.log.read_text()


def test_the_operator_survives_a_restart_of_the_api_server(
    own_control_plane: ControlPlane, plane: Plane, jobs: Kubectl, operator: Replica
) -> None:
    jobs.apply(job("patient"))
    before = names_of(wait_pods(jobs, "patient", 2))
    own_control_plane.kill_api_server()
    own_control_plane.start_api_server()
    jobs.run("scale", "trainingjob/patient", "--replicas=3")
    after = names_of(wait_pods(jobs, "patient", 3))
    assert before < after
    gone(jobs, "patient")
