"""`holdfast --kubernetes` and `kubectl holdfast` at a real API server: their errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from holdfast.orchestrator.cli.main import kubectl_main as plugin
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS, NotAuthenticated
from tests.e2e.kubernetes.commands import SCRIPT, HoldfastCli, called, trained, write_status
from tests.e2e.kubernetes.rig.certificates import Authority
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.ports import free_port

pytestmark = pytest.mark.e2e

BOUND_S = 90


def test_an_unknown_job_is_refused_with_the_names_of_existing_ones(
    jobs: Kubectl, holdfast: HoldfastCli
) -> None:
    alone = holdfast("status", "nope")
    assert alone.code == 2 and f"expected a job; namespace {jobs.namespace} has none" in alone.err
    assert f"no jobs in namespace {jobs.namespace}" in holdfast("status").err
    jobs.create(SCRIPT)
    for words in (["status"], ["debug", "events"], ["logs"], ["cancel"], ["delete"]):
        result = holdfast(*words, "nope")
        assert result.code == 2
        assert f"job: got nope; expected one of demo in namespace {jobs.namespace}" in result.err


def test_a_missing_namespace_is_named(jobs: Kubectl, file: Path) -> None:
    holdfast = HoldfastCli(jobs.inside("missing"))
    for words in (["status"], ["status", "demo"], ["run", file]):
        result = holdfast(*words)
        assert result.code == 2
        assert "--namespace: got missing, which does not exist; expected a name" in result.err


def test_a_file_for_another_namespace_is_refused(
    jobs: Kubectl, holdfast: HoldfastCli, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**SCRIPT, "metadata": {"name": "demo", "namespace": "team"}}))
    result = holdfast("run", path)
    assert result.code == 2
    assert f"--namespace: got {jobs.namespace}; expected team, the metadata.namespace" in result.err


@pytest.fixture
def viewer(jobs: Kubectl, own_control_plane: ControlPlane) -> HoldfastCli:
    """A user who may only get jobs."""
    rights = ["--verb=get,list,watch", "--resource=trainingjobs.holdfast.dev"]
    jobs.run("create", "serviceaccount", "viewer")
    jobs.run("create", "role", "viewer", *rights)
    account = f"--serviceaccount={jobs.namespace}:viewer"
    jobs.run("create", "rolebinding", "viewer", "--role=viewer", account)
    token = jobs.run("create", "token", "viewer").strip()
    name = f"viewer-{jobs.namespace}"
    return HoldfastCli(jobs, own_control_plane.write_kubeconfig(name, token=token))


def test_a_viewer_sees_jobs_and_gets_the_missing_right_otherwise(
    jobs: Kubectl, viewer: HoldfastCli, file: Path
) -> None:
    jobs.create(SCRIPT)
    write_status(jobs, trained())
    assert "42 of 100 steps" in viewer("status", "demo").out
    for words, missing in (
        (["suspend", "demo"], "patch trainingjobs"),
        (["resize", "demo", "1"], "patch trainingjobs/scale"),
        (["run", file], "create trainingjobs"),
        (["logs", "demo"], "list pods"),
        (["debug", "events", "demo"], "list events"),
        (["debug", "kill-worker", "demo"], "patch trainingjobs"),
    ):
        result = viewer(*words)
        assert result.code == 2, words
        assert f"missing right: {missing}" in result.err
        assert "Traceback" not in result.err


def test_rejected_credentials_are_reported(jobs: Kubectl, own_control_plane: ControlPlane) -> None:
    """The same as with an expired token: the API server only answers Unauthorized."""
    old = own_control_plane.write_kubeconfig("expired", token="expired")
    result = HoldfastCli(jobs, old)("status")
    assert result.code == 2
    assert "rejected the credentials" in result.err and "log in again" in result.err


def test_an_unreachable_api_server_is_reported(
    jobs: Kubectl, own_control_plane: ControlPlane, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    document = yaml.safe_load(own_control_plane.kubeconfig.read_text())
    port = free_port()
    document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    closed.write_text(yaml.safe_dump(document))
    result = HoldfastCli(jobs, closed)("status")
    assert result.code == 1
    assert f"the API server at https://127.0.0.1:{port} does not answer" in result.err


# -- kubectl ----------------------------------------------------------------------------------
def test_kubectl_runs_the_plugin_with_kubectls_options(
    jobs: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl-holdfast"
    code = "from holdfast.orchestrator.cli.main import kubectl_main; kubectl_main()"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.setenv("KUBECONFIG", str(jobs.kubeconfig))
    jobs.create(SCRIPT)
    bare = [str(jobs.program), "holdfast"]
    for words in (["status", "demo", "-n", jobs.namespace], ["-n", jobs.namespace, "status"]):
        assert run([*bare, *words]).startswith(("demo", "JOB"))
    namespace = ["-n", jobs.namespace]
    assert run([*bare, "status", "demo", "--report", *namespace]).startswith("demo  pending")
    assert run([*bare, "debug", "events", "demo", *namespace]) == ""
    for verb, message in {
        "checkpoint list": "no committed checkpoint",
        "debug kill-worker": "does an operator run?",
    }.items():
        command = [*bare, *verb.split(), "demo", *namespace]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert message in done.stderr


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_hints_of_the_plugin_name_the_plugin(jobs: Kubectl) -> None:
    where = ["--kubeconfig", str(jobs.kubeconfig), "-n", jobs.namespace]
    result = called(plugin, *where, "status", "nope")
    assert result.code == 2
    assert f"see `kubectl holdfast status -n {jobs.namespace}" in result.err
    assert "Usage: kubectl holdfast" in called(plugin, "--help").out


class Plugin:
    """An exec plugin for tokens, in a copy of the kubeconfig."""

    def __init__(self, like: Path, directory: Path) -> None:
        config = yaml.safe_load(like.read_text())
        self.own_token = config["users"][0]["user"].get("token")
        if self.own_token is None:
            pytest.skip("needs a kubeconfig with a token")
        self._token, self._runs = directory / "token", directory / "runs"
        program, self.kubeconfig = directory / "plugin", directory / "kubeconfig"
        version = "client.authentication.k8s.io/v1"
        answer = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": "TOKEN"}}
        program.write_text(
            f"#!/bin/sh\necho run >> {self._runs}\n"
            f"echo '{json.dumps(answer)}' | sed s/TOKEN/$(cat {self._token})/\n"
        )
        program.chmod(0o700)
        exec_ = {"apiVersion": version, "command": str(program), "interactiveMode": "Never"}
        config["users"][0]["user"] = {"exec": exec_}
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def gives(self, token: str) -> None:
        self._token.write_text(token)

    @property
    def num_runs(self) -> int:
        return len(self._runs.read_text().splitlines())


def test_watching_continues_after_the_token_has_expired(
    own_control_plane: ControlPlane, jobs: Kubectl, tmp_path: Path
) -> None:
    """The token expires with the Secret that it is bound to; the watch ends with the API server."""
    plugin = Plugin(jobs.kubeconfig, tmp_path)
    account = f"--serviceaccount={jobs.namespace}:watcher"
    jobs.run("create", "serviceaccount", "watcher")
    jobs.run("create", "rolebinding", "watcher", "--clusterrole=cluster-admin", account)
    jobs.run("create", "secret", "generic", "bound")
    bound = ("--bound-object-kind=Secret", "--bound-object-name=bound")
    plugin.gives(jobs.run("create", "token", "watcher", *bound).strip())
    jobs.create(SCRIPT)
    write_status(jobs, trained(incidents=[], step=7))
    holdfast = HoldfastCli(jobs, plugin.kubeconfig)
    outputs = [tmp_path / "events", tmp_path / "run"]
    watching = [
        holdfast.start(outputs[0], "debug", "events", "demo", "-f"),
        holdfast.start(outputs[1], "attach", "demo"),
    ]
    try:
        for output in outputs:
            until(output.read_text, "first words", timeout_s=BOUND_S)
        before = plugin.num_runs
        jobs.run("delete", "secret", "bound")
        plugin.gives(plugin.own_token)
        own_control_plane.kill_api_server()
        own_control_plane.start_api_server()
        write_status(jobs, trained())
        for output in outputs:
            until(lambda output=output: "worker 1 hangs" in output.read_text(), "the incident",
                  timeout_s=BOUND_S, last=output.read_text)  # fmt: skip
        assert plugin.num_runs >= before + 2, "each command has asked for another token"
        assert [one.poll() for one in watching] == [None, None]
    finally:
        for one in watching:
            one.terminate()
            one.wait(timeout=30)


def test_a_rejected_token_is_reloaded_before_an_error_is_reported(
    jobs: Kubectl, tmp_path: Path
) -> None:
    plugin = Plugin(jobs.kubeconfig, tmp_path)
    plugin.gives("expired")
    jobs.create(SCRIPT)
    holdfast = HoldfastCli(jobs, plugin.kubeconfig)
    refused = holdfast("status", "demo")
    assert refused.code == 2 and "rejected the credentials" in refused.err
    assert plugin.num_runs == 2, "nothing else came the second time either"
    plugin.gives(plugin.own_token)
    assert holdfast("status", "demo").code == 0


async def test_a_replaced_client_certificate_is_used_by_the_same_client(
    own_control_plane: ControlPlane, jobs: Kubectl, tmp_path: Path
) -> None:
    theirs = Authority(tmp_path).sign("ann", "ann", organization="system:masters")
    ours = own_control_plane.authority.sign("ann", "ann", organization="system:masters")
    path = own_control_plane.write_kubeconfig(f"ann-{jobs.namespace}", pair=theirs)
    async with await KubeClient.connect(kubeconfig=path) as cluster:
        with pytest.raises(NotAuthenticated):
            await cluster.list_all(JOBS, jobs.namespace)
        own_control_plane.write_kubeconfig(f"ann-{jobs.namespace}", pair=ours)
        assert (await cluster.list_all(JOBS, jobs.namespace))[0] == []
