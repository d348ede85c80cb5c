"""Gang scheduling of Kubernetes itself, with a real API server and scheduler: a gang is
scheduled as a whole or not at all, and two jobs do not take half of the capacity each. Nodes are
only objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.api.v1alpha1.crd import NAME
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings, pod_document
from holdfast.orchestrator.backends.kubernetes.queues.admission import Admission
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.kube.pod_schema import definition_text
from tests.e2e.kubernetes.conftest import fresh, skip_without
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.settings import Settings
from tests.e2e.kubernetes.rig.waiting import until
from tests.unit.api.wrong_jobs import job, script

pytestmark = pytest.mark.e2e

Document = dict[str, Any]
GATES = "--feature-gates=GenericWorkload=true,GangScheduling=true"
GANGS = Settings(
    api_server=(GATES, "--runtime-config=scheduling.k8s.io/v1alpha2=true"),
    # The leases of these nodes are not renewed.
    controller_manager=(GATES, "--controllers=*,-node-lifecycle-controller"),
    scheduler=(GATES,),
)
SETTINGS = PodSettings(endpoint="operator:7077", image="worker:1")
NUM_NODES = 3


@pytest.fixture(scope="module")
def plane(binaries: programs.Binaries) -> Iterator[ControlPlane]:
    """A plane with the feature gates, capacity for three pods, and the CRD."""
    skip_without(binaries, programs.CONTROL_PLANE)
    with Run() as run:
        made = ControlPlane(run, binaries, settings=GANGS)
        made.start()
        kubectl = made.kubectl()
        kubectl.run("apply", "--server-side", "--filename=-", stdin=definition_text())
        kubectl.served(NAME)
        for number in range(NUM_NODES):
            add_node(kubectl, f"fake-{number}")
        yield made


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[Kubectl]:
    """Namespace whose pods are deleted at the end, to free the capacity."""
    for kubectl in fresh(plane.kubectl()):
        yield kubectl
        kubectl.run("delete", "pods", "--all", "--force", "--grace-period=0")


def add_node(kubectl: Kubectl, name: str) -> None:
    """A Ready Node object with one core."""
    kubectl.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    resources = {"cpu": "1", "memory": "8Gi", "pods": "10"}
    ready = {"type": "Ready", "status": "True", "reason": "Fake", "message": ""}
    status = {"capacity": resources, "allocatable": resources, "conditions": [ready]}
    patch = json.dumps({"status": status})
    kubectl.run("patch", "node", name, "--subresource=status", "--type=merge", "--patch", patch)
    kubectl.run("taint", "node", name, "node.kubernetes.io/not-ready-")


class Gang:
    """A job whose pods are created as by its backend."""

    def __init__(self, plane: ControlPlane, kubectl: Kubectl, name: str, least: int) -> None:
        self.plane, self.kubectl, self.name = plane, kubectl, name
        document = job(
            script(
                nodes={"min": least, "max": 4},
                resources={"cpu": 0.8},
                kubernetes={"gang": "native"},
            ),
            name,
        )
        self.job = job_from_mapping(document)
        uid = kubectl.create(document)["metadata"]["uid"]
        self.owner = Owner(kubectl.namespace, name, uid)

    def ask(self, *numbers: int) -> None:
        """Create the pods of these nodes in one request."""
        asyncio.run(self._ask(numbers))

    async def _ask(self, numbers: tuple[int, ...]) -> None:
        async with await KubeClient.connect(kubeconfig=self.plane.kubeconfig) as cluster:
            queue = Admission(self.job, self.owner, cluster)
            there = {pod["metadata"]["name"]: pod for pod in self.pods()}
            plain = [
                pod_document(self.job, self.owner, SETTINGS, f"{self.name}-{number}")
                for number in numbers
            ]
            await queue.ensure(there)
            for index, pod in enumerate(plain):
                made = queue.decorate(pod, there, index)
                text = yaml.safe_dump(made)
                self.kubectl.run("create", "--validate=strict", "--filename=-", stdin=text)

    def pods(self) -> list[Document]:
        return self.kubectl.list("pods", f"holdfast.dev/job={self.name}")

    def placed(self) -> int:
        return sum(is_placed(pod) for pod in self.pods())

    def wait_placed(self, count: int) -> None:
        until(
            lambda: self.placed() == count,
            f"{count} pods of {self.name} are placed",
            timeout_s=60,
            every_s=0.3,
            last=lambda: [pod.get("status") for pod in self.pods()],
        )

    def wait_looked_at(self) -> None:
        """The scheduler has found no node for any of its pods."""
        until(
            lambda: all(refusal(pod) for pod in self.pods()),
            f"the scheduler says no to {self.name}",
            timeout_s=60,
            every_s=0.3,
            last=lambda: [pod.get("status") for pod in self.pods()],
        )


def place_a_small_pod(kubectl: Kubectl) -> None:
    """Return when the scheduler has handled all earlier pods."""
    container = {"name": "main", "image": "none", "resources": {"requests": {"cpu": "100m"}}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "small"}}
    kubectl.create({**pod, "spec": {"containers": [container]}})
    kubectl.wait("pod", "small", is_placed, "is placed")


def is_placed(pod: Document | None) -> bool:
    return bool(pod and pod["spec"].get("nodeName"))


def refusal(pod: Document) -> str:
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition["reason"])
    return ""


def test_a_gang_is_scheduled_when_it_is_complete_and_fits(
    plane: ControlPlane, namespace: Kubectl
) -> None:
    gang = Gang(plane, namespace, "whole", 3)
    gang.ask(0, 1)
    place_a_small_pod(namespace)
    assert gang.placed() == 0
    gang.ask(2)
    gang.wait_placed(3)
    group = namespace.get("podgroups.scheduling.k8s.io", "whole-gang")
    assert group is not None
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 3}}
    assert group["metadata"]["ownerReferences"][0]["uid"] == gang.owner.uid


def test_of_two_competing_jobs_one_gets_all_its_nodes_and_the_other_none(
    plane: ControlPlane, namespace: Kubectl
) -> None:
    """Three pods fit and each job needs two. Individually, one could get two and the other one."""
    first, second = (Gang(plane, namespace, name, 2) for name in ("first", "second"))
    first.ask(0, 1)
    first.wait_placed(2)
    second.ask(0, 1)
    second.wait_looked_at()
    assert second.placed() == 0
    namespace.run("delete", "pods", "--selector=holdfast.dev/job=first", "--force")
    second.wait_placed(2)


def test_nodes_beyond_the_gang_are_scheduled_individually(
    plane: ControlPlane, namespace: Kubectl
) -> None:
    gang = Gang(plane, namespace, "elastic", 2)
    gang.ask(0, 1, 2, 3)
    gang.wait_placed(3)


def test_with_a_smaller_minimum_a_replacement_is_scheduled_individually(
    plane: ControlPlane, namespace: Kubectl
) -> None:
    """A PodGroup of 1.36 keeps its size, and stays while pods refer to it."""
    gang = Gang(plane, namespace, "shrunk", 3)
    gang.ask(0, 1, 2)
    gang.wait_placed(3)
    namespace.run("delete", "pod", "shrunk-1", "shrunk-2", "--force", "--grace-period=0")
    add = {"spec": {"nodes": {"min": 1, "max": 2}}}
    namespace.run("patch", "tj", "shrunk", "--type=merge", "--patch", json.dumps(add))
    smaller = gang.job.spec.nodes.model_copy(update={"min": 1, "max": 2})
    spec = gang.job.spec.model_copy(update={"nodes": smaller})
    gang.job = gang.job.model_copy(update={"spec": spec})
    gang.ask(3)
    gang.wait_placed(2)
    group = namespace.get("podgroups.scheduling.k8s.io", "shrunk-gang")
    assert group is not None
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 3}}


def test_a_pod_group_of_another_owner_is_not_taken_over(
    plane: ControlPlane, namespace: Kubectl
) -> None:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "other"}}
    uid = namespace.create(config)["metadata"]["uid"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "other", "uid": uid}
    theirs = {
        "apiVersion": "scheduling.k8s.io/v1alpha2",
        "kind": "PodGroup",
        "metadata": {
            "name": "taken-gang",
            "ownerReferences": [{**reference, "controller": True}],
        },
        "spec": {"schedulingPolicy": {"gang": {"minCount": 7}}},
    }
    namespace.create(theirs)
    with pytest.raises(HoldfastError, match="Only one reference can have Controller set to true"):
        Gang(plane, namespace, "taken", 2).ask(0)
    stored = namespace.get("podgroups.scheduling.k8s.io", "taken-gang")
    assert stored is not None
    assert stored["spec"] == theirs["spec"]
