"""The CustomResourceDefinition of a TrainingJob, generated from the models.

A structural schema (https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources) has one
type at each node, no references, and defaults that the API server fills in. It differs from the
JSON schema for editors:

* Unknown fields: `kubectl` asks for strict validation, so the API server rejects them; from other
  clients it drops (prunes) them with a warning. They never reach the operator.
* `auto | integer` is int-or-string. A number or a word, or a boolean or an integer, has no
  structural type: such a field has none, and its values are restricted instead (`_untyped`).
* Texts, lists and maps have bounds, because the cost of the CEL rules must have one.
* null is not a value: leave the field out instead.
"""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator import limits

from .base import QUANTITY_PATTERN
from .job import API_VERSION, KIND, TrainingJob
from .load import job_from_mapping
from .retired import MOVED
from .rules import RULES, Rule
from .status import TrainingJobStatus

GROUP, _, VERSION = API_VERSION.partition("/")
PLURAL = "trainingjobs"
NAME = f"{PLURAL}.{GROUP}"

MAX_TEXT = 4096
"""Characters of a text without a bound of its own: PATH_MAX of Linux."""
MAX_WORD = 64
"""Characters of a text that stands for a number, such as auto or 4Gi."""
MAX_ITEMS = 256
"""Elements of a list without a bound of its own."""
MAX_KEYS = 256
"""Keys of a map without a bound of its own."""

RULED = {"spec.nodes.max": "minimum"}
"""Bounds that a CEL rule checks instead of the schema: its message says what to write."""
UNITS = r"|[0-9.]+ *([kKMGTPE][iI]?[bB]|[bB](ytes?)?|[cC]ores?|[cC][pP][uU]s?)"
"""Quantities with units that users write, such as 64GB: the schema lets them pass, and an admission
policy of the chart, or the operator, rejects them with what to write."""

GONE = {
    "description": "A field that is gone.",
    "x-kubernetes-preserve-unknown-fields": True,
    "enum": ["none: `holdfast spec validate FILE` prints what to write instead"],
}
"""Schema of a field of an earlier form: no value of any type is accepted, and the API server's
message has the text."""
NODE_COUNTS = ("spec.nodes.min", "spec.nodes.max", "spec.nodes.spares")
"""Fields of 32 bits, as the scale subresource requires."""
OPEN_MAPPINGS = {"spec.kubernetes.podTemplate": ("metadata", "spec")}
"""Mappings whose values below these keys have a schema that is not ours."""
LIST_KEYS = {"status.conditions": ["type"], "status.incidents": ["number"]}
"""Lists whose elements have a key, so that server-side apply can merge them."""

Node = dict[str, Any]

