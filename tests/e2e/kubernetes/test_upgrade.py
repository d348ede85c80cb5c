"""Upgrades and rollbacks of the chart by helm, client-side and server-side `kubectl apply`: the API
server serves the schema of the chart, and keeps the pod templates of stored jobs.

On a separate control plane, because the CRD is the cluster's.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm import render
from tests.e2e.kubernetes.conftest import skip_without
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.kubernetes.test_chart import Helm
from tests.unit.api.wrong_jobs import SCRIPT, job

pytestmark = pytest.mark.e2e

CRD = "trainingjobs.holdfast.dev"
OPTIONAL = "workloadPriorityClassName"
"""A field of spec.kubernetes that the older chart lacks."""
WITH_DIRECTIVES = "c7dc37d3"
"""The last commit whose CRD has properties called $patch."""
TEMPLATE = {
    "metadata": {"labels": {"team": "a"}},
    "spec": {
        "nodeSelector": {"pool": "a"},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "containers": [
            {"name": "worker", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
        ],
    },
}


class Cluster:
    """A control plane with one job that has a pod template, and three ways to install a chart."""

    def __init__(self, plane: ControlPlane, helm: Helm) -> None:
        self.kubectl, self._helm = plane.kubectl("team"), helm

    def helm(self, chart: Path) -> None:
        words = ("holdfast", str(chart), "--namespace", render.NAMESPACE, "--set", "replicas=1")
        self._helm.run("upgrade", "--install", "--take-ownership", *words)

    def client_side(self, chart: Path) -> None:
        self.kubectl.run("apply", "--filename", str(chart / "files/crd.yaml"))

    def server_side(self, chart: Path) -> None:
        words = ("--server-side", "--force-conflicts", "--filename", str(chart / "files/crd.yaml"))
        self.kubectl.run("apply", *words)

    def rollback(self) -> None:
        self._helm.run("rollback", "holdfast", "--namespace", render.NAMESPACE)

    def begin(self, chart: Path) -> None:
        """An empty cluster with the chart's CRD as by `kubectl apply`, and a stored job."""
        self.kubectl.run("delete", "crd", CRD, "--ignore-not-found")
        self._helm.attempt("uninstall", "holdfast", "--namespace", render.NAMESPACE)
        self.client_side(chart)
        self.kubectl.served(CRD)
        self.kubectl.create(job({**SCRIPT, "kubernetes": {"podTemplate": TEMPLATE}}, "stored"))

    def is_as(self, chart: Path, name: str) -> None:
        """The API server serves the chart's schema, accepts a new job with a template, and keeps
        the stored one's, also through a write of its status."""
        expected = schema(yaml.safe_load((chart / "files/crd.yaml").read_text()))
        assert schema(self.kubectl.json("get", "crd", CRD)) == expected
        new = job({**SCRIPT, "kubernetes": {"podTemplate": TEMPLATE}}, name)
        create = ("create", "--filename=-")
        until(
            lambda: self.kubectl.attempt(*create, stdin=yaml.safe_dump(new)).returncode == 0,
            "a new job with a template to be accepted", timeout_s=20,
        )  # fmt: skip
        patch = json.dumps({"status": {"state": name}})
        words = ("patch", "tj", "stored", "--subresource=status", "--type=merge", "--patch", patch)
        self.kubectl.run(*words, f"--as=system:serviceaccount:{render.NAMESPACE}:holdfast-operator",
                         "--as-group=system:masters")  # fmt: skip
        for one in ("stored", name):
            stored = self.kubectl.json("get", "tj", one)
            assert stored["spec"]["kubernetes"]["podTemplate"] == TEMPLATE


def schema(crd: dict[str, Any]) -> dict[str, Any]:
    (version,) = crd["spec"]["versions"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


@pytest.fixture(scope="module")
def cluster(
    binaries: programs.Binaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    skip_without(binaries, (*programs.CONTROL_PLANE, "helm"))
    with Run() as run:
        plane = ControlPlane(run, binaries)
        plane.start()
        for name in (render.NAMESPACE, "team"):
            plane.kubectl().run("create", "namespace", name)
        directory = tmp_path_factory.mktemp("upgrade")
        helm = Helm(binaries.path("helm"), directory, plane.kubeconfig)
        yield Cluster(plane, helm)


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The chart with one optional field less, and another version."""
    chart = tmp_path / "older"
    shutil.copytree(render.CHART, chart)
    document = yaml.safe_load((chart / "files/crd.yaml").read_text())
    spec = schema(document)["properties"]["spec"]["properties"]
    del spec["kubernetes"]["properties"][OPTIONAL]
    (chart / "files/crd.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "0.0.1"}))
    return chart


@pytest.fixture
def with_directives(tmp_path: Path) -> Path:
    words = ["git", "-C", str(render.ROOT), "archive", WITH_DIRECTIVES, "helm/holdfast"]
    done = subprocess.run(words, capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"this clone lacks commit {WITH_DIRECTIVES}")
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=done.stdout, timeout=60, check=True)
    return tmp_path / "helm/holdfast"


@pytest.mark.parametrize("way", [Cluster.helm, Cluster.client_side, Cluster.server_side])
@pytest.mark.parametrize("chart", ["older", "with_directives"])
def test_an_upgrade_keeps_pod_templates(
    cluster: Cluster, way: Callable[[Cluster, Path], None], chart: str, request: Any
) -> None:
    before = request.getfixturevalue(chart)
    cluster.begin(before)
    way(cluster, before)
    way(cluster, render.CHART)
    cluster.is_as(render.CHART, "upgraded")
    if chart == "older":
        cluster.rollback() if way is Cluster.helm else way(cluster, before)
        cluster.is_as(before, "rolled-back")
