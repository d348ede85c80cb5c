"""The KubeRay manifests on a real API server with KubeRay's CRDs: CEL rules and strict
validation, beyond the unit tests. KubeRay itself does not run."""

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
    """A CRD of KubeRay in the version that the manifests use."""
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
    """A namespace of a cluster with KubeRay's CRDs."""
    schemas = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    definitions = [definition(kind, schema) for kind, schema in schemas.items()]
    kubectl = control_plane.kubectl()
    for one in definitions:
        name = one["metadata"]["name"]
        if kubectl.get("crd", name) is None:  # an existing cluster may have them
            kubectl.apply(one)
        kubectl.served(name)
    yield from fresh(kubectl)


def tried(kubectl: Kubectl, document: Document) -> CompletedProcess[str]:
    return kubectl.attempt(*TRY, stdin=yaml.safe_dump(document))


def cluster_of(document: Document) -> Document:
    spec: Document = document["spec"]
    return dict(spec.get("rayClusterSpec", spec))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_accepted_unchanged(kuberay: Kubectl, manifest: Path) -> None:
    document = yaml.safe_load(manifest.read_text())
    done = tried(kuberay, document)
    assert done.returncode == 0 and "server dry run" in done.stdout, done.stderr
    assert not done.stderr, "warnings"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_the_pods_of_a_manifest_are_valid(kuberay: Kubectl, manifest: Path) -> None:
    """The CRDs do not check references, such as a mount to its volume."""
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
    ("wrong", "message"),
    [
        ({"managedBy": "other"}, "the managedBy field value must be either"),
        ({"workerGroups": []}, 'unknown field "spec.workerGroups"'),
        ({"autoscalerOptions": {"version": "v3"}}, 'supported values: "v1", "v2"'),
    ],
    ids=["rule", "field", "value"],
)
def test_what_kuberay_refuses_is_refused(kuberay: Kubectl, wrong: Document, message: str) -> None:
    (manifest,) = (path for path in MANIFESTS if path.stem == "raycluster")
    document = yaml.safe_load(manifest.read_text())
    document["spec"] |= wrong
    done = tried(kuberay, document)
    assert done.returncode != 0 and message in done.stderr, done.stderr
