"""The rig itself: it starts a real Kubernetes, its faults are real, and it leaves nothing behind.

The cluster of these tests has short node-monitor times; all others have the defaults.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.kubernetes.conftest import fresh
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.existing_cluster import GivenCluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.run import REPOSITORY, Run, is_running, leftovers
from tests.e2e.kubernetes.rig.settings import SHORT
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.kubernetes.rig.workloads import phase, pod

pytestmark = pytest.mark.e2e

# A program that starts a cluster, prints its name and waits to be killed.
KILLED_LATER = """
import signal
from tests.e2e.kubernetes.rig.binaries import locate
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.run import Run
run = Run()
Cluster(run, locate()).start(1)
print(run.name, flush=True)
signal.pause()
"""

# Lists pods with the service account of a pod, and prints the answer.
ASK = """
import os, ssl, urllib.error, urllib.request
from pathlib import Path
account = Path("/var/run/secrets/kubernetes.io/serviceaccount")
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
url = f"https://{host}:{port}/api/v1/pods"
headers = {"Authorization": "Bearer " + (account / "token").read_text()}
context = ssl.create_default_context(cafile=str(account / "ca.crt"))
try:
    request = urllib.request.Request(url, headers=headers)
    print(urllib.request.urlopen(request, context=context).read().decode())
except urllib.error.HTTPError as refused:
    print(__import__("json").load(refused)["message"])
"""

# A run with one process; prints the name of the run and both process ids.
KILLED_WITH_KEEPER = """
import signal
from tests.e2e.kubernetes.rig.process import Server
from tests.e2e.kubernetes.rig.run import Run
run = Run()
server = Server(run, "sleeper", ["sleep", "600"])
server.start()
print(run.name, run.keeper_pid, server.pid, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def short(node_binaries: programs.Binaries) -> Iterator[Cluster]:
    with Run() as run:
        made = Cluster(run, node_binaries, settings=SHORT)
        made.start(2)
        yield made


@pytest.fixture
def kubectl(short: Cluster) -> Iterator[Kubectl]:
    yield from fresh(short.kubectl())


def test_the_control_plane_serves_the_api_and_accepts_pods(namespace: Kubectl) -> None:
    served = namespace.json("version")["serverVersion"]
    assert served["major"] == "1"
    namespace.create(pod("waiting", "true"))
    assert phase(namespace.get("pod", "waiting")) == "Pending"


def test_a_restarted_api_server_has_all_objects(
    own_control_plane: ControlPlane, namespace: Kubectl
) -> None:
    namespace.run("create", "configmap", "kept", "--from-literal=key=value")
    own_control_plane.kill_api_server()
    assert not own_control_plane.answers()
    assert namespace.attempt("get", "configmaps").returncode != 0
    own_control_plane.start_api_server()
    kept = namespace.get("configmap", "kept")
    assert kept and kept["data"] == {"key": "value"}


def test_a_pod_above_its_memory_limit_is_killed(kubectl: Kubectl) -> None:
    greedy = pod("greedy", "python", "-c", "print(len(bytes([1]) * 10**9))")
    greedy["spec"]["containers"][0]["resources"] = {"limits": {"memory": "64Mi"}}
    kubectl.create(greedy)
    ended = kubectl.wait("pod", "greedy", lambda p: phase(p) == "Failed", "to fail")
    state = ended["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (state["reason"], state["exitCode"]) == ("OOMKilled", 137)


def test_a_pod_that_requests_gpus_gets_the_node_that_reports_them(
    short: Cluster, kubectl: Kubectl
) -> None:
    short.nodes["node2"].advertise("nvidia.com/gpu", 8)
    asking = pod("asking", "sleep", "600")
    asking["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "8"}}
    kubectl.create(asking)
    running = kubectl.wait("pod", "asking", lambda p: phase(p) == "Running", "to run")
    assert running["spec"]["nodeName"] == "node2"


def test_a_partitioned_node_becomes_unknown_and_recovers(short: Cluster) -> None:
    node = short.nodes["node1"]
    node.cut()
    node.wait_ready("Unknown", timeout_s=60)
    node.heal()
    node.wait_ready("True", timeout_s=60)


def test_processes_on_a_partitioned_node_keep_running(short: Cluster, kubectl: Kubectl) -> None:
    """Kubernetes has deleted the pod, but its processes run."""
    node = short.nodes["node2"]
    kubectl.create(pod("zombie", "sleep", "600", node=node.name))
    kubectl.wait("pod", "zombie", lambda p: phase(p) == "Running", "to run")
    node.cut()
    kubectl.wait(
        "pod",
        "zombie",
        lambda p: p is not None and "deletionTimestamp" in p["metadata"],
        "to be evicted",
        timeout_s=90,
    )
    assert "sleep 600" in commands(node.processes())
    node.heal()
    kubectl.wait("pod", "zombie", lambda p: p is None, "to be gone", timeout_s=60)
    until(
        lambda: "sleep 600" not in commands(node.processes()),
        "the process of the pod to end",
        timeout_s=30,
    )


def commands(pids: list[int]) -> list[str]:
    found = []
    for pid in pids:
        done = subprocess.run(
            ["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        found.append(done.stdout.strip())
    return found


def test_a_node_without_power_is_lost_and_its_replacement_joins(short: Cluster) -> None:
    lost = short.add_node()
    lost.lose_power()
    assert lost.processes() == []
    lost.wait_ready("Unknown", timeout_s=60)
    replacement = short.add_node()
    assert replacement.readiness() == "True"
    short.remove_node(lost)
    until(lambda: lost.readiness() == "", "the lost node to be off the list", timeout_s=30)
    short.remove_node(replacement)


def test_a_stopped_control_plane_leaves_nothing(
    control_plane: ControlPlane | GivenCluster, binaries: programs.Binaries
) -> None:
    if refusal := binaries.refusal(programs.CONTROL_PLANE):
        pytest.skip(refusal)
    with Run() as run:
        ControlPlane(run, binaries).start()
        assert leftovers(run.name) != []
    assert leftovers(run.name) == []


def test_a_cluster_of_killed_tests_leaves_nothing(
    node_binaries: programs.Binaries,
) -> None:
    tests = subprocess.Popen(
        [sys.executable, "-c", KILLED_LATER], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert tests.stdout is not None
    name = tests.stdout.readline().strip()
    assert name and any("cgroup" in left for left in leftovers(name))
    tests.kill()
    tests.wait()
    until(
        lambda: leftovers(name) == [],
        "the keeper to remove everything",
        timeout_s=60,
        last=lambda: leftovers(name),
    )


def test_the_next_run_cleans_up_after_a_run_with_a_killed_keeper() -> None:
    tests = subprocess.Popen(
        [sys.executable, "-c", KILLED_WITH_KEEPER],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tests.stdout is not None
    name, keeper, sleeper = tests.stdout.readline().split()
    os.kill(int(keeper), signal.SIGKILL)
    tests.kill()
    tests.wait()
    assert f"process {sleeper}" in leftovers(name)
    with Run():
        assert leftovers(name) == []
    until(lambda: not is_running(int(sleeper)), "the process to be gone", timeout_s=10)
