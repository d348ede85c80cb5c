"""Jobs that need more capacity than there is, on a cluster without a gang scheduler.

The deadlock of two incomplete jobs is provoked: pods have a scheduling gate, which the test removes
from one pod of each job first.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e.kubernetes.jobs import ENDLESS, Job, example
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.kubectl import Document, Kubectl, condition
from tests.e2e.kubernetes.rig.operator import Operator
from tests.e2e.kubernetes.rig.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]

SLOT = "example.com/slot"
GATE = "example.com/hold"


def competitor(kubectl: Kubectl, name: str) -> Job:
    """A job of exactly two nodes with one slot each."""
    kubernetes = {
        "extendedResources": {SLOT: 1},
        "podTemplate": {"spec": {"schedulingGates": [{"name": GATE}]}},
    }
    nodes = {"min": 2, "max": 2}
    return Job(kubectl, example(name, 8, nodes=nodes, workersPerNode=1, kubernetes=kubernetes))


def gated(job: Job) -> list[Document]:
    return [pod for pod in job.pods() if pod["spec"].get("schedulingGates")]


def remove_gates(job: Job, pods: list[Document]) -> None:
    """Remove the gates. A pod may have been released meanwhile."""
    patch = json.dumps([{"op": "replace", "path": "/spec/schedulingGates", "value": []}])
    for pod in pods:
        name = pod["metadata"]["name"]
        job.kubectl.attempt("patch", "pod", name, "--type=json", f"--patch={patch}")


def scheduled(job: Job) -> set[str]:
    return {pod["metadata"]["name"] for pod in job.pods() if pod["spec"].get("nodeName")}


def names_of(job: Job) -> set[str]:
    return {pod["metadata"]["name"] for pod in job.pods()}


def test_of_two_incomplete_jobs_one_releases_its_nodes_and_both_finish(
    operator: Operator, cluster: Cluster, cluster_namespace: Kubectl
) -> None:
    operator.ensure_running()
    for node in list(cluster.nodes.values())[:2]:
        node.advertise(SLOT, 1)
    jobs = [competitor(cluster_namespace, name) for name in ("first", "second")]
    for job in jobs:
        until(lambda job=job: len(gated(job)) == 2, "two pods behind the gate", timeout_s=60)
    for job in jobs:
        remove_gates(job, gated(job)[:1])
    for job in jobs:
        until(lambda job=job: len(scheduled(job)) == 1, f"{job.name} to hold half", timeout_s=60)
    halves = {job.name: scheduled(job) for job in jobs}

    def ended() -> bool:
        for job in jobs:
            remove_gates(job, gated(job))
        return all(condition(job.object(), "Succeeded") == "True" for job in jobs)

    def reports() -> str:
        return "\n".join(job.report() for job in jobs)

    until(ended, "both jobs to end well", timeout_s=300, every_s=0.5, last=reports)
    kept = [job.name for job in jobs if halves[job.name] & names_of(job)]
    assert len(kept) == 1, f"kept their nodes: {kept}; exactly one job releases them"


def test_a_job_with_a_quota_below_its_maximum_trains_with_fewer_nodes(
    operator: Operator, cluster_namespace: Kubectl
) -> None:
    operator.ensure_running()
    cluster_namespace.run("create", "quota", "middle", "--hard=pods=3")
    cluster_namespace.wait(
        "quota", "middle", lambda q: "used" in (q or {}).get("status", {}), "counted"
    )
    shape = {"nodes": {"min": 2, "max": 4}, "workersPerNode": 1, "parallelism": {}}
    document = example("elastic", ENDLESS, **shape)
    document["spec"]["entrypoint"]["recipe"]["config"]["globalBatch"] = 12
    job = Job(cluster_namespace, document)
    job.wait_running(3)
    before = names_of(job)
    refusal = "1 pod was requested and none was created: "
    job.wait(lambda status: refusal in str(status["conditions"]), "to have requested the fourth")
    job.wait_steps(5)
    assert names_of(job) == before and len(before) == 3
    job.delete()
