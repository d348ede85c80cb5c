"""The JSON schema and the reference page of a TrainingJob, generated from the models.

The docstring of a field is its documentation, so code, schema and page cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from . import variables
from .job import API_VERSION, CONTRACT_NAMES, KIND, RESERVED_PREFIXES, TrainingJob

_Model = tuple[str, dict[str, Any], dict[str, Any]]
"""Path, schema, and the value that the part above has by default."""

DRAFT = "https://json-schema.org/draft/2020-12/schema"

HEAD = f"""# The job spec

This page is generated from the models in `orchestrator/api/v1alpha1` with
`holdfast schema --markdown -o docs/user/job-spec.md`.
`holdfast schema` prints the same as a JSON schema,
which editors can use.

A job is a YAML document with `apiVersion: {API_VERSION}`, `kind: {KIND}`, `metadata` and `spec`.
Unknown keys are errors. Durations are seconds, as the names say.

```yaml
apiVersion: {API_VERSION}
kind: {KIND}
metadata:
  name: my-job
spec:
  entrypoint:
    script: train.py          # the script that you would give to torchrun
  nodes: {{min: 1, max: 2}}     # trains on two nodes, or on one
  workersPerNode: 2
```
"""

TAIL = """
## Environment variables

`env` may override every variable that `holdfast plan` shows, except those that identify a worker:
{names}, and names that begin with {prefixes}.

These do something else than many expect. `validate`, `plan`, `run` and `submit` print a note for
each; on Kubernetes it is an Event `Remark`.

{table}
"""


def json_schema() -> dict[str, Any]:
    """JSON schema of the whole document, with YAML names."""
    schema = TrainingJob.model_json_schema(by_alias=True)
    return {"$schema": DRAFT, "$id": f"https://{API_VERSION}/{KIND}", **schema}


def reference_page() -> str:
    """The page as Markdown: one section for each part, in the order of the fields."""
    schema = json_schema()
    parts = [HEAD]
    seen: set[str] = set()
    queue: list[_Model] = [(name, _follow(schema, name), {}) for name in ("metadata", "spec")]
    while queue:
        path, model, given = queue.pop(0)
        if path in seen:
            continue
        seen.add(path)
        rows, below = _rows(schema, path, model, given)
        parts.append("\n".join([f"## {path}", "", *_description(model), *rows, ""]))
        queue = [*below, *queue]
    names = ", ".join(f"`{name}`" for name in CONTRACT_NAMES)
    prefixes = " or ".join(f"`{prefix}`" for prefix in RESERVED_PREFIXES)
    effects = "\n".join(variables.table())
    parts.append(TAIL.format(names=names, prefixes=prefixes, table=effects).lstrip())
    return "\n".join(parts)


def _follow(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return _resolve(schema, schema["properties"][name])


def _resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """The model that a reference means, also an optional one."""
    for choice in (node, *node.get("anyOf", ()), *node.get("allOf", ())):
        if "$ref" in choice:
            found: dict[str, Any] = schema["$defs"][choice["$ref"].rpartition("/")[2]]
            return found
    return node


def _description(model: dict[str, Any]) -> Iterator[str]:
    if text := model.get("description"):
        yield _plain(text)
        yield ""


def _rows(
    schema: dict[str, Any], path: str, model: dict[str, Any], given: dict[str, Any]
) -> tuple[list[str], list[_Model]]:
    """The table of one model, and the models of its fields."""
    required = model.get("required", ())
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    below: list[_Model] = []
    for name, node in model.get("properties", {}).items():
        target = _resolve(schema, node)
        nested = "properties" in target
        if nested:
            below.append((f"{path}.{name}", target, node.get("default") or {}))
            kind = f"[object](#{_anchor(f'{path}.{name}')})"
        else:
            kind = _kind(schema, node)
        default = "**required**" if name in required else _default(node, nested)
        if name in required and name in given:
            default = f"`{given[name]}`; **required** beside other fields of this part"
        text = _plain(node.get("description") or target.get("description", ""))
        lines.append(f"| `{name}` | {kind} | {default} | {text} |")
    return lines, below


def _kind(schema: dict[str, Any], node: dict[str, Any]) -> str:
    """A type in words."""
    if "x-kubernetes-int-or-string" in node:
        return "quantity"
    if "x-kubernetes-preserve-unknown-fields" in node:
        return "mapping"
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return " \\| ".join(f"`{value}`" for value in node["enum"])
    if "anyOf" in node:
        kinds = [_kind(schema, choice) for choice in node["anyOf"] if choice.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in node:
        return _kind(schema, _resolve(schema, node))
    kind = node.get("type", "any")
    if kind == "array":
        return f"list of {_kind(schema, node.get('items', {}))}"
    if kind == "object":
        return f"map of {_kind(schema, node.get('additionalProperties', {}))}"
    return str(kind) + _bounds(node)


def _bounds(node: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {_number(node[key])}" for key, sign in signs.items() if key in node]
    return " " + ", ".join(limits) if limits else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _default(node: dict[str, Any], nested: bool) -> str:
    if nested or "default" not in node:
        return ""
    value = node["default"]
    if value is None or value in ({}, [], ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`"


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def _anchor(path: str) -> str:
    return path.lower().replace(".", "")
