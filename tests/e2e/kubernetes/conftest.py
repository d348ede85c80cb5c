"""Fixtures: a control plane, a cluster with nodes, a namespace for one test.

`control_plane` needs only the binaries (or any cluster, by HOLDFAST_TEST_KUBECONFIG); `cluster`
needs root and namespaces too. They are separate, so that a test of the API never meets a node.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.kubernetes.commands import SCRIPT, HoldfastCli
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.existing_cluster import VARIABLE, GivenCluster, given
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.operator import Operator
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.unschedulable import install

NUM_NODES = 3


def skip_without(binaries: programs.Binaries, names: tuple[str, ...]) -> None:
    if refusal := binaries.refusal(names):
        pytest.skip(refusal)


@pytest.fixture(scope="session")
def binaries() -> programs.Binaries:
    """Places of the programs; skips nothing."""
    return programs.locate()


@pytest.fixture(scope="session")
def node_binaries(binaries: programs.Binaries) -> programs.Binaries:
    """The programs of a cluster with nodes, on a machine that can run one."""
    if refusal := programs.machine_refusal():
        pytest.skip(refusal)
    skip_without(binaries, (*programs.CONTROL_PLANE, *programs.NODE))
    return binaries


def api_server(
    binaries: programs.Binaries, directory: Path
) -> Iterator[ControlPlane | GivenCluster]:
    """An API server without nodes, at Kubernetes' default settings; needs no privileges."""
    if named := given(binaries, directory):
        skip_without(binaries, ("kubectl",))
        yield named
        return
    skip_without(binaries, programs.CONTROL_PLANE)
    with Run() as run:
        plane = ControlPlane(run, binaries)
        plane.start()
        yield plane


@pytest.fixture(scope="session")
def control_plane(
    binaries: programs.Binaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane | GivenCluster]:
    """The API server that tests share. CRDs stay: deleting one takes a busy API server a minute."""
    yield from api_server(binaries, tmp_path_factory.mktemp("kubectl"))


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane | GivenCluster) -> ControlPlane | GivenCluster:
    """The control plane with the CRD."""
    install(control_plane)
    return control_plane


@pytest.fixture(scope="session")
def own_control_plane(control_plane: ControlPlane | GivenCluster) -> ControlPlane:
    """The control plane, if tests may kill its processes."""
    if isinstance(control_plane, GivenCluster):
        pytest.skip(f"this test kills the API server; unset {VARIABLE} to run it")
    return control_plane


@pytest.fixture(scope="session")
def cluster(node_binaries: programs.Binaries) -> Iterator[Cluster]:
    """Three nodes at Kubernetes' default settings. A test that loses one adds another."""
    with Run() as run:
        made = Cluster(run, node_binaries)
        made.start(NUM_NODES)
        yield made


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Operator:
    """The operator of the cluster with nodes, leading."""
    made = Operator(cluster)
    made.install()
    made.start()
    return made


@pytest.fixture
def jobs(plane: ControlPlane | GivenCluster, namespace: Kubectl) -> Kubectl:
    """A namespace without an operator."""
    return namespace


@pytest.fixture
def holdfast(jobs: Kubectl) -> HoldfastCli:
    return HoldfastCli(jobs)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SCRIPT))
    return path


def fresh(kubectl: Kubectl) -> Iterator[Kubectl]:
    name = f"test-{secrets.token_hex(4)}"
    kubectl.run("create", "namespace", name)
    yield kubectl.inside(name)
    kubectl.run("delete", "namespace", name, "--wait=false")


@pytest.fixture
def namespace(control_plane: ControlPlane | GivenCluster) -> Iterator[Kubectl]:
    """kubectl in a namespace of its own on the control plane without nodes."""
    yield from fresh(control_plane.kubectl())


@pytest.fixture
def cluster_namespace(cluster: Cluster) -> Iterator[Kubectl]:
    """kubectl in a namespace of its own on the cluster with nodes."""
    yield from fresh(cluster.kubectl())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of the cluster to the report of a failed test: it is about to be removed."""
    report = yield
    if report.failed and call.when == "call":
        for value in getattr(item, "funcargs", {}).values():
            cluster = value if isinstance(value, Cluster) else getattr(value, "cluster", None)
            if isinstance(cluster, Cluster):
                report.sections.append(("cluster", cluster.report()))
                break
    return report
