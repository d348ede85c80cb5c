"""Jobs behind a queue, with the operator at a real API server: queued, admitted, suspended,
refused.

Kueue's CRDs are installed, Kueue is not: the test removes gates as Kueue does. Pods are never
scheduled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1.crd import NAME
from holdfast.orchestrator.kube.pod_schema import definition_text
from tests.e2e.kubernetes.conftest import api_server, fresh
from tests.e2e.kubernetes.published import get as published
from tests.e2e.kubernetes.replica import Replica, leading
from tests.e2e.kubernetes.rig.binaries import Binaries
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.existing_cluster import GivenCluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.waiting import until

pytestmark = pytest.mark.e2e

Document = dict[str, Any]
Plane = ControlPlane | GivenCluster
BOUND_S = 90
GROUP = "kueue.x-k8s.io/pod-group-name"


@pytest.fixture(scope="module")
def control_plane(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A separate one: other tests need a cluster without Kueue."""
    yield from api_server(binaries, tmp_path_factory.mktemp("kubectl"))


@pytest.fixture(scope="module")
def jobs(control_plane: Plane) -> Iterator[Kubectl]:
    """A namespace with a LocalQueue team-a."""
    if refusal := published.refusal():
        pytest.skip(refusal)
    kubectl = control_plane.kubectl()
    kubectl.run("apply", "--server-side", "--filename=-", stdin=definition_text())
    [kueue] = [pin for pin in published.PINS if pin.name == "kueue"]
    for file in published.files(kueue):
        kubectl.run("apply", "--server-side", "--filename", str(file))
    names = (NAME, "localqueues.kueue.x-k8s.io")
    kubectl.served(*names)
    for inside in fresh(kubectl):
        queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue"}
        spec = {"clusterQueue": "training"}
        inside.create({**queue, "metadata": {"name": "team-a"}, "spec": spec})
        yield inside


