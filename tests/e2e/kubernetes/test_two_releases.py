"""Two releases of the chart in one cluster, each for its own namespaces.

On a separate control plane, because a policy holds for the whole cluster. No operator runs; the
test writes in its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helm import render
from tests.e2e.kubernetes.conftest import skip_without
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.kubernetes.test_chart import Helm, rendered
from tests.unit.api.wrong_jobs import SCRIPT, job

pytestmark = pytest.mark.e2e

TEAMS = {"team-a": "operators-a", "team-b": "operators-b"}
"""Namespace of jobs -> namespace of the release that watches it."""
PATCH = ("patch", "tj", "right", "--subresource=status", "--type=merge", "--patch")


def operator_of(team: str) -> str:
    return f"system:serviceaccount:{TEAMS[team]}:holdfast-operator"


@pytest.fixture(scope="module")
def teams(
    binaries: programs.Binaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Kubectl]]:
    """kubectl in each namespace of jobs."""
    skip_without(binaries, (*programs.CONTROL_PLANE, "helm"))
    with Run() as run:
        plane = ControlPlane(run, binaries)
        plane.start()
        directory = tmp_path_factory.mktemp("helm")
        helm = Helm(binaries.path("helm"), directory, plane.kubeconfig)
        kubectl = plane.kubectl()
        for number, (team, operators) in enumerate(TEAMS.items()):
            kubectl.run("create", "namespace", team)
            values = (f"watchNamespaces={{{team}}}", f"crds.install={number == 0}".lower())
            helm.run(
                "install", "holdfast", str(render.CHART), "--create-namespace", "--namespace",
                operators, *(word for value in values for word in ("--set", value)),
            )  # fmt: skip
            kubectl.served("trainingjobs.holdfast.dev")
        found = {team: plane.kubectl(team) for team in TEAMS}
        for one in found.values():
            one.create(job(SCRIPT))
        yield found


def refusal(kubectl: Kubectl, *words: str) -> str:
    """The error; empty if it was accepted."""
    return kubectl.attempt(*words).stderr


def test_the_policies_of_a_release_hold_in_the_namespaces_that_it_watches(
    binaries: programs.Binaries, tmp_path: Path
) -> None:
    """Policies hold in all namespaces if the release watches all. The one for the operator itself
    always holds in all."""
    skip_without(binaries, ("helm",))
    chart = Helm(binaries.path("helm"), tmp_path)
    here = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}
    some = (["--set", "watchNamespaces={a,b}"], {"matchExpressions": [here]})
    for options, selector in (some, ([], None)):
        policies = [
            document["spec"]["matchConstraints"].get("namespaceSelector")
            for document in rendered(chart, *options)
            if document["kind"] == "ValidatingAdmissionPolicy"
        ]
        assert policies == [selector, selector, None]


def test_only_its_operator_writes_the_status_of_a_job(
    teams: dict[str, Kubectl],
) -> None:
    for team, kubectl in teams.items():
        text = f"status: got a change by admin; expected one by {operator_of(team)}"
        until(
            lambda kubectl=kubectl, text=text: text in refusal(kubectl, *PATCH, '{"status":{}}'),
            "the policy to hold", timeout_s=60,
        )  # fmt: skip
    for team, kubectl in teams.items():
        kubectl.run(*PATCH, '{"status":{"state":"running"}}', f"--as={operator_of(team)}")
        (other,) = TEAMS.keys() - {team}
        text = refusal(kubectl, *PATCH, '{"status":{"state":"x"}}', f"--as={operator_of(other)}")
        assert 'resource "trainingjobs/status"' in text, "it has no right to"
        found: Any = kubectl.get("tj", "right")
        assert found["status"]["state"] == "running"


def test_the_rules_of_each_release_hold_in_its_namespaces(teams: dict[str, Kubectl]) -> None:
    for kubectl in teams.values():
        text = refusal(kubectl, "annotate", "tj", "right", "holdfast.dev/cancle=me")
        assert "metadata.annotations: got holdfast.dev/cancle; expected one of" in text
