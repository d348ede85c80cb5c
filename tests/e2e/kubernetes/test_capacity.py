"""Jobs that want more room than there is, on a cluster where nobody places gangs.

Owns these tests. The dead-lock of two jobs that compete for the room of one gang is made on
purpose: the pods come with a scheduling gate, and the test takes it off one pod of each job first.
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
    """Two nodes, no fewer, and a slot for each."""
    kubernetes = {
        "extendedResources": {SLOT: 1},
        "podTemplate": {"spec": {"schedulingGates": [{"name": GATE}]}},
    }
    nodes = {"min": 2, "max": 2}
    return Job(kubectl, example(name, 8, nodes=nodes, workersPerNode=1, kubernetes=kubernetes))


def gated(job: Job) -> list[Document]:
    return [pod for pod in job.pods() if pod["spec"].get("schedulingGates")]


def let_go(job: Job, pods: list[Document]) -> None:
    """A pod that was given back meanwhile is gone."""
    patch = json.dumps([{"op": "replace", "path": "/spec/schedulingGates", "value": []}])
    for pod in pods:
        name = pod["metadata"]["name"]
        job.kubectl.attempt("patch", "pod", name, "--type=json", f"--patch={patch}")


def placed(job: Job) -> set[str]:
    return {pod["metadata"]["name"] for pod in job.pods() if pod["spec"].get("nodeName")}


def names_of(job: Job) -> set[str]:
    return {pod["metadata"]["name"] for pod in job.pods()}


def test_of_two_jobs_with_half_of_what_they_need_one_gives_way_and_both_train_to_their_end(
    operator: Operator, cluster: Cluster, cluster_namespace: Kubectl
) -> None:
    operator.ensure_running()
    for node in list(cluster.nodes.values())[:2]:
        node.advertise(SLOT, 1)
    jobs = [competitor(cluster_namespace, name) for name in ("first", "second")]
    for job in jobs:
        until(lambda job=job: len(gated(job)) == 2, "two pods behind the gate", timeout_s=60)
    for job in jobs:
        let_go(job, gated(job)[:1])
    for job in jobs:
        until(lambda job=job: len(placed(job)) == 1, f"{job.name} to hold half", timeout_s=60)
    halves = {job.name: placed(job) for job in jobs}

    def ended() -> bool:
        for job in jobs:
            let_go(job, gated(job))
        return all(condition(job.object(), "Succeeded") == "True" for job in jobs)

    def story() -> str:
        return "\n".join(job.story() for job in jobs)

    until(ended, "both jobs to end well", timeout_s=300, every_s=0.5, last=story)
    kept = [job.name for job in jobs if halves[job.name] & names_of(job)]
    assert len(kept) == 1, f"kept their half: {kept}; one gives way, the other holds on"


def test_a_job_whose_quota_has_room_for_less_than_its_most_trains_with_what_there_is(
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
    told = "1 pod was requested and none was created: "
    job.wait(lambda status: told in str(status["conditions"]), "to have asked for the fourth")
    job.wait_steps(5)
    assert names_of(job) == before and len(before) == 3
    job.delete()
