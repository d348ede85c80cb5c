"""Messages for a user who lacks the programs: errors of the build and reasons of skips."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.kubernetes.binaries import build
from tests.e2e.kubernetes.rig.binaries import CONTROL_PLANE, VARIABLES, Binaries, locate
from tests.e2e.kubernetes.rig.existing_cluster import VARIABLE, given


def run_build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, build.__file__],
        env={"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_go_the_build_reports_what_to_install(tmp_path: Path) -> None:
    done = run_build(tmp_path, PATH=str(tmp_path))
    assert done.returncode == 1
    assert "error: `go` was not found on PATH" in done.stderr
    assert "HOLDFAST_KUBERNETES_BINARIES" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_module_proxy_the_build_reports_the_cause(tmp_path: Path) -> None:
    """A fake go fails with the same message on every machine."""
    go = tmp_path / "go"
    go.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = env ]; then echo {tmp_path}; exit; fi\n'
        "echo 'go: k8s.io/api@v0.36.2: Get: dial tcp: lookup proxy: no such host'; exit 1\n"
    )
    go.chmod(0o755)
    done = run_build(tmp_path, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 1
    assert "no such host" in done.stderr
    assert "The Go module proxy could not be reached" in done.stderr


def test_a_finished_build_is_not_built_again(tmp_path: Path) -> None:
    place = tmp_path / "cache" / "holdfast" / "kubernetes" / build.key()
    place.mkdir(parents=True)
    (place / "complete").touch()
    done = run_build(tmp_path, PATH=str(tmp_path))
    assert done.returncode == 0
    assert str(place) in done.stdout


def test_a_skip_names_the_missing_programs_and_the_fix(tmp_path: Path) -> None:
    (tmp_path / "kubectl").touch(mode=0o755)
    refusal = Binaries((tmp_path,)).refusal(CONTROL_PLANE)
    assert refusal is not None
    assert refusal.startswith("etcd, kube-apiserver, kube-controller-manager, kube-scheduler not")
    assert "make kubernetes-binaries" in refusal
    assert all(variable in refusal for variable in VARIABLES)
    assert Binaries((tmp_path,)).refusal(("kubectl",)) is None


def test_directories_of_the_variables_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, envtest, path = (tmp_path / name for name in ("ours", "envtest", "path"))
    for place, names in ((ours, ("etcd",)), (envtest, ("etcd", "kubectl")), (path, ("odd",))):
        place.mkdir()
        for name in names:
            (place / name).touch(mode=0o755)
    monkeypatch.setenv("HOLDFAST_KUBERNETES_BINARIES", str(ours))
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(envtest))
    monkeypatch.setenv("PATH", str(path))
    found = locate()
    assert found.find("etcd") == ours / "etcd"
    assert found.find("kubectl") == envtest / "kubectl"
    assert found.find("odd") == path / "odd"


def test_the_named_cluster_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubectl").touch(mode=0o755)
    programs = Binaries((tmp_path,))
    monkeypatch.delenv(VARIABLE, raising=False)
    assert given(programs, tmp_path) is None
    monkeypatch.setenv(VARIABLE, "/their/kubeconfig")
    named = given(programs, tmp_path)
    assert named is not None
    command = named.kubectl("team").command("get", "pods")
    assert command[:3] == [str(tmp_path / "kubectl"), "--kubeconfig", "/their/kubeconfig"]
    assert command[-4:] == ["--namespace", "team", "get", "pods"]
