"""The rights that the chart gives to the operator suffice.

On a control plane without nodes, so that pods stay unschedulable. Jobs on nodes are tested
elsewhere, with all rights.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm import render
from holdfast.orchestrator.cli.targets.kubernetes.target import KubernetesTarget
from tests.e2e.kubernetes.conftest import skip_without
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.control_plane import LOOPBACK, ControlPlane
from tests.e2e.kubernetes.rig.kubectl import Kubectl, condition
from tests.e2e.kubernetes.rig.process import Server
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.ports import free_port
from tests.unit.api.wrong_jobs import SCRIPT, job
from tests.unit.runtime.observe.test_notifications import SECRET, Hook, hook
from tests.unit.ui.views import served

pytestmark = pytest.mark.e2e

TEAM, OTHERS = "team", "others"
MODES = {"cluster-wide": [], "namespaced": ["--set", f"watchNamespaces={{{TEAM}}}"]}


class Installed:
    """A control plane with the chart, and its operator as a process."""

    hook: Hook  # of a job whose nodes never come

    def __init__(self, plane: ControlPlane, server: Server, ports: list[int]) -> None:
        self.plane, self.server, self._ports = plane, server, ports
        self.team, self.others = plane.kubectl(TEAM), plane.kubectl(OTHERS)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{self._ports[1]}{path}") as reply:
            return str(reply.read().decode())

    def leads(self) -> bool:
        try:
            return "holdfast_operator_leader 1.0" in self.get("/metrics")
        except OSError:
            return False


@pytest.fixture(scope="module", params=MODES)
def installed(
    request: pytest.FixtureRequest, binaries: programs.Binaries, tmp_path_factory: Any
) -> Iterator[Installed]:
    skip_without(binaries, (*programs.CONTROL_PLANE, "helm"))
    with Run() as run:
        plane = ControlPlane(run, binaries)
        plane.start()
        kubectl = plane.kubectl()
        for name in (render.NAMESPACE, TEAM, OTHERS):
            kubectl.run("create", "namespace", name)
        # Pods of jobs have to satisfy the restricted standard.
        kubectl.run("label", "namespace", TEAM, "pod-security.kubernetes.io/enforce=restricted")
        options = [*MODES[request.param], "--set", f"notify.allowedHosts={{{LOOPBACK}}}"]
        chart = render.template(binaries.path("helm"), "--skip-tests", *options)
        kubectl.run("apply", "--server-side", "--filename=-", stdin=chart)
        kubectl.served("trainingjobs.holdfast.dev")
        account = ("holdfast-operator", f"--namespace={render.NAMESPACE}")
        token = kubectl.run("create", "token", *account).strip()
        config = plane.write_kubeconfig("operator", token=token)
        ports = free_port(), free_port()
        checkpoints = tmp_path_factory.mktemp("checkpoints")
        server = Server(run, "operator", command(ports, checkpoints, chart),
                        environment={"KUBECONFIG": str(config)})  # fmt: skip
        installed = Installed(plane, server, ports)
        server.start()
        server.wait_ready(installed.leads, timeout_s=30)
        with hook() as installed.hook:
            url = f"--from-literal=url={installed.hook.url()}"
            installed.team.run("create", "secret", "generic", "hook", url)
            wanted = {"secret": {"name": "hook", "key": "url"}, "when": ["waiting"]}
            notify = [{**wanted, "format": "json"}]
            installed.team.create(job({**SCRIPT, "notify": notify}, "waits"))
            yield installed


def command(ports: list[int], checkpoints: Path, chart: str) -> list[str]:
    """The command of the chart's Deployment, with addresses of this machine."""
    documents = [document for document in yaml.safe_load_all(chart) if document]
    (deployment,) = [document for document in documents if document["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    replaced = ("--agent-endpoint", "--metrics-port")
    return [
        str(Path(sys.executable).parent / "holdfast"),
        *(word for word in container["args"] if not word.startswith(replaced)),
        f"--agent-endpoint={LOOPBACK}:{ports[0]}",
        f"--listen={LOOPBACK}:{ports[0]}",
        f"--metrics-address={LOOPBACK}",
        f"--metrics-port={ports[1]}",
        f"--checkpoint-root={checkpoints}",
        "--log-format=text",
        "--status-interval-seconds=0.5",
    ]


def status(kubectl: Kubectl, name: str) -> dict[str, Any]:
    found: dict[str, Any] = (kubectl.get("tj", name) or {}).get("status") or {}
    return found


def reaches(kubectl: Kubectl, name: str, state: str) -> None:
    until(
        lambda: status(kubectl, name).get("state") == state,
        f"{name} to be {state}",
        timeout_s=60,
        last=lambda: status(kubectl, name),
    )


def pods(kubectl: Kubectl, name: str) -> int:
    return len(kubectl.list("pods", f"holdfast.dev/job={name},holdfast.dev/role=node"))


def test_the_whole_life_of_a_job_needs_no_other_rights(installed: Installed) -> None:
    team = installed.team
    spec = {**SCRIPT, "nodes": {"min": 1, "max": 3, "spares": 1}, "ttlSecondsAfterFinished": 1}
    team.create(job(spec, "life"))
    until(lambda: pods(team, "life") == 4, "pods of three nodes and a spare", timeout_s=60)
    until(
        lambda: "the scheduler finds no node" in yaml.safe_dump(status(team, "life"), width=9999),
        "the scheduler's words in the status", timeout_s=60, last=lambda: status(team, "life"),
    )  # fmt: skip
    assert condition(team.get("tj", "life"), "Ready") == "False"
    for kind, name in (("secret", "life-agents"), ("configmap", "life-journal")):
        found = team.get(kind, name)
        assert found is not None and found["metadata"]["ownerReferences"][0]["name"] == "life"
    change = '{"spec": {"nodes": {"spares": 2}, "recovery": {"badNodeStrikes": 5}}}'
    team.run("patch", "tj", "life", "--type=merge", "--patch", change)
    until(lambda: pods(team, "life") == 5, "one more spare", timeout_s=60)
    team.run("scale", "tj/life", "--replicas=1")
    until(lambda: pods(team, "life") == 3, "the surplus pods to go", timeout_s=60)
    until(lambda: status(team, "life")["nodes"]["desired"] == 1, "the new size", timeout_s=60)
    team.run("annotate", "tj", "life", 'holdfast.dev/request={"verb":"checkpoint"}')
    until(
        lambda: "holdfast.dev/request" not in team.json("get", "tj", "life")["metadata"].get(
            "annotations", {}
        ),
        "the annotation to be taken away", timeout_s=60,
    )  # fmt: skip
    team.run("patch", "tj", "life", "--type=merge", '--patch={"spec":{"suspend":true}}')
    reaches(team, "life", "suspended")
    until(lambda: pods(team, "life") == 0, "all pods to go", timeout_s=60)
    team.run("delete", "secret", "life-agents")
    team.run("patch", "tj", "life", "--type=merge", '--patch={"spec":{"suspend":false}}')
    until(lambda: pods(team, "life") > 0, "new pods", timeout_s=60)
    assert team.get("secret", "life-agents") is not None
    events = team.run("get", "events", "--field-selector=involvedObject.name=life")
    assert "Resize" in events and "Suspend" in events and "Adjust" in events
    team.run("annotate", "tj", "life", "holdfast.dev/cancel=me")
    until(lambda: team.get("tj", "life") is None, "the job to expire", timeout_s=60)
    until(lambda: team.get("secret", "life-agents") is None, "its keys to go", timeout_s=60)


def test_the_page_has_no_button_for_what_its_reader_may_not_do(installed: Installed) -> None:
    team = installed.team
    for name, rules in {
        "reader": ["--verb=get,list", "--resource=trainingjobs.holdfast.dev,pods"],
        "scaler": ["--verb=patch", "--resource=trainingjobs.holdfast.dev/scale"],
    }.items():
        team.run("create", "serviceaccount", name)
        team.run("create", "role", name, *rules)
    for name, roles in {"reader": ["reader"], "scaler": ["reader", "scaler"]}.items():
        for role in roles:
            binding = (f"{name}-{role}", f"--role={role}", f"--serviceaccount={TEAM}:{name}")
            team.run("create", "rolebinding", *binding)
    team.create(job(SCRIPT, "read"))
    until(lambda: pods(team, "read") == 1, "a pod", timeout_s=60)
    buttons = {}
    for name in ("reader", "scaler", "admin"):
        token = None if name == "admin" else team.run("create", "token", name).strip()
        kubeconfig = (
            installed.plane.write_kubeconfig(name, token=token) if token else team.kubeconfig
        )
        with served(KubernetesTarget(TEAM, None, kubeconfig)) as page:
            html = page.text("/jobs/read")
            buttons[name] = re.findall('data-dialog="do-(.*?)"', html)
            if name == "reader":
                assert "patch trainingjobs, patch trainingjobs/scale" in html
                answer = page.ask("POST", "/jobs/read/cancel", Origin=page.url)
                assert answer.status == 409 and b"missing right: patch" in answer.read()
    assert buttons == {
        "reader": [], "scaler": ["resize"], "admin": ["suspend", "resize", "cancel"]
    }  # fmt: skip
    team.run("delete", "tj", "read")


def test_a_missing_gang_system_is_reported_without_missing_rights(installed: Installed) -> None:
    name = "with-kueue"
    installed.team.create(job({**SCRIPT, "queue": "q", "kubernetes": {"gang": "kueue"}}, name))
    until(
        lambda: "does not serve" in str(status(installed.team, name)),
        "the message", timeout_s=60, last=lambda: status(installed.team, name),
    )  # fmt: skip
    assert "orbidden" not in str(status(installed.team, name))
    installed.team.run("delete", "tj", name)


def test_jobs_of_other_namespaces_are_ignored_in_namespaced_mode(installed: Installed) -> None:
    installed.others.create(job(SCRIPT, "far"))
    installed.team.create(job(SCRIPT, "near"))
    until(lambda: pods(installed.team, "near") == 1, "the near job's pod", timeout_s=60)
    watched = "--namespace=team" not in " ".join(arguments(installed.server.pid))
    if watched:
        until(lambda: pods(installed.others, "far") == 1, "the far job's pod", timeout_s=60)
    else:
        assert status(installed.others, "far") == {}
    for kubectl, name in ((installed.team, "near"), (installed.others, "far")):
        kubectl.run("delete", "tj", name)


def test_a_message_goes_to_the_address_in_a_secret_and_nothing_else_has_it(
    installed: Installed,
) -> None:
    """The job waits for nodes; other tests run in the minute until it sends that."""
    team, server = installed.team, installed.hook
    until(lambda: server.what() == ["waiting"], "the message", timeout_s=120)
    (message,) = server.got
    assert message["job"] == f"{TEAM}/waits" and "0 of 1 ready" in message["reason"]
    assert message["command"] == f"holdfast status waits --kubernetes -n {TEAM}"
    printed = team.run("get", "tj,events,configmaps", "--output=yaml")
    assert SECRET not in printed + installed.server.log.read_text()
    team.run("delete", "tj", "waits")


def arguments(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_no_request_was_forbidden(installed: Installed) -> None:
    """Runs last, over the log of the tests above."""
    log = installed.server.log.read_text()
    assert "leading" in log
    texts = ("orbidden", "missing right")
    refused = [line for line in log.splitlines() if any(one in line for one in texts)]
    assert refused == []
    assert installed.get("/healthz") == "ok\n"
    assert installed.get("/readyz") == "ok\n"
