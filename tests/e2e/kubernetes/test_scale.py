"""Many jobs on a real control plane with fake nodes, as a small form of the scale benchmark.

On a separate control plane, which counts the requests. Nothing is timed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.kubernetes import request_counts
from tests.e2e.kubernetes.conftest import fresh, skip_without
from tests.e2e.kubernetes.replica import Replica
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig import fake_nodes
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.kubernetes.unschedulable import Document, install, job

pytestmark = pytest.mark.e2e

NUM_JOBS, PODS_EACH, NUM_NODES = 40, 5, 20
NUM_PODS = NUM_JOBS * PODS_EACH
BOUND_S = 300
LEASE_S = 60
"""Renewed every 12 s, so that most requests are those of jobs."""
WATCHES = 2
"""Pods and TrainingJobs; each restarts every few minutes."""
REQUESTS_PER_JOB = 7 + PODS_EACH
"""A Secret and its copy, a journal and a record, a dry run, a status, an Event, and pods."""
LOOKS = 5
"""Checks of a Kubernetes node whose pods are not removed: after 2, 4, 8 s and so on."""
STATUS_WRITES = 3
"""Further status writes of a job with pods: why they do not start, and that they do."""


@pytest.fixture(scope="module")
def plane(binaries: programs.Binaries) -> Iterator[ControlPlane]:
    skip_without(binaries, programs.CONTROL_PLANE)
    with Run() as run:
        made = ControlPlane(run, binaries, settings=fake_nodes.SETTINGS)
        made.start()
        fake_nodes.add(made.kubectl(), NUM_NODES)
        install(made)
        yield made


@pytest.fixture(scope="module")
def jobs(plane: ControlPlane) -> Iterator[Kubectl]:
    yield from fresh(plane.kubectl())


@pytest.fixture(scope="module")
def operator(
    plane: ControlPlane, jobs: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    directory = tmp_path_factory.mktemp("operator")
    kubeconfig = request_counts.operator_kubeconfig(plane)
    replica = Replica(
        kubeconfig,
        directory,
        (jobs.namespace,),
        f"--lease-seconds={LEASE_S}",
        "--status-interval-seconds=5",
    )
    replica.start_leading()
    yield replica
    assert replica.close() == 0, replica.tail()


def documents() -> list[Document]:
    # No kubelet confirms the end of a pod.
    template = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 0}}}
    nodes = {"min": PODS_EACH, "max": PODS_EACH}
    return [job(f"job-{i:03d}", nodes=nodes, kubernetes=template) for i in range(NUM_JOBS)]


def bound(kubectl: Kubectl) -> Counter[str]:
    """Job -> number of its scheduled pods."""
    found = kubectl.list("pods", "holdfast.dev/role=node")
    placed = [pod for pod in found if pod["spec"].get("nodeName")]
    return Counter(pod["metadata"]["labels"]["holdfast.dev/job"] for pod in placed)


def quiet(operator: Replica) -> request_counts.Requests:
    """Operator's requests so far, once two counts in a row are equal."""
    seen: list[request_counts.Requests] = []

    def settled() -> bool:
        seen.append(request_counts.beside_leases(request_counts.counted_by_operator(operator)))
        return len(seen) > 1 and seen[-1] == seen[-2]

    until(settled, "the operator to ask for nothing more", timeout_s=BOUND_S, every_s=6)
    return seen[-1]


def test_many_jobs_cost_few_requests_none_while_idle_and_leave_nothing(
    plane: ControlPlane, jobs: Kubectl, operator: Replica
) -> None:
    before = quiet(operator)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents()})
    jobs.run("create", "--filename=-", stdin=text, timeout_s=BOUND_S)
    until(
        lambda: list(bound(jobs).values()) == [PODS_EACH] * NUM_JOBS,
        "all pods of all jobs to be placed", timeout_s=BOUND_S, every_s=2, last=operator.tail,
    )  # fmt: skip
    created = quiet(operator)
    asked = created - before
    assert asked["create", "pods"] == NUM_PODS + NUM_JOBS, "each once, and one of each job tried"
    assert asked["create", "secrets"] == 2 * NUM_JOBS, "the keys of a job, and their copy"
    assert asked["create", "configmaps"] == NUM_JOBS
    for what in ("secrets", "configmaps"):
        assert asked["get", what] == 0, f"{what} of a new job need no look before"
    assert asked["get", "nodes"] <= NUM_NODES, "each place is looked up once for all jobs"
    assert asked["list", "nodes"] <= 30, "once in a while, for all jobs"
    most = NUM_JOBS * (REQUESTS_PER_JOB + STATUS_WRITES) + NUM_NODES + asked["list", "nodes"]
    assert asked.total() <= most, asked

    by_server = request_counts.counted_by_server(plane)
    begin = request_counts.counted_by_operator(operator)["update", "leases"]
    until(
        lambda: request_counts.counted_by_operator(operator)["update", "leases"] >= begin + 3,
        "three renewals of the lease, with nothing else to do",
        timeout_s=BOUND_S,
    )
    idle = request_counts.beside_leases(request_counts.counted_by_operator(operator)) - created
    assert idle.total() <= WATCHES, f"{NUM_JOBS} idle jobs ask for nothing: {idle}"
    by_server = request_counts.counted_by_server(plane) - by_server
    assert by_server <= WATCHES + 2 * 4, "and the API server counts the lease's and no more"

    idle_too = quiet(operator)
    jobs.run("delete", "trainingjobs", "--all", "--wait=false", timeout_s=BOUND_S)
    until(
        lambda: not left(jobs), "nothing to be left", timeout_s=BOUND_S, every_s=2,
        last=lambda: left(jobs)[:5],
    )  # fmt: skip
    deleting = quiet(operator) - idle_too
    looks = deleting.pop(
        ("get", "nodes"), 0
    )  # checks whether nodes of terminating pods still exist
    assert deleting.total() <= WATCHES, f"what is owned goes by itself: {deleting}"
    assert looks <= NUM_NODES * LOOKS
    assert "holdfast_operator_jobs 0.0" in operator.get("/metrics")[1]


def left(kubectl: Kubectl) -> list[str]:
    """Events of a deleted object stay for an hour."""
    owned = kubectl.run(
        "get", "pods,secrets,configmaps", "--output=name", "--selector=holdfast.dev/job"
    )
    return [*owned.split(), *kubectl.run("get", "trainingjobs", "--output=name").split()]
