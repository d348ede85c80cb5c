"""The CustomResourceDefinition of a TrainingJob with the schema of its pod template, as YAML."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.api.v1alpha1.crd import definition as open_definition
from holdfast.orchestrator.api.v1alpha1.load import yaml_text

from .pod_schema import pod_template_schema


def definition() -> dict[str, Any]:
    """Ready for `kubectl apply`: misspelt fields of spec.kubernetes.podTemplate are refused."""
    made = open_definition()
    (version,) = made["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    kubernetes = spec["kubernetes"]["properties"]
    text = kubernetes["podTemplate"]["description"]
    kubernetes["podTemplate"] = {"description": text, **pod_template_schema()}
    return made


def definition_text() -> str:
    """The definition with a header line that names its source."""
    head = "# Generated from api/v1alpha1 by `holdfast spec schema --crd`; do not edit.\n"
    return head + yaml_text(definition())