_COLUMNS = (
    ("State", "string", ".status.state", "Phase of the job.", 0),
    ("Nodes", "string", ".status.nodes.summary", "Nodes that train, of those requested.", 0),
    ("World", "integer", ".status.worldSize", "Number of workers of the current generation.", 0),
    ("Step", "integer", ".status.step", "Last step that all ranks have finished.", 0),
    ("Restarts", "integer", ".status.restarts", "How often all workers were started again.", 0),
    (
        "Goodput",
        "string",
        ".status.goodput",
        "Share of the time in which new steps were trained.",
        0,
    ),
    (
        "Reason",
        "string",
        '.status.conditions[?(@.type=="Ready")].reason',
        "Why the job is in this phase, in one word.",
        0,
    ),
    ("Seen", "date", ".status.seen", "How long ago the operator looked at the job.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "", 0),
    ("Strategy", "string", ".status.strategy", "DDP, FSDP2 or HSDP; empty: a script's own.", 1),
    ("Checkpoint", "integer", ".status.lastCheckpoint.step", "Newest step in storage.", 1),
    ("Message", "string", ".status.reason", "Why the job is in this phase.", 1),
)


def definition() -> Node:
    """The CustomResourceDefinition. Its pod template is any mapping: kube/pod_schema.py adds the
    schema, for which it needs the models of the Kubernetes client."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": NAME,
            "annotations": {"helm.sh/resource-policy": "keep"},
            "labels": {
                "app.kubernetes.io/name": "holdfast",
                "app.kubernetes.io/part-of": "holdfast",
            },
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["tj"],
                # `kubectl get all` lists jobs too, not only their pods.
                "categories": ["all"],
            },
            "versions": [_version()],
        },
    }


def _version() -> Node:
    columns = []
    for name, kind, path, text, priority in _COLUMNS:
        column: Node = {"name": name, "type": kind, "jsonPath": path}
        column |= {"description": text} if text else {}
        columns.append(column | ({"priority": priority} if priority else {}))
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": openapi_schema()},
        "subresources": {
            "status": {},
            # nodes.max is the requested size, so `kubectl scale` is `holdfast resize`. A size
            # below nodes.min lowers nodes.min too, see job_from_resource.
            "scale": {
                "specReplicasPath": ".spec.nodes.max",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": columns,
    }


def openapi_schema() -> Node:
    """The structural schema of the whole object."""
    job = TrainingJob.model_json_schema(by_alias=True)
    status = TrainingJobStatus.model_json_schema(by_alias=True)
    spec = _Converter(job).convert(job["properties"]["spec"], "spec")
    return _with_rules("", {
        "type": "object",
        "description": _plain(job["description"]),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": spec,
            "status": _Converter(status).convert(status, "status"),
        },
    })  # fmt: skip


class _Converter:
    """Converts one JSON schema with definitions to a structural schema."""

    def __init__(self, schema: Node) -> None:
        self._definitions: dict[str, Node] = schema.get("$defs", {})

    def convert(self, node: Node, path: str) -> Node:
        node = self._resolved(node)
        schema = self._shape(node, path)
        if text := node.get("description"):
            schema = {"description": _plain(text), **schema}
        default = _default(node.get("default"))
        if default is not None:
            schema["default"] = default
        return _with_rules(path, schema)

    def _resolved(self, node: Node) -> Node:
        """The node without references and without the choice null; the field's own keys win."""
        choices = [c for c in node.get("anyOf", ()) if c.get("type") != "null"]
        if len(choices) == 1 and "anyOf" in node:
            node = {**self._resolved(choices[0]), **{k: v for k, v in node.items() if k != "anyOf"}}
        if "$ref" in node:
            target = self._definitions[node["$ref"].rpartition("/")[2]]
            node = {**target, **{k: v for k, v in node.items() if k != "$ref"}}
        return node

    def _shape(self, node: Node, path: str) -> Node:
        if "x-kubernetes-preserve-unknown-fields" in node:
            return _open(path)
        if "x-kubernetes-int-or-string" in node:
            return _untyped(
                [
                    {"type": "number", "minimum": 0, "maximum": limits.MAX_QUANTITY},
                    {"type": "string", "pattern": f"^({QUANTITY_PATTERN[1:-1]}{UNITS})$"},
                ]
            )
        if "anyOf" in node:
            return self._union([self._resolved(choice) for choice in node["anyOf"]])
        kind = "string" if "const" in node else node["type"]
        if kind == "object":
            return self._object(node, path)
        if kind == "array":
            items = self.convert(node["items"], f"{path}[]")
            keys = LIST_KEYS.get(path)
            shape = {"type": "array", "maxItems": node.get("maxItems", MAX_ITEMS), "items": items}
            if keys:
                shape |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys}
            return shape
        if "const" in node or "enum" in node:
            return {"type": kind, "enum": node.get("enum", [node.get("const")])}
        schema = {"type": kind, **_bounds(node)}
        if kind == "string" and node.get("format") != "date-time":
            schema.setdefault("maxLength", MAX_TEXT)
        if path in RULED:
            schema[RULED[path]] = 0
        if kind == "integer":
            schema["format"] = "int32" if path in NODE_COUNTS else "int64"
        return schema

    def _object(self, node: Node, path: str) -> Node:
        if "properties" not in node:
            values = self.convert(node["additionalProperties"], f"{path}{{}}")
            return {
                "type": "object",
                "maxProperties": node.get("maxProperties", MAX_KEYS),
                "additionalProperties": values,
            }
        document: Node = {"type": "object"}
        if required := node.get("required"):
            document["required"] = required
        document["properties"] = {
            name: self.convert(child, f"{path}.{name}")
            for name, child in node["properties"].items()
        }
        for name in MOVED.get(path, ()):
            document["properties"].setdefault(name, GONE)
        return document

    def _union(self, choices: list[Node]) -> Node:
        kinds = {"string" if "const" in choice else choice["type"] for choice in choices}
        if kinds <= {"integer", "string"}:
            schema: Node = {
                "x-kubernetes-int-or-string": True,
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "maxLength": MAX_WORD,
            }
            return _with_bounds(schema, choices)
        return _word_or_list(choices) if "array" in kinds else _untyped(choices)


def _open(path: str) -> Node:
    """A mapping that is kept as it is, whatever its fields are."""
    kept = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if path not in OPEN_MAPPINGS:
        return kept
    text = "Part of a pod."
    properties = {name: {"description": text, **kept} for name in OPEN_MAPPINGS[path]}
    return {"type": "object", "properties": properties}


