"""The manifests for KubeRay on a real API server that knows KubeRay's kinds: its rules (CEL) and
strictness, beyond what the unit tests read out of the same schema.

Owns these tests. KubeRay itself does not run: what it makes of a manifest is not seen here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from tests.e2e.kubernetes.conftest import fresh
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.existing_cluster import GivenCluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.unit.backends.kubernetes.test_kuberay import MANIFESTS, SCHEMA

pytestmark = pytest.mark.e2e

Document = dict[str, Any]
TRY = ("create", "--dry-run=server", "--validate=strict", "--filename=-")
"""dryRun=All and fieldValidation=Strict."""


def definition(kind: str, schema: Document) -> Document:
    """As KubeRay names it; of its versions the one that the manifests use."""
    singular = kind.lower()
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{singular}s.ray.io"},
        "spec": {
            "group": "ray.io",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": f"{singular}s",
                "singular": singular,
            },
            "scope": "Namespaced",
            "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
        },
    }


@pytest.fixture(scope="module")
def kuberay(control_plane: ControlPlane | GivenCluster) -> Iterator[Kubectl]:
    """A namespace of a cluster that knows RayClusters and RayJobs."""
    schemas = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    definitions = [definition(kind, schema) for kind, schema in schemas.items()]
    kubectl = control_plane.kubectl()
    for one in definitions:
        name = one["metadata"]["name"]
        if kubectl.get("crd", name) is None:  # a cluster of somebody's may have KubeRay's own
            kubectl.apply(one)
        kubectl.served(name)
    yield from fresh(kubectl)


def tried(kubectl: Kubectl, document: Document) -> CompletedProcess[str]:
    return kubectl.attempt(*TRY, stdin=yaml.safe_dump(document))


def cluster_of(document: Document) -> Document:
    spec: Document = document["spec"]
    return dict(spec.get("rayClusterSpec", spec))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_taken_as_it_is(kuberay: Kubectl, manifest: Path) -> None:
    document = yaml.safe_load(manifest.read_text())
    done = tried(kuberay, document)
    assert done.returncode == 0 and "server dry run" in done.stdout, done.stderr
    assert not done.stderr, "warnings"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_the_pods_of_a_manifest_are_such_as_kubernetes_takes(
    kuberay: Kubectl, manifest: Path
) -> None:
    """The definitions say nothing of what belongs together, such as a mount and its volume."""
    cluster = cluster_of(yaml.safe_load(manifest.read_text()))
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        name = group.get("groupName", "head")
        template = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": name},
            "template": group["template"],
        }
        done = tried(kuberay, template)
        assert done.returncode == 0, f"{name}: {done.stderr}"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"managedBy": "somebody"}, "the managedBy field value must be either"),
        ({"workerGroups": []}, 'unknown field "spec.workerGroups"'),
        ({"autoscalerOptions": {"version": "v3"}}, 'supported values: "v1", "v2"'),
    ],
    ids=["rule", "field", "value"],
)
def test_what_kuberay_would_refuse_is_refused(kuberay: Kubectl, wrong: Document, told: str) -> None:
    (manifest,) = (path for path in MANIFESTS if path.stem == "raycluster")
    document = yaml.safe_load(manifest.read_text())
    document["spec"] |= wrong
    done = tried(kuberay, document)
    assert done.returncode != 0 and told in done.stderr, done.stderr
