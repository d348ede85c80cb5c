"""Queues against the published CRDs of Kueue, and the examples of docs/operations/queues.md.

An API server validates strictly against the CRDs (published/get.py). Kueue does not run.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.api.v1alpha1.crd import NAME
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings, pod_document
from holdfast.orchestrator.backends.kubernetes.queues.admission import Admission
from holdfast.orchestrator.backends.kubernetes.queues.selection import problems
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.kube.pod_schema import definition_text
from tests.e2e.kubernetes.published import get as published
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.existing_cluster import GivenCluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.unit.api.wrong_jobs import job, script

pytestmark = pytest.mark.e2e

Document = dict[str, Any]
Plane = ControlPlane | GivenCluster
ROOT = Path(__file__).parents[3]
SETTINGS = PodSettings(endpoint="operator:7077", image="worker:1")


def training_job(gang: str, name: str = "llm", **spec: Any) -> TrainingJob:
    fields = {"nodes": {"min": 2, "max": 4}, "resources": {"cpu": 0.5, "memory": "1Gi"}} | spec
    document = script(**fields)
    document["kubernetes"] = {**fields.get("kubernetes", {}), "gang": gang}
    return job_from_mapping(job(document, name))


async def ensure(plane: Plane, wanted: TrainingJob, owner: Owner) -> None:
    async with await KubeClient.connect(kubeconfig=plane.kubeconfig) as cluster:
        queue = Admission(wanted, owner, cluster)
        await queue.ensure({})


def complaint(plane: Plane, wanted: TrainingJob, namespace: str = "default") -> str:
    """The error for the user, or empty."""
    try:
        asyncio.run(ensure(plane, wanted, Owner(namespace, "llm", "none")))
    except UserError as error:
        return str(error)
    except HoldfastError:
        return ""
    return ""


@pytest.fixture(scope="module")
def complaints(control_plane: Plane) -> dict[str, str]:
    """Gang system -> error before its CRDs are installed."""
    gangs = ("kueue", "native")
    return {gang: complaint(control_plane, training_job(gang, queue="a")) for gang in gangs}


@pytest.fixture(scope="module")
def systems(control_plane: Plane, complaints: dict[str, str]) -> Kubectl:
    """A cluster with the CRD and all published CRDs."""
    if refusal := published.refusal():
        pytest.skip(refusal)
    kubectl = control_plane.kubectl()
    kubectl.run("apply", "--server-side", "--filename=-", stdin=definition_text())
    for pin in published.PINS:
        for file in published.files(pin):
            kubectl.run("apply", "--server-side", "--filename", str(file))
    kubectl.served(*(one["metadata"]["name"] for one in kubectl.json("get", "crd")["items"]))
    kubectl.run("get", "crd", NAME)
    return kubectl


@pytest.fixture
def owner(systems: Kubectl, namespace: Kubectl) -> Owner:
    """A TrainingJob as an owner."""
    made = namespace.create(job(script(), "llm"))
    return Owner(namespace.namespace, "llm", made["metadata"]["uid"])


@pytest.mark.parametrize("gang", ["kueue", "native"])
def test_a_missing_system_is_reported_with_the_fix(
    complaints: dict[str, str], control_plane: Plane, gang: str
) -> None:
    if isinstance(control_plane, GivenCluster):
        pytest.skip("what a given cluster serves is not known")
    text = complaints[gang]
    assert text.startswith("spec.kubernetes.gang: ")
    assert "was chosen, but the cluster does not serve" in text
    assert "choose another spec.kubernetes.gang" in text


def test_a_decorated_pod_is_valid(systems: Kubectl, namespace: Kubectl, owner: Owner) -> None:
    wanted = training_job("kueue", queue="team-a", kubernetes={"priorityClassName": None})
    pod = Admission(wanted, owner, cluster=None).decorate(  # type: ignore[arg-type]
        pod_document(wanted, owner, SETTINGS, "llm-x"), {}
    )
    words = ("create", "--validate=strict", "--filename=-", "--output=json")
    stored = json.loads(namespace.run(*words, stdin=yaml.safe_dump(pod)))
    for part in ("labels", "annotations"):
        assert pod["metadata"][part].items() <= stored["metadata"].get(part, {}).items()
    waiting = namespace.wait("pod", "llm-x", is_gated, "is behind its gate")
    assert waiting["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]


def is_gated(pod: Document | None) -> bool:
    conditions = ((pod or {}).get("status") or {}).get("conditions") or ()
    return any(one.get("reason") == "SchedulingGated" for one in conditions)


def test_a_missing_queue_is_named_with_the_existing_ones(
    systems: Kubectl, control_plane: Plane, namespace: Kubectl
) -> None:
    wanted = training_job("kueue", queue="team-b")
    text = complaint(control_plane, wanted, namespace.namespace)
    assert f"got team-b; expected a LocalQueue of namespace {namespace.namespace}" in text
    assert "(existing: none)" in text
    local = next(one for one in documents() if one["kind"] == "LocalQueue")
    namespace.create(local)
    assert "(existing: team-a)" in complaint(control_plane, wanted, namespace.namespace)
    assert not complaint(control_plane, training_job("kueue", queue="team-a"), namespace.namespace)


# -- the page ----------------------------------------------------------------------------------
def documents() -> Iterator[Document]:
    """The documents of docs/operations/queues.md."""
    text = (ROOT / "docs/operations/queues.md").read_text()
    for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL):
        yield from yaml.safe_load_all(block)


@pytest.mark.parametrize(
    "document", list(documents()), ids=lambda d: f"{d['kind']}-{d['metadata']['name']}"
)
def test_an_example_of_the_page_applies_unchanged(
    systems: Kubectl, namespace: Kubectl, document: Document
) -> None:
    text = yaml.safe_dump(document)
    words = ("apply", "--server-side", "--validate=strict", "--dry-run=server", "--filename=-")
    namespace.run(*words, stdin=text)
    if document["kind"] == "TrainingJob":
        assert problems(job_from_mapping(document)) == []


def test_the_page_has_an_example_of_each_gang() -> None:
    gangs = {
        one["spec"].get("kubernetes", {}).get("gang", "none")
        for one in documents()
        if one["kind"] == "TrainingJob"
    }
    assert gangs == {"none", "kueue", "native"}


def test_the_name_of_another_manager_is_kept_and_validated(
    systems: Kubectl, namespace: Kubectl
) -> None:
    namespace.create(job(script(managedBy="kueue.x-k8s.io/multikueue"), "other"))
    stored = namespace.get(f"{JOBS.plural}.{JOBS.group}", "other")
    assert stored is not None
    assert stored["spec"]["managedBy"] == "kueue.x-k8s.io/multikueue"
    done = namespace.attempt(
        "create",
        "--filename=-",
        stdin=yaml.safe_dump(job(script(managedBy="unqualified"), "wrong")),
    )
    assert "spec.managedBy" in done.stderr