# A bound applies to values of one type only, so a pair of bounds that no value of a type meets
# excludes that type. Structural schemas have no other way to say "not a list".
_NO_TEXT = {"minLength": 1, "maxLength": 0}
_NO_LIST = {"minItems": 1, "maxItems": 0}
_NO_MAP = {"minProperties": 1, "maxProperties": 0}
_NO_NUMBER = {"minimum": 1, "maximum": 0}
_NO_BOOLEAN = {"not": {"enum": [True, False]}}


def _untyped(choices: list[Node]) -> Node:
    """A field without a type, with the bounds of all choices: numbers obey the bounds of the
    number, texts the pattern of the text."""
    schema: Node = {"x-kubernetes-preserve-unknown-fields": True}
    kinds = {"string" if "const" in choice else choice["type"] for choice in choices}
    schema = _with_bounds(schema, choices)
    if kinds & {"integer", "number"}:
        schema |= {} if "number" in kinds else {"multipleOf": 1}
    else:
        schema |= _NO_NUMBER
    if "string" in kinds:
        schema |= {"maxLength": MAX_WORD}
    else:
        schema |= _NO_TEXT
    schema |= {} if "boolean" in kinds else _NO_BOOLEAN
    return {**schema, **_NO_LIST, **_NO_MAP}


def _word_or_list(choices: list[Node]) -> Node:
    """One of some words, or a list, whose elements the operator checks."""
    words = [word for choice in choices for word in choice.get("enum", ())]
    schema: Node = {"x-kubernetes-preserve-unknown-fields": True, **_NO_MAP, **_NO_NUMBER}
    length = next(choice["maxItems"] for choice in choices if choice["type"] == "array")
    bounds = {"minItems": 1, "maxItems": length, "maxLength": MAX_WORD}
    return {**schema, **_NO_BOOLEAN, **bounds, "pattern": f"^({'|'.join(words)})$"}


def _with_bounds(schema: Node, choices: list[Node]) -> Node:
    for choice in choices:
        schema |= {} if "const" in choice else _bounds(choice)
    words = [str(choice["const"]) for choice in choices if "const" in choice]
    if words:
        schema["pattern"] = f"^{words[0]}$" if len(words) == 1 else f"^({'|'.join(words)})$"
    return schema


def _bounds(node: Node) -> Node:
    """Bounds as OpenAPI 3.0 writes them: an exclusive bound is a flag beside the number."""
    schema: Node = {
        key: node[key] for key in ("minLength", "maxLength", "pattern", "format") if key in node
    }
    for key, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if key in node:
            schema[key] = _number(node[key])
        if exclusive in node:
            schema |= {key: _number(node[exclusive]), exclusive: True}
    return schema


def _default(value: Any) -> Any:
    """The default that the API server fills in. Whole objects, although their fields have defaults
    too: the API server evaluates rules on a default before it fills in defaults inside."""
    if value is None or value == []:
        return None
    if isinstance(value, dict):
        own = {name: _default(child) for name, child in value.items()}
        return {name: child for name, child in own.items() if child is not None}
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float:
    """Whole numbers without a decimal point, as the API server returns them."""
    return int(value) if value == int(value) else value


def _with_rules(path: str, made: Node) -> Node:
    if rules := [_rule(rule) for rule in RULES if rule.path == path]:
        made["x-kubernetes-validations"] = rules
    return made


def _rule(rule: Rule) -> Node:
    entry: Node = {"rule": rule.rule}
    if rule.values:
        entry["messageExpression"] = rule.message_expression()
    else:
        entry["message"] = rule.message
    if rule.field:
        entry["fieldPath"] = rule.field
    if rule.optional_old:
        entry["optionalOldSelf"] = True
    return entry


def _plain(text: str) -> str:
    return " ".join(text.split())


def job_from_resource(document: dict[str, Any]) -> TrainingJob:
    """The job in an object that was read from an API server. Raises SpecError.

    If nodes.max is below nodes.min, nodes.min is lowered to it, as `holdfast resize` does:
    `kubectl scale` changes nodes.max only.
    """
    written = {key: value for key, value in document.items() if key != "status"}
    spec = written.get("spec")
    nodes = spec.get("nodes") if isinstance(spec, dict) else None
    if isinstance(spec, dict) and isinstance(nodes, dict):
        low, high = nodes.get("min"), nodes.get("max")
        if isinstance(low, int) and isinstance(high, int) and 1 <= high < low:
            written["spec"] = {**spec, "nodes": {**nodes, "min": high}}
    return job_from_mapping(written)
