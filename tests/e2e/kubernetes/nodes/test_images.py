"""The images of `make images`: built, pushed to a registry, pulled by a node and run.

HOLDFAST_TEST_IMAGES names a directory with images that are built already: the worker's takes
minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helm import render
from holdfast.orchestrator.limits import RELEASE
from images import build
from tests.e2e.kubernetes.commands import HoldfastCli
from tests.e2e.kubernetes.conftest import skip_without
from tests.e2e.kubernetes.jobs import Job, example
from tests.e2e.kubernetes.nodes.test_installed import JOBS, OPERATOR, RESTRICTED
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig import registry
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.kubectl import condition
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.kubernetes.rig.workloads import shared_storage
from tests.e2e.kubernetes.test_chart import Helm
from tools import release

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

PULL_TIMEOUT_S = 900
"""3 GB of torch are pulled and unpacked on two cores, which may be busy."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and chart, as `make release` leaves it."""
    for program in ("apt-get", "dpkg-deb", "skopeo", registry.PROGRAM):
        if shutil.which(program) is None:
            pytest.skip(f"{program} not found; on Debian: apt install {program}")
    out = tmp_path_factory.mktemp("dist")
    if ready := os.environ.get("HOLDFAST_TEST_IMAGES"):
        (out / "images").symlink_to(Path(ready).absolute())
    else:
        assert build.main([f"--out={out / 'images'}"]) == 0
    return out


def test_the_operators_image_is_small_reproducible_and_without_a_shell(
    dist: Path, tmp_path: Path
) -> None:
    first, again = dist / "images" / "operator", tmp_path / "operator"
    assert build.main(["operator", f"--out={tmp_path}"]) == 0
    assert (again / "index.json").read_text() == (first / "index.json").read_text(), "the digest"
    assert sum(path.stat().st_size for path in first.rglob("*")) <= 80e6
    release.unpack(first, tmp_path / "root")
    assert [path.name for path in (tmp_path / "root/usr/bin").iterdir()] == ["python3.11"]
    lock = (build.ROOT / "images/operator/requirements.txt").read_text()
    parts = json.loads((dist / "images" / "operator.cdx.json").read_text())["components"]
    listed = {(part["name"], part["version"]): part["hashes"][0]["content"] for part in parts}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE):
        assert listed[name, version] in lock
    for role in build.ROLES:
        release.smoke(dist / "images" / role)


def test_the_operators_dockerfile_builds_on_a_plain_debian(tmp_path: Path) -> None:
    """The base image is made here, of Debian's packages alone."""
    for program in ("buildah", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} not found; on Debian: apt install {program}")

    def buildah(*words: str | Path) -> str:
        store = (f"--root={tmp_path / 'store'}", f"--runroot={tmp_path / 'run'}")
        line = ("buildah", *store, "--storage-driver=vfs", *words)
        return build.run(*line, wanted="to build").decode().strip()

    (sources,) = [path for name in build.DEBIAN_SOURCES if (path := Path(name)).exists()][:1]
    tar, suite = tmp_path / "base.tar", build.FACTS["suite"]
    build.run("mmdebstrap", "--variant=apt", suite, tar, sources, wanted="to make a base")
    base = buildah("from", "scratch")
    buildah("add", base, tar, "/")
    if authority := os.environ.get("PIP_CERT"):  # of a proxy between here and the package index
        buildah("add", base, authority, "/authority.crt")
        buildah("config", "--env=PIP_CERT=/authority.crt", base)
    buildah("commit", base, "localhost/base:test")
    options = ("--isolation=chroot", "--pull-never", "--build-arg=BASE=localhost/base:test")
    file = f"--file={build.ROOT / 'images/operator/Dockerfile'}"
    buildah("build", *options, file, "--tag=operator:test", build.ROOT)
    buildah("push", "operator:test", f"oci:{tmp_path / 'operator'}")
    release.smoke(tmp_path / "operator")


@pytest.fixture(scope="module")
def cluster(node_binaries: programs.Binaries) -> Iterator[Cluster]:
    skip_without(node_binaries, ("helm",))
    with Run() as run:
        cluster = Cluster(run, node_binaries, pulls=True)
        cluster.start(1)
        yield cluster


def test_the_chart_of_a_registry_trains_a_job_from_its_images(
    dist: Path, cluster: Cluster, tmp_path: Path
) -> None:
    where = cluster.registry
    system, kubectl = cluster.kubectl(render.NAMESPACE), cluster.kubectl(JOBS)
    release.package_chart(dist, where)
    release.push(dist, where, plain_http=True)
    for inside in (system, kubectl):
        inside.run("create", "namespace", inside.namespace)
        inside.run("label", "namespace", inside.namespace, RESTRICTED)
        own = shared_storage(f"own-{inside.namespace}", cluster.run.directory / "own", "own")
        inside.apply(*own)
    home = tmp_path / "helm"
    helm = Helm(cluster.control_plane.binaries.path("helm"), home, cluster.control_plane.kubeconfig)
    chart = ("holdfast", f"oci://{where}/charts/holdfast", "--version", RELEASE, "--plain-http")
    values = {
        "checkpoints.root": "/checkpoints",
        "checkpoints.volume.persistentVolumeClaim.claimName": "own",
    }  # fmt: skip
    options = ["--namespace", render.NAMESPACE, *(f"--set={k}={v}" for k, v in values.items())]
    helm.run("install", *chart, *options, "--wait", "--timeout", "110s")

    document = example("from-image", 60, nodes={"min": 1, "max": 1})
    document["spec"]["entrypoint"]["recipe"]["config"].update(minStepSeconds=0.5)
    job = Job(kubectl, document)
    job.wait(lambda s: s.get("step", 0) >= 3, "to train", timeout_s=PULL_TIMEOUT_S)
    holdfast = HoldfastCli(kubectl)
    asked = holdfast.json("debug", "stacks", "from-image")
    assert sorted(rank for stack in asked["stacks"] for rank in stack["ranks"]) == [0, 1], asked
    profile = tmp_path / "profile.svg"
    done = holdfast("debug", "profile", "from-image", "--seconds", "2", "-o", profile)
    assert done.code == 0 and "<svg" in profile.read_text(), done.err
    job.wait(lambda s: condition({"status": s}, "Succeeded") == "True", "to succeed")
    assert job.status()["step"] == 59

    helm.run("upgrade", *chart, *options, "--set=image.tag=nope")
    missing = f"{where}/operator:nope"
    until(lambda: missing in system.run("get", "events"), "an Event with the image", timeout_s=60)
    assert any(condition(pod, "Ready") == "True" for pod in system.list("pods", OPERATOR))


def test_a_registry_that_refuses_is_named(dist: Path) -> None:
    with pytest.raises(build.BuildError, match=r"skopeo, to push images: .*127\.0\.0\.1:9"):
        release.push(dist, "127.0.0.1:9/holdfast", plain_http=True)
