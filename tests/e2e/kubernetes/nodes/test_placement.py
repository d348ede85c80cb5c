"""Ranks by topology labels, and preemption by the real scheduler, on a cluster with nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from holdfast.orchestrator.api.v1alpha1.backends import KUBERNETES_TOPOLOGY_KEYS
from tests.e2e.kubernetes.jobs import ENDLESS, Job, example
from tests.e2e.kubernetes.rig import workloads
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.operator import Operator
from tests.e2e.kubernetes.rig.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RACK, CLIQUE = KUBERNETES_TOPOLOGY_KEYS[-2:]
SEAT = "example.com/seat"


@pytest.fixture
def racked(cluster: Cluster, operator: Operator) -> Iterator[list[str]]:
    """Three Kubernetes nodes with topology labels; their names in the expected order of ranks."""
    first, second, third = sorted(cluster.nodes)[:3]
    kubectl = cluster.kubectl()
    for node, rack, clique in ((first, "r2", "c2"), (second, "r2", "c1"), (third, "r1", "c9")):
        kubectl.run("label", "node", node, f"{RACK}={rack}", f"{CLIQUE}={clique}")
    # The operator caches the labels of nodes for minutes.
    operator.kill()
    operator.start()
    yield [third, second, first]
    for node in (first, second, third):
        kubectl.run("label", "node", node, f"{RACK}-", f"{CLIQUE}-")


def test_ranks_follow_the_topology_labels_of_the_kubernetes_nodes(
    racked: list[str], cluster_namespace: Kubectl
) -> None:
    nodes = {"min": 3, "max": 3}
    document = example("racked", ENDLESS, nodes=nodes, workersPerNode=1, parallelism={})
    document["spec"]["kubernetes"] = {"spread": "required"}
    document["spec"]["entrypoint"]["recipe"]["config"]["globalBatch"] = 9
    job = Job(cluster_namespace, document)
    job.wait_running(3)

    def by_rank() -> list[str]:
        found = {
            int(pod["metadata"]["labels"].get("holdfast.dev/rank", -1)): pod["spec"]["nodeName"]
            for pod in job.pods()
        }
        return [found[rank] for rank in sorted(found) if rank >= 0]

    until(lambda: len(by_rank()) == 3, "labels of ranks", timeout_s=60, last=job.report)
    assert by_rank() == racked, job.report()
    job.delete()


def test_a_preempted_pod_loses_no_step_and_is_replaced_later(
    operator: Operator, cluster: Cluster, cluster_namespace: Kubectl
) -> None:
    operator.ensure_running()
    for node in list(cluster.nodes.values())[:2]:
        node.advertise(SEAT, 1)
    kubectl, urgent = cluster_namespace, f"urgent-{cluster_namespace.namespace}"
    job = Job(kubectl, example("modest", ENDLESS, kubernetes={"extendedResources": {SEAT: 1}}))
    job.wait_running(4)
    before = job.wait_steps(2)
    kubectl.run("create", "priorityclass", urgent, "--value=1000")
    bully = workloads.pod("bully", "sleep", "3600")
    bully["spec"]["priorityClassName"] = urgent
    bully["spec"]["containers"][0]["resources"] = {"limits": {SEAT: 1}}
    kubectl.create(bully)
    try:
        job.wait_running(2)
        after = job.wait_steps(2)
        one = next(one for one in job.incidents_after(before) if one["class"] == "preemption")
        assert one["stepsLost"] == 0, job.report()
        assert "preempted by a pod of higher priority" in json.dumps(one), json.dumps(one)
        assert after["step"] > before["step"]
        kubectl.wait("pod", "bully", lambda d: workloads.phase(d) == "Running", "to run")
        kubectl.run("delete", "pod", "bully")
        job.wait_running(4)
    finally:
        kubectl.run("delete", "priorityclass", urgent)
    job.delete()
