"""TrainingJobs on a cluster with nodes: applied, scaled, suspended and disturbed.

The cluster has the defaults of Kubernetes: it needs 47 s to notice a lost node and 350 s to replace
its pods. Every job is a small variant of examples/stdlib-bytes.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.e2e.kubernetes.conftest import fresh
from tests.e2e.kubernetes.jobs import ENDLESS, Job, example
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.kubectl import Document, Kubectl
from tests.e2e.kubernetes.rig.operator import Operator
from tests.e2e.kubernetes.rig.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def endless(operator: Operator, cluster: Cluster) -> Iterator[Job]:
    """One endless job for many tests."""
    for kubectl in fresh(cluster.kubectl()):
        yield Job(kubectl, example("endless", ENDLESS))


@pytest.fixture
def running(endless: Job, operator: Operator) -> Job:
    """The endless job, training with two workers on each of two nodes."""
    operator.ensure_running()
    endless.wait_running(4)
    endless.wait_steps(2)
    return endless


def test_the_example_trains_to_its_end(operator: Operator, cluster_namespace: Kubectl) -> None:
    job = Job(cluster_namespace, example("short", 12))
    cluster_namespace.run(
        *("wait", "--for=condition=Succeeded", "trainingjob/short", "--timeout=180s"),
        timeout_s=190,
    )
    ended = job.status()
    assert (ended["state"], ended["step"]) == ("succeeded", 11), job.report()
    columns = cluster_namespace.run("get", "tj").splitlines()
    assert columns[0].split()[:4] == ["NAME", "STATE", "NODES", "WORLD"]
    assert columns[1].split()[:2] == ["short", "succeeded"]
    job.delete()


def test_a_spare_replaces_a_node_that_loses_power(
    operator: Operator, cluster: Cluster, cluster_namespace: Kubectl
) -> None:
    nodes = {"min": 2, "max": 2, "spares": 1}
    job = Job(cluster_namespace, example("spared", ENDLESS, nodes=nodes))
    job.wait_running(4)
    job.wait(lambda s: s["nodes"]["spares"] == 1, "to have a spare")
    before = job.wait_steps(2)
    spare = next(pod for pod in job.pods() if "holdfast.dev/rank" not in pod["metadata"]["labels"])
    lost = next(cluster.nodes[name] for name in job.nodes() if name != spare["spec"]["nodeName"])
    lost.lose_power()
    job.wait(lambda s: s["generation"] > before["generation"], "to go on", timeout_s=60)
    assert lost.readiness() == "True", "Kubernetes was faster than Holdfast"
    job.wait_steps(2)
    (incident, *_) = job.incidents_after(before)
    assert incident["decision"].startswith(f"{spare['metadata']['name']} replaces ")
    assert incident["worldSizeAfter"] == 4
    assert incident["stepsLost"] <= 1, job.report()
    cluster.remove_node(lost)
    replacement = cluster.add_node(wait=False)
    job.delete()
    replacement.wait_ready()


def test_a_job_is_scaled_down_and_up_without_losing_a_step(running: Job) -> None:
    before = running.status()
    running.kubectl.run("scale", "trainingjob/endless", "--replicas=1")
    running.wait_running(2)
    until(lambda: len(running.pods()) == 1, "one pod", timeout_s=60)
    running.wait_steps(2)
    running.kubectl.run("scale", "trainingjob/endless", "--replicas=2")
    running.wait_running(4)
    running.wait_steps(2)
    down, *_, up = of_class("resize", running.incidents_after(before))
    assert (down["worldSizeBefore"], down["worldSizeAfter"]) == (4, 2)
    assert (up["worldSizeBefore"], up["worldSizeAfter"]) == (2, 4)
    assert (down["stepsLost"], up["stepsLost"]) == (0, 0), running.report()


def of_class(wanted: str, incidents: list[Document]) -> list[Document]:
    """Incidents of this class; on a busy machine there may be others."""
    return [one for one in incidents if one["class"] == wanted]


def test_a_suspended_job_releases_its_pods_and_resumes_at_its_step(running: Job) -> None:
    before = running.status()
    suspend(running, True)
    held = running.wait(lambda s: s.get("state") == "suspended", "to be suspended")
    until(lambda: running.pods() == [], "its pods to go", timeout_s=60)
    suspend(running, False)
    running.wait_running(4)
    resumed = running.wait_steps(1)
    assert resumed["step"] > held["step"] >= before["step"]
    charged = "restartsByClass"
    assert resumed.get(charged) == before.get(charged)


def suspend(job: Job, wanted: bool) -> None:
    patch = f'{{"spec": {{"suspend": {str(wanted).lower()}}}}}'
    job.kubectl.run("patch", "trainingjob", job.name, "--type=merge", f"--patch={patch}")


def test_a_killed_worker_costs_no_finished_step(running: Job) -> None:
    before = running.status()
    running.chaos("kill-worker", rank=3)
    running.wait(lambda s: s["generation"] > before["generation"], "to restart")
    running.wait_steps(2)
    (incident,) = running.incidents_after(before)
    assert "was killed by SIGKILL" in incident["title"]
    assert (incident["stepsLost"], incident["restoredFrom"]) == (0, "memory"), running.report()
    assert "holdfast.dev/request" not in running.object()["metadata"].get("annotations", {})
    until(
        lambda: missing_lines(running, incident["number"]) == [], "describe to show the incident",
        timeout_s=60, last=lambda: (missing_lines(running, incident["number"]), running.report()),
    )  # fmt: skip


def missing_lines(job: Job, number: int) -> list[str]:
    """Patterns that `kubectl describe` lacks for an incident that is over."""
    one = next(one for one in job.status()["incidents"] if one["number"] == number)
    text = job.kubectl.run("describe", "tj", job.name)
    fields, _events, events = text.partition("\nEvents:")
    title, node = re.escape(one["title"]), re.escape(one.get("culpritNode", "no node"))
    wanted = {
        rf"\bTitle: +{title}\n": fields,
        rf"\bCulprit Node: +{node}\n": fields,
        r"\bCulprit Rank: +3\n": fields,
        rf"\bTotal: +{one['seconds'].get('total', 'not over')}\n": fields,
        r"\bSteps Lost: +0\n": fields,
        rf"Warning +\w+ .* incident {number}: {title}": events,
        rf"Normal +Recovered .* incident {number} is over: .* s, no finished step lost": events,
    }
    return [pattern for pattern, part in wanted.items() if not re.search(pattern, part)]


def test_the_pod_labelled_rank_0_has_the_lines_of_rank_0(running: Job) -> None:
    def lines() -> list[str]:
        selector = f"--selector=holdfast.dev/job={running.name},holdfast.dev/rank=0"
        return running.kubectl.run("logs", selector, "--tail=-1").splitlines()

    until(
        lambda: any(re.match(r"\[rank 0, gen \d+\] step", line) for line in lines()),
        "lines of rank 0", timeout_s=60, last=running.report,
    )  # fmt: skip
    elsewhere = tuple(f"[rank {rank}, " for rank in (2, 3))
    assert [line for line in lines() if line.startswith(elsewhere)] == []


def test_training_continues_after_a_power_loss_before_kubernetes_notices_it(
    running: Job, cluster: Cluster
) -> None:
    before = running.status()
    lost = cluster.nodes[running.nodes()[-1]]
    lost.lose_power()
    running.wait(lambda s: s["generation"] > before["generation"], "to go on", timeout_s=60)
    assert lost.readiness() == "True", "Kubernetes was faster than Holdfast"
    running.wait_running(4)
    running.wait_steps(2)
    assert lost.name not in live_nodes(running)
    incidents = running.incidents_after(before)
    assert all(one["stepsLost"] <= 1 for one in incidents), running.report()
    cluster.remove_node(lost)
    replacement = cluster.add_node(wait=False)
    until(
        lambda: on_node(running, lost.name) == [],
        "the dead node's pods to be removed",
        timeout_s=90,
    )
    replacement.wait_ready()


def live_nodes(job: Job) -> set[str]:
    """The nodes of pods that are not being deleted."""
    pods = [pod for pod in job.pods() if "deletionTimestamp" not in pod["metadata"]]
    return {pod["spec"].get("nodeName", "") for pod in pods}


def on_node(job: Job, node: str) -> list[Document]:
    return [pod for pod in job.pods() if pod["spec"].get("nodeName") == node]


def test_partitioned_pods_end_when_the_network_recovers(running: Job, cluster: Cluster) -> None:
    before = running.status()
    node = cluster.nodes[running.nodes()[-1]]
    zombies = {pod["metadata"]["name"] for pod in on_node(running, node.name)}
    node.cut()
    running.wait(lambda s: s["generation"] > before["generation"], "to go on", timeout_s=60)
    running.wait_running(4)
    assert node.processes() != []
    node.heal()
    until(
        lambda: not zombies & {pod["metadata"]["name"] for pod in running.pods()},
        "the cut-off pods to end",
        timeout_s=120,
    )
    healed = running.status()
    assert running.wait_steps(3)["generation"] == healed["generation"], running.report()
    incidents = running.incidents_after(before)
    assert all(one["stepsLost"] <= 1 for one in incidents), running.report()


def test_a_drained_node_is_replaced_without_losing_a_step(running: Job, cluster: Cluster) -> None:
    before = running.status()
    node = running.nodes()[-1]
    cluster.kubectl().run(
        *("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force"),
        timeout_s=150,
    )
    running.wait(lambda s: s["generation"] > before["generation"], "to move")
    running.wait_running(4)
    running.wait_steps(2)
    cluster.kubectl().run("uncordon", node)
    assert node not in live_nodes(running)
    (handed_over, *_) = of_class("preemption", running.incidents_after(before))
    assert handed_over["stepsLost"] == 0, running.report()


def test_training_continues_while_the_operator_is_down(running: Job, operator: Operator) -> None:
    before = running.status()
    operator.kill()
    try:
        seen = running.last_step()
        until(lambda: running.last_step() >= seen + 3, "steps without operator", timeout_s=60)
    finally:
        operator.start()
    assert running.wait_steps(3)["generation"] == before["generation"], running.report()
    assert running.incidents_after(before) == []


def test_training_continues_while_the_api_server_is_down(
    running: Job, cluster: Cluster, operator: Operator
) -> None:
    before = running.status()
    cluster.control_plane.kill_api_server()
    cluster.control_plane.start_api_server()
    operator.ensure_running()
    assert running.wait_steps(3)["generation"] == before["generation"], running.report()
    assert running.incidents_after(before) == []