@pytest.fixture(scope="module", autouse=True)
def operator(
    control_plane: Plane, jobs: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    yield from leading(control_plane.kubeconfig, tmp_path_factory, jobs.namespace)


def job(name: str, gang: str, **spec: Any) -> Document:
    """A gang of two and two further nodes."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": {"script": "train.py"},
            "image": "registry.invalid/holdfast/worker:test",
            "nodes": {"min": 2, "max": 4},
            "kubernetes": {"gang": gang},
            **spec,
        },
    }


def pods(kubectl: Kubectl, name: str) -> dict[str, Document]:
    found = kubectl.list("pods", f"holdfast.dev/job={name}")
    alive = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
    return {pod["metadata"]["name"]: pod for pod in alive}


def wait_pods(kubectl: Kubectl, name: str, count: int) -> dict[str, Document]:
    until(
        lambda: len(pods(kubectl, name)) == count, f"{count} pods of {name}",
        timeout_s=BOUND_S, last=lambda: kubectl.get("trainingjob", name),
    )  # fmt: skip
    return pods(kubectl, name)


def ready(document: Document | None) -> tuple[str, str]:
    """(reason, message) of the condition Ready."""
    for one in (document or {}).get("status", {}).get("conditions") or ():
        if one["type"] == "Ready":
            return str(one["reason"]), str(one["message"])
    return "", ""


def wait_reason(kubectl: Kubectl, name: str, reason: str) -> str:
    document = kubectl.wait("trainingjob", name, lambda d: ready(d)[0] == reason, f"says {reason}")
    return ready(document)[1]


def admit(kubectl: Kubectl, found: dict[str, Document]) -> None:
    for name in found:
        patch = [{"op": "replace", "path": "/spec/schedulingGates", "value": []}]
        kubectl.run("patch", "pod", name, "--type=json", "--patch", json.dumps(patch))


def finalize(kubectl: Kubectl, found: dict[str, Document]) -> None:
    """Do what Kueue's webhook does for each queued pod."""
    patch = json.dumps({"metadata": {"finalizers": ["kueue.x-k8s.io/managed"]}})
    for name in found:
        kubectl.run("patch", "pod", name, "--type=merge", "--patch", patch)


def left(kubectl: Kubectl, name: str) -> list[str]:
    """Deleted pods that still exist."""
    return [p["metadata"]["name"] for p in kubectl.list("pods", f"holdfast.dev/job={name}")]


def members(found: dict[str, Document]) -> set[str]:
    return {name for name, pod in found.items() if GROUP in pod["metadata"]["labels"]}


def suspend(kubectl: Kubectl, name: str, wanted: bool) -> None:
    patch = json.dumps({"spec": {"suspend": wanted}})
    kubectl.run("patch", "trainingjob", name, "--type=merge", "--patch", patch)


def test_a_queued_job_grows_only_after_its_gang_is_admitted(
    jobs: Kubectl,
) -> None:
    jobs.apply(job("queued", "kueue", queue="team-a"))
    gang = wait_pods(jobs, "queued", 2)
    assert members(gang) == set(gang)
    message = wait_reason(jobs, "queued", "Queued")
    assert "Kueue's queue team-a has not admitted the pods yet" in message
    status = jobs.json("get", "trainingjob", "queued")["status"]
    assert (status["state"], status.get("restarts", 0)) == ("pending", 0)

    admit(jobs, gang)
    grown = wait_pods(jobs, "queued", 4)
    assert members(grown) == set(gang)
    single = {name: pod for name, pod in grown.items() if name not in gang}
    for pod in single.values():
        assert pod["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]
    jobs.run("delete", "trainingjob", "queued", "--timeout=60s")
    wait_pods(jobs, "queued", 0)


def test_a_job_suspended_in_the_queue_leaves_it_and_enters_it_again(
    jobs: Kubectl,
) -> None:
    jobs.apply(job("paused", "kueue", queue="team-a"))
    before = wait_pods(jobs, "paused", 2)
    finalize(jobs, before)
    suspend(jobs, "paused", True)
    until(lambda: left(jobs, "paused") == [], "its pods to go", timeout_s=BOUND_S)
    suspend(jobs, "paused", False)
    after = wait_pods(jobs, "paused", 2)
    assert not set(before) & set(after)
    assert wait_reason(jobs, "paused", "Queued")
    finalize(jobs, after)
    jobs.run("delete", "trainingjob", "paused", "--timeout=60s")
    until(lambda: left(jobs, "paused") == [], "nothing to be left", timeout_s=BOUND_S)


def test_a_killed_operator_finds_the_queued_pods_again(jobs: Kubectl, operator: Replica) -> None:
    jobs.apply(job("kept", "kueue", queue="team-a"))
    before = wait_pods(jobs, "kept", 2)
    assert wait_reason(jobs, "kept", "Queued")
    operator.kill()
    operator.start_leading()
    admit(jobs, before)
    assert members(wait_pods(jobs, "kept", 4)) == set(before)
    jobs.run("delete", "trainingjob", "kept", "--timeout=60s")


def test_a_missing_queue_is_refused_until_it_exists(jobs: Kubectl) -> None:
    jobs.apply(job("early", "kueue", queue="team-b"))
    message = wait_reason(jobs, "early", "Refused")
    assert "spec.queue: got team-b; expected a LocalQueue" in message
    assert "(existing: team-a); create it, or name another" in message
    assert pods(jobs, "early") == {}
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue"}
    jobs.create({**queue, "metadata": {"name": "team-b"}, "spec": {"clusterQueue": "training"}})
    wait_pods(jobs, "early", 2)
    jobs.run("delete", "trainingjob", "early", "--timeout=60s")


def test_a_gang_system_that_the_cluster_lacks_is_refused_without_pods(jobs: Kubectl) -> None:
    jobs.apply(job("lacking", "native"))
    message = wait_reason(jobs, "lacking", "Refused")
    assert "the cluster does not serve podgroups.scheduling.k8s.io" in message
    assert "GenericWorkload and GangScheduling" in message
    assert pods(jobs, "lacking") == {}
    jobs.run("delete", "trainingjob", "lacking", "--timeout=60s")


def test_a_queue_without_a_queueing_system_is_an_invalid_spec(jobs: Kubectl) -> None:
    jobs.apply(job("alone", "none", queue="team-a"))
    message = wait_reason(jobs, "alone", "InvalidSpec")
    assert "spec.queue: got team-a; expected none with spec.kubernetes.gang none" in message
    jobs.run("delete", "trainingjob", "alone", "--timeout=60s")


def test_a_job_of_another_manager_is_not_touched(jobs: Kubectl) -> None:
    """A later job is started meanwhile."""
    jobs.apply(job("theirs", "none", managedBy="kueue.x-k8s.io/multikueue"))
    jobs.apply(job("ours", "none", managedBy="holdfast.dev/operator"))
    wait_pods(jobs, "ours", 4)
    stored = jobs.get("trainingjob", "theirs")
    assert stored is not None
    assert "status" not in stored
    assert pods(jobs, "theirs") == {}
    jobs.run("delete", "trainingjob", "theirs", "ours", "--timeout=60s")
