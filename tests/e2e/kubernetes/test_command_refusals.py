"""`holdfast --kubernetes` and `kubectl holdfast`: who is refused and why, at a real API server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from orchestrator.cli.plugin import main as plugin
from tests.e2e.kubernetes.commands import (
    SCRIPT,
    Commands,
    called,
    serve_jobs,
    trained,
    write_status,
)
from tests.e2e.kubernetes.rig.control_plane import ControlPlane, free_ports
from tests.e2e.kubernetes.rig.given import GivenCluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def crd(control_plane: ControlPlane | GivenCluster) -> None:
    serve_jobs(control_plane.kubectl())


@pytest.fixture
def jobs(crd: None, namespace: Kubectl) -> Kubectl:
    """A namespace that no operator looks at."""
    return namespace


@pytest.fixture
def holdfast(jobs: Kubectl) -> Commands:
    return Commands(jobs)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SCRIPT))
    return path


def test_a_job_that_is_not_there_names_those_that_are(jobs: Kubectl, holdfast: Commands) -> None:
    alone = holdfast("status", "nope")
    assert alone.code == 2 and f"expected a job; namespace {jobs.namespace} has none" in alone.err
    assert f"no jobs in namespace {jobs.namespace}" in holdfast("status").err
    jobs.create(SCRIPT)
    for words in (["status"], ["report"], ["events"], ["logs"], ["cancel"], ["delete"]):
        result = holdfast(*words, "nope")
        assert result.code == 2
        assert f"job: got nope; expected one of demo in namespace {jobs.namespace}" in result.err


def test_a_namespace_that_is_not_there_is_named(jobs: Kubectl, file: Path) -> None:
    holdfast = Commands(jobs.inside("missing"))
    for words in (["status"], ["status", "demo"], ["run", file]):
        result = holdfast(*words)
        assert result.code == 2
        assert "--namespace: got missing, which does not exist; expected a name" in result.err


def test_a_file_for_another_namespace_is_a_contradiction(
    jobs: Kubectl, holdfast: Commands, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**SCRIPT, "metadata": {"name": "demo", "namespace": "team"}}))
    result = holdfast("run", path)
    assert result.code == 2
    assert f"--namespace: got {jobs.namespace}; expected team, as metadata.namespace" in result.err


@pytest.fixture
def viewer(jobs: Kubectl, own_control_plane: ControlPlane) -> Commands:
    """Somebody who may look at jobs and at nothing else."""
    rights = ["--verb=get,list,watch", "--resource=trainingjobs.holdfast.dev"]
    jobs.run("create", "serviceaccount", "viewer")
    jobs.run("create", "role", "viewer", *rights)
    account = f"--serviceaccount={jobs.namespace}:viewer"
    jobs.run("create", "rolebinding", "viewer", "--role=viewer", account)
    token = jobs.run("create", "token", "viewer").strip()
    name = f"viewer-{jobs.namespace}"
    return Commands(jobs, own_control_plane.write_kubeconfig(name, token=token))


def test_whoever_may_only_see_jobs_sees_them_and_is_told_which_right_is_missing(
    jobs: Kubectl, viewer: Commands, file: Path
) -> None:
    jobs.create(SCRIPT)
    write_status(jobs, trained())
    assert "42 of 100 steps" in viewer("status", "demo").out
    for words, missing in (
        (["suspend", "demo"], "patch trainingjobs"),
        (["resize", "demo", "1"], "patch trainingjobs/scale"),
        (["run", file], "create trainingjobs"),
        (["logs", "demo"], "list pods"),
        (["events", "demo"], "list events"),
        (["chaos", "kill-worker", "demo"], "patch trainingjobs"),
    ):
        result = viewer(*words)
        assert result.code == 2, words
        assert f"missing right: {missing}" in result.err
        assert "Traceback" not in result.err


def test_credentials_that_are_not_accepted_are_told(
    jobs: Kubectl, own_control_plane: ControlPlane
) -> None:
    """As an expired token is: the API server does not say more than Unauthorized."""
    old = own_control_plane.write_kubeconfig("expired", token="expired")
    result = Commands(jobs, old)("status")
    assert result.code == 2
    assert "does not accept our credentials" in result.err and "log in again" in result.err


def test_an_api_server_that_is_not_there_is_told(
    jobs: Kubectl, own_control_plane: ControlPlane, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    document = yaml.safe_load(own_control_plane.kubeconfig.read_text())
    [port] = free_ports("127.0.0.1", 1)
    document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    closed.write_text(yaml.safe_dump(document))
    result = Commands(jobs, closed)("status")
    assert result.code == 1
    assert f"the API server at https://127.0.0.1:{port} does not answer" in result.err


# -- kubectl ----------------------------------------------------------------------------------
def test_kubectl_finds_the_plugin_and_it_takes_kubectls_options(
    jobs: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl-holdfast"
    code = "from orchestrator.cli.plugin import main; main()"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.setenv("KUBECONFIG", str(jobs.kubeconfig))
    jobs.create(SCRIPT)
    bare = [str(jobs.program), "holdfast"]
    for words in (["status", "demo", "-n", jobs.namespace], ["-n", jobs.namespace, "status"]):
        done = run([*bare, *words])
        assert done.startswith(("demo", "JOB")), done


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_the_plugin_speaks_of_itself_in_its_hints(jobs: Kubectl) -> None:
    where = ["--kubeconfig", str(jobs.kubeconfig), "-n", jobs.namespace]
    result = called(plugin, *where, "status", "nope")
    assert result.code == 2
    assert f"see `kubectl holdfast status -n {jobs.namespace}" in result.err
    assert "Usage: kubectl holdfast" in called(plugin, "--help").out


def test_a_token_that_has_expired_is_fetched_anew_from_the_plugin_of_the_kubeconfig(
    jobs: Kubectl, tmp_path: Path
) -> None:
    config = yaml.safe_load(jobs.kubeconfig.read_text())
    user = config["users"][0]["user"]
    if "token" not in user:
        pytest.skip("needs a kubeconfig with a token")
    used, program = tmp_path / "used", tmp_path / "plugin"
    program.write_text(
        f"#!/bin/sh\nif [ -e {used} ]; then token={user['token']}; else token=expired; fi\n"
        f"touch {used}\n"
        'echo \'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",\'\n'
        'echo "\\"status\\": {\\"token\\": \\"$token\\"}}"\n'
    )
    program.chmod(0o700)
    version = "client.authentication.k8s.io/v1"
    config["users"][0]["user"] = {
        "exec": {"apiVersion": version, "command": str(program), "interactiveMode": "Never"}
    }
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    jobs.create(SCRIPT)
    result = Commands(jobs, kubeconfig)("status", "demo")
    assert result.code == 0, result.err
    assert "demo" in result.out and "expired" not in result.err
