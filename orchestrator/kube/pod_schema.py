"""The structural schema of a pod template, from the client library's models of the Kubernetes API.

A template is a part of a pod, so no field is required, and each may be null, which removes the key
from the pod that Holdfast makes. A field that the library lacks is unknown: `kubectl apply` refuses
it (strict field validation), other clients get a warning. There are no descriptions: with them the
CRD would exceed what an object's annotation can hold.
"""

from __future__ import annotations

import re
from typing import Any

from kubernetes.aio import client as library

from ..api.v1alpha1.crd import definition as open_definition
from ..api.v1alpha1.load import yaml_text
from .pod_fields import ROOTS

Node = dict[str, Any]

INT_OR_STRING: Node = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "nullable": True,
}
ANYTHING: Node = {"x-kubernetes-preserve-unknown-fields": True, "nullable": True}
QUANTITIES = {
    ("V1ResourceRequirements", "limits"),
    ("V1ResourceRequirements", "requests"),
    ("V1VolumeResourceRequirements", "limits"),
    ("V1VolumeResourceRequirements", "requests"),
    ("V1PodSpec", "overhead"),
    ("V1EmptyDirVolumeSource", "size_limit"),
    ("V1ResourceFieldSelector", "divisor"),
}
"""The library calls quantities texts; the API accepts numbers, too, such as 0.5."""
SERVER_FIELDS = (
    ("metadata", "managedFields"), ("metadata", "ownerReferences"), ("metadata", "finalizers"),
    ("spec", "ephemeralContainers"),
)  # fmt: skip
"""Fields that a template cannot set: the API server rejects a new pod with ephemeral containers."""
_SIMPLE = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def definition() -> dict[str, Any]:
    """Ready for `kubectl apply`: misspelt fields of spec.kubernetes.podTemplate are refused."""
    document = open_definition()
    (version,) = document["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    kubernetes = spec["kubernetes"]["properties"]
    text = kubernetes["podTemplate"]["description"]
    kubernetes["podTemplate"] = {"description": text, **pod_template_schema()}
    return document


def definition_text() -> str:
    """The definition with a header line that names its source."""
    head = "# Generated from api/v1alpha1 by `holdfast spec schema --crd`; do not edit.\n"
    return head + yaml_text(definition())


def pod_template_schema() -> Node:
    """Schema of `metadata` and `spec`."""
    properties = {name: _object(model) for name, model in ROOTS.items()}
    for part, name in SERVER_FIELDS:
        del properties[part]["properties"][name]
    return {"type": "object", "properties": properties}


def _object(model: str) -> Node:
    kind = getattr(library, model)
    properties = {
        kind.attribute_map[name]: _node(model, name, of) for name, of in kind.openapi_types.items()
    }
    return {"type": "object", "nullable": True, "properties": properties}


def _node(model: str, field: str, kind: str) -> Node:
    if (model, field) in QUANTITIES:
        if kind == "str":
            return ANYTHING
        return {"type": "object", "nullable": True, "additionalProperties": ANYTHING}
    if match := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        return {"type": "array", "nullable": True, "items": _node(model, "", match[1])}
    if match := re.fullmatch(r"[Dd]ict[(\[]\w+, *(.+)[)\]]", kind):
        values = _node(model, "", match[1])
        return {"type": "object", "nullable": True, "additionalProperties": values}
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind], "nullable": True}
    if kind == "datetime":
        return {"type": "string", "format": "date-time", "nullable": True}
    if kind == "object":
        return INT_OR_STRING
    return _object(kind)
