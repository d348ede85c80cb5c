"""The chart on a cluster with nodes: `helm install` under the restricted pod security standard
starts operators, which train a job and survive the end of the leader. What its pods compile is kept
for those that replace them.

On a separate cluster, because this operator watches all namespaces.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from helm import render
from holdfast.orchestrator.protocol.manifest import MANIFEST_NAME
from tests.e2e.kubernetes.conftest import skip_without
from tests.e2e.kubernetes.jobs import ENDLESS, Job, example
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.kubernetes.rig.workloads import shared_storage
from tests.e2e.kubernetes.test_chart import Helm
from tests.e2e.local.test_compile import KINDS, entries, needs_compiler

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

JOBS = "jobs"
CLAIM = "checkpoints"
CACHE_CLAIM = "compile-cache"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
OPERATOR = "app.kubernetes.io/component=operator"


@dataclass
class Installed:
    """A cluster of two nodes with the chart installed."""

    cluster: Cluster
    helm: Helm
    volumes: Path
    """Directory here of `worker.cacheVolume`, and of the checkpoint volume of each namespace."""

    @property
    def system(self) -> Kubectl:
        return self.cluster.kubectl(render.NAMESPACE)

    @property
    def jobs(self) -> Kubectl:
        return self.cluster.kubectl(JOBS)

    def leader(self) -> str:
        """The name of the pod that holds the lease; empty if none does."""
        lease = self.system.get("lease", "holdfast-operator") or {"spec": {}}
        holder = lease["spec"].get("holderIdentity") or ""
        pods = [pod["metadata"]["name"] for pod in self.system.list("pods", OPERATOR)]
        return next((name for name in pods if holder.startswith(name)), "")


@pytest.fixture(scope="module")
def installed(
    node_binaries: programs.Binaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    skip_without(node_binaries, ("helm",))
    with Run() as run:
        cluster = Cluster(run, node_binaries)
        cluster.start(2)
        kubectl = cluster.kubectl()
        for namespace in (render.NAMESPACE, JOBS):
            kubectl.run("create", "namespace", namespace)
            kubectl.run("label", "namespace", namespace, RESTRICTED)
            cache = shared_storage(f"cache-{namespace}", run.directory / CACHE_CLAIM, CACHE_CLAIM)
            own = shared_storage(f"own-{namespace}", run.directory / namespace, CLAIM)
            kubectl.inside(namespace).apply(*cache, *own)
        second = shared_storage("second", run.directory / JOBS, f"{CLAIM}-{JOBS}")
        kubectl.inside(render.NAMESPACE).apply(*second)
        kubeconfig = cluster.control_plane.kubeconfig
        helm = Helm(node_binaries.path("helm"), tmp_path_factory.mktemp("helm"), kubeconfig)
        helm.run(*install(Path("/checkpoints")))
        yield Installed(cluster, helm, run.directory)


def install(root: Path) -> tuple[str, ...]:
    """Install the chart with a checkpoint volume for each namespace, see docs/user/storage.md."""
    second = [{"name": JOBS, "persistentVolumeClaim": {"claimName": f"{CLAIM}-{JOBS}"}}]
    mount = [{"name": JOBS, "mountPath": f"{root}/{JOBS}", "subPath": JOBS}]
    volume, cache = (
        json.dumps({"persistentVolumeClaim": {"claimName": claim}})
        for claim in (CLAIM, CACHE_CLAIM)
    )
    return (
        *("install", "holdfast", str(render.CHART), "--namespace", render.NAMESPACE),
        *("--set", f"checkpoints.root={root}", "--set-json", f"checkpoints.volume={volume}"),
        *("--set-json", f"worker.cacheVolume={cache}"),
        *("--set-json", f"extraVolumes={json.dumps(second)}"),
        *("--set-json", f"extraVolumeMounts={json.dumps(mount)}"),
        *("--wait", "--timeout", "100s"),
    )


def test_two_operators_run_and_the_charts_own_test_passes(installed: Installed) -> None:
    installed.system.wait(
        "deployment",
        "holdfast-operator",
        lambda d: d is not None and d["status"].get("readyReplicas") == 2,
        "to have two ready replicas",
        timeout_s=150,  # the kubelet retries mounts after up to two minutes
    )
    until(lambda: installed.leader() != "", "a leader", timeout_s=60)
    text = installed.helm.run("test", "holdfast", "--namespace", render.NAMESPACE)
    assert "Phase:          Succeeded" in text


def test_a_job_survives_its_operator_and_the_other_one_takes_over(installed: Installed) -> None:
    job = Job(installed.jobs, example("endless", ENDLESS))
    job.wait_running(4)
    before = job.wait_steps(2)
    leader = installed.leader()
    kill_operator(installed, leader)
    until(
        lambda: installed.leader() not in ("", leader),
        "the other replica to lead",
        timeout_s=60,
        last=lambda: installed.system.run("get", "pods,leases"),
    )
    assert job.wait_steps(3)["generation"] == before["generation"], job.report()
    assert job.incidents_after(before) == []
    job.demand("checkpoint")
    until(
        lambda: any((installed.volumes / JOBS / JOBS / "endless").glob(f"*/{MANIFEST_NAME}")),
        "a committed checkpoint on the volume of the job's namespace", timeout_s=60,
        last=job.report,
    )  # fmt: skip
    assert list((installed.volumes / render.NAMESPACE).glob("*/*")) == []
    job.delete()


@needs_compiler
def test_a_pod_that_replaces_another_one_compiles_nothing_again(installed: Installed) -> None:
    document = example("compiled", ENDLESS, nodes={"min": 1, "max": 1}, workersPerNode=1)
    document["spec"]["entrypoint"]["recipe"]["config"]["compile"] = True
    document["spec"]["parallelism"] = {"shard": 1}
    job = Job(installed.jobs, document)
    job.wait_running(1)
    before = job.wait_steps(3)
    cache = installed.volumes / CACHE_CLAIM / JOBS / "inductor"
    compiled = entries(cache)
    assert {name.split("/")[0] for name in compiled} == set(KINDS), job.report()
    (pod,) = job.pods()
    installed.jobs.run("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
    job.wait(
        lambda s: s.get("generation", 0) > before["generation"] and s.get("state") == "running",
        "to run on another pod",
    )
    job.wait_steps(3)
    (other,) = job.pods()
    assert other["metadata"]["uid"] != pod["metadata"]["uid"]
    assert entries(cache) == compiled
    job.delete()


def kill_operator(installed: Installed, pod: str) -> None:
    """SIGKILL from outside, like the OOM killer."""
    where = (installed.system.get("pod", pod) or {})["spec"]["nodeName"]
    uid = (installed.system.get("pod", pod) or {})["metadata"]["uid"]
    for pid in installed.cluster.nodes[where].processes():
        words = psutil.Process(pid).cmdline()
        if (
            "holdfast.orchestrator.cli.main" in words
            and uid in Path(f"/proc/{pid}/cgroup").read_text()
        ):
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"the process of {pod} was not found on {where}")
