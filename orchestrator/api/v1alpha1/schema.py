"""The JSON schema and the reference pages of a TrainingJob, generated from the models.

The docstring of a field is its documentation, so code, schema and pages cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from holdfast.orchestrator import limits

from . import variables
from .job import API_VERSION, CONTRACT_NAMES, KIND, RESERVED_PREFIXES, TrainingJob

_Model = tuple[str, dict[str, Any]]
"""Path and schema."""

ENDLESS = (
    limits.MAX_SECONDS,
    limits.MAX_COUNT,
    limits.MAX_SEED,
    limits.MAX_QUANTITY,
    limits.MAX_NODES,
)
"""Bounds that no user meets; the pages leave them out."""

DRAFT = "https://json-schema.org/draft/2020-12/schema"

PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "": ("The job spec", ("metadata", "spec")),
    "-training": ("The job spec: training", ("spec.entrypoint.recipe", "spec.parallelism")),
    "-recovery": ("The job spec: recovery", ("spec.checkpoint", "spec.recovery")),
}
"""End of a page's name -> its title, and the parts of the spec that it describes."""

HEAD = """
# {title}

Pages of the spec: [job](job-spec.md), [training](job-spec-training.md),
[recovery](job-spec-recovery.md). Generated: `holdfast schema --markdown -o docs/user/job-spec.md`.
"""

INTRODUCTION = f"""
A job is a YAML document with `apiVersion: {API_VERSION}`, `kind: {KIND}`, `metadata` and `spec`.
Unknown keys are errors. Durations are seconds. `holdfast schema` prints a JSON schema for editors.

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

These variables do not do what many expect. `validate`, `plan`, `run` and `submit` print a note for
each; on Kubernetes it is an Event `Remark`.

{table}
"""


def json_schema() -> dict[str, Any]:
    """JSON schema of the whole document, with YAML names."""
    schema = TrainingJob.model_json_schema(by_alias=True)
    return {"$schema": DRAFT, "$id": f"https://{API_VERSION}/{KIND}", **schema}


def reference_pages() -> dict[str, str]:
    """End of a page's name -> the page as Markdown: one section for each part, in the order of the
    fields."""
    schema = json_schema()
    pages = {end: [HEAD.format(title=title).lstrip()] for end, (title, _) in PAGES.items()}
    pages[""].append(INTRODUCTION.lstrip())
    seen: set[str] = set()
    queue: list[_Model] = [(name, _follow(schema, name)) for name in ("metadata", "spec")]
    while queue:
        path, model = queue.pop(0)
        if path in seen:
            continue
        seen.add(path)
        rows, below = _rows(schema, path, model)
        pages[_page(path)].append("\n".join([f"## {path}", "", *_description(model), *rows, ""]))
        queue = [*below, *queue]
    names = ", ".join(f"`{name}`" for name in CONTRACT_NAMES)
    prefixes = " or ".join(f"`{prefix}`" for prefix in RESERVED_PREFIXES)
    effects = "\n".join(variables.table())
    pages[""].append(TAIL.format(names=names, prefixes=prefixes, table=effects).lstrip())
    return {end: "\n".join(parts) for end, parts in pages.items()}


def _page(path: str) -> str:
    """End of the name of the page that describes this part."""
    tops = {top: end for end, (_, parts) in PAGES.items() for top in parts}
    return tops[max((top for top in tops if f"{path}.".startswith(f"{top}.")), key=len)]


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
    schema: dict[str, Any], path: str, model: dict[str, Any]
) -> tuple[list[str], list[_Model]]:
    """The table of one model, and the models of its fields. Fields with the same model share one
    section, whose name ends with NAME."""
    required = model.get("required", ())
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    below: list[_Model] = []
    fields = {n: (node, _resolve(schema, node)) for n, node in model.get("properties", {}).items()}
    targets = [id(target) for _, target in fields.values()]
    for name, (node, target) in fields.items():
        nested = "properties" in target
        if nested:
            part = f"{path}.{name if targets.count(id(target)) == 1 else 'NAME'}"
            below.append((part, target))
            page = "" if _page(part) == _page(path) else f"job-spec{_page(part)}.md"
            kind = f"[object]({page}#{_anchor(part)})"
            values = node.get("default") or {}
            parts = [f"`{n}: {values[n]}`" for n in target.get("required", ()) if n in values]
            default = ", ".join(parts)
        else:
            kind, default = _kind(schema, node), _default(node)
        if name in required:
            default = "**required**"
        text = _plain(node.get("description") or _summary(target.get("description", "")))
        lines.append(f"| `{name}` | {kind} | {default} | {text} |")
    return lines, below


def _summary(text: str) -> str:
    """The first sentence: the section of the part has all of them."""
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


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
    if node.get("maxProperties") == 0:
        return "`{}`"
    if kind == "object":
        return f"map of {_kind(schema, node.get('additionalProperties', {}))}"
    return str(kind) + _bounds(node)


def _bounds(node: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = {key: node[key] for key in signs if key in node and abs(node[key]) not in ENDLESS}
    return (
        " " + ", ".join(f"{signs[key]} {_number(bounds[key])}" for key in bounds) if bounds else ""
    )


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _default(node: dict[str, Any]) -> str:
    value = node.get("default")
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
