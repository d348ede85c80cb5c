"""Manifests for KubeRay against its schema (v1.7.0, Apache-2.0; descriptions left out)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.ray import placement, ray_nodes

ROOT = Path(__file__).resolve().parents[4]
SCHEMA = Path(__file__).with_name("kuberay-v1.7.0.json.gz")
MANIFESTS = sorted((ROOT / "manifests" / "kuberay").glob("*.yaml"))


def strict(node: Any) -> Any:
    """A JSON schema with unknown fields as errors: the API server would drop them silently."""
    if isinstance(node, list):
        return [strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {key: strict(value) for key, value in node.items() if not key.startswith("x-")}
    if node.get("x-kubernetes-int-or-string"):
        found |= {"anyOf": [{"type": "integer"}, {"type": "string"}]}
        found.pop("type", None)
    open_ended = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
    if isinstance(node.get("properties"), dict) and node.get("type") == "object" and not open_ended:
        found["additionalProperties"] = False
    if found.get("format") in ("int32", "int64"):
        found.pop("format")
    return found


def errors(document: dict[str, Any]) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with ray[default]")
    schema = strict(json.loads(gzip.decompress(SCHEMA.read_bytes()))[document["kind"]])
    schema["properties"]["metadata"] = {"type": "object"}
    checker = jsonschema.Draft7Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in checker.iter_errors(document)]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_valid_for_kuberay(manifest: Path) -> None:
    (document,) = yaml.safe_load_all(manifest.read_text())
    assert errors(document) == []


def test_there_is_a_manifest_of_each_kind() -> None:
    kinds = {yaml.safe_load(path.read_text())["kind"] for path in MANIFESTS}
    assert kinds == {"RayCluster", "RayJob"}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_every_cluster_demands_a_token(manifest: Path) -> None:
    spec = yaml.safe_load(manifest.read_text())["spec"]
    assert spec.get("rayClusterSpec", spec)["authOptions"] == {"mode": "token"}


def test_a_misspelt_field_is_an_error() -> None:
    document = yaml.safe_load((ROOT / "manifests/kuberay/rayjob.yaml").read_text())
    document["spec"]["rayClusterSpec"]["workerGroupSpec"] = []
    (error,) = errors(document)
    assert "workerGroupSpec" in error


def test_a_failed_ray_job_keeps_its_cluster() -> None:
    """Ray reports FAILED also when only the Ray job's process was lost; training continues."""
    spec = yaml.safe_load((ROOT / "manifests" / "kuberay" / "rayjob.yaml").read_text())["spec"]
    assert not spec.get("shutdownAfterJobFinishes"), "KubeRay would delete the cluster at FAILED"
    (rule,) = spec["deletionStrategy"]["deletionRules"]
    assert rule["policy"] == "DeleteCluster"
    assert rule["condition"]["jobStatus"] == "SUCCEEDED"


def test_the_gpu_cluster_outlives_its_head_and_reaches_its_checkpoints() -> None:
    text = (ROOT / "manifests" / "kuberay" / "raycluster-gpu.yaml").read_text()
    spec = yaml.safe_load(text)["spec"]
    assert spec["gcsFaultToleranceOptions"]["redisAddress"]
    (workers,) = spec["workerGroupSpecs"]
    for group in (spec["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "checkpoints"}}]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_the_job_that_the_gpu_cluster_describes_fits_it() -> None:
    text = (ROOT / "manifests" / "kuberay" / "raycluster-gpu.yaml").read_text()
    lines = text.partition("# A job for it:\n")[2].partition("# For the image")[0].splitlines()
    document = yaml.safe_load("\n".join(line.removeprefix("#   ") for line in lines))
    document["spec"]["entrypoint"] = {"script": "train.py"}
    job = job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "job"},
            **document,
        }
    )
    (workers,) = yaml.safe_load(text)["spec"]["workerGroupSpecs"]
    ray_node = {
        "Resources": {"CPU": 96.0, "GPU": 8.0, "accelerator_type:H100": 1.0},
        "Labels": workers["labels"],
    }
    assert ray_nodes.suits(placement.bundle_of(job), job.spec.ray.label_selector, ray_node)
