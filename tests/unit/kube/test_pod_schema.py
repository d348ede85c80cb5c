"""The CRD has the schema of a pod, so that the API server refuses a misspelt field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.orchestrator.kube.pod_schema import definition, pod_template_schema

ANNOTATION_BYTES = 256 * 1024
"""Client-side `kubectl apply` keeps the whole object in an annotation."""


def unknown(schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Fields that strict validation rejects."""
    if value is None or "type" not in schema:
        return
    if schema["type"] == "array":
        for number, item in enumerate(value):
            yield from unknown(schema["items"], item, f"{path}[{number}]")
    elif schema["type"] == "object" and "properties" in schema:
        for name, child in value.items():
            if name not in schema["properties"]:
                yield f"{path}.{name}".lstrip(".")
            else:
                yield from unknown(schema["properties"][name], child, f"{path}.{name}")


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"spec": {"tolerationz": []}}, "spec.tolerationz"),
        ({"spec": {"containers": [{"name": "worker", "volumeMount": []}]}},
         "spec.containers[0].volumeMount"),
        ({"spec": {"affinity": {"nodeAffinities": {}}}}, "spec.affinity.nodeAffinities"),
        ({"metadata": {"finalizers": []}}, "metadata.finalizers"),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_unknown_to_the_api_server(template: dict[str, Any], path: str) -> None:
    assert list(unknown(pod_template_schema(), template)) == [path]


def test_parts_of_a_pod_and_nulls_are_known() -> None:
    worker = {
        "name": "worker", "securityContext": None, "env": [{"name": "A"}],
        "resources": {"limits": {"nvidia.com/gpu": 8, "cpu": 0.5}, "claims": [{"name": "gpu"}]},
        "livenessProbe": {"httpGet": {"port": 8080}},
    }  # fmt: skip
    volume = {"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
    spec = {"containers": [worker], "volumes": [volume], "nodeSelector": {"any": "thing"}}
    template = {"metadata": {"annotations": {"any": "thing"}}, "spec": spec}
    assert list(unknown(pod_template_schema(), template)) == []


def test_every_node_of_the_template_may_be_null_and_is_structural() -> None:
    def check(node: dict[str, Any], path: str) -> None:
        if path:
            assert node.get("nullable") is True, path
        structural = "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"
        assert "type" in node or any(name in node for name in structural), path
        for name, child in node.get("properties", {}).items():
            check(child, f"{path}.{name}")
        if "items" in node:
            check(node["items"], f"{path}[]")

    check(pod_template_schema(), "")


def test_no_key_of_the_definition_is_a_directive_of_a_merge_patch() -> None:
    """helm and client-side `kubectl apply` send the CRD as a strategic merge patch, in which a key
    such as $patch, $retainKeys or $setElementOrder/env removes or orders what is beside it."""

    def keys(node: Any, path: str = "") -> Iterator[str]:
        for key, child in node.items() if isinstance(node, dict) else ():
            yield f"{path}.{key}"
            yield from keys(child, f"{path}.{key}")
        for child in node if isinstance(node, list) else ():
            yield from keys(child, path)

    assert [path for path in keys(definition()) if path.rpartition(".")[2].startswith("$")] == []


def test_the_definition_fits_into_the_annotation_of_kubectl_apply() -> None:
    text = json.dumps(definition(), separators=(",", ":"))
    assert len(text) < 0.8 * ANNOTATION_BYTES
    assert not re.search(r'"\\$ref"', text)
