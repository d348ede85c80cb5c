"""The CRD agrees with the models: structure, defaults, and the words of each rule."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping, load_job
from holdfast.orchestrator.api.v1alpha1.crd import definition, job_from_resource, openapi_schema
from holdfast.orchestrator.api.v1alpha1.job import JobSpec
from holdfast.orchestrator.api.v1alpha1.rules import MUTABLE, RULES
from holdfast.orchestrator.errors import SpecError
from tests.unit.api.wrong_jobs import (
    CHANGES,
    MODELS_ONLY,
    SCRIPT,
    UNTYPED_RIGHT,
    UNTYPED_WRONG,
    WRONG,
    Wrong,
    job,
)

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
INT_OR_STRING = [{"type": "integer"}, {"type": "string"}]
FORBIDDEN_INSIDE = ("description", "type", "default", "additionalProperties", "nullable")


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a structural schema, with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}".lstrip("."))
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


def fill(schema: dict[str, Any], value: Any) -> Any:
    """The value with the defaults that an API server fills in."""
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
            if name in value:
                fill(child, value[name])
    if isinstance(value, list):
        for item in value:
            fill(schema.get("items", {}), item)
    return value


def test_every_node_of_the_schema_has_one_type() -> None:
    for path, node in nodes(openapi_schema()):
        extension = ("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")
        assert "type" in node or any(key in node for key in extension), path
        assert not {"$ref", "$defs", "title", "allOf", "oneOf"} & set(node), path
        if node.get("anyOf") != INT_OR_STRING:
            for choice in node.get("anyOf", ()):
                assert not set(FORBIDDEN_INSIDE) & set(choice), path


def test_texts_lists_and_maps_have_bounds() -> None:
    for path, node in nodes(openapi_schema()):
        if not path.startswith("spec") or node.get("x-kubernetes-preserve-unknown-fields"):
            continue
        if node.get("type") == "string":
            assert "maxLength" in node or "enum" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_every_field_of_spec_and_status_is_described() -> None:
    undescribed = [
        path
        for path, node in nodes(openapi_schema())
        if path.startswith(("spec.", "status."))
        and not path.endswith(("[]", "{}"))
        and "description" not in node
    ]
    assert undescribed == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_defaults_in_the_schema_are_those_of_the_models(path: Path) -> None:
    document = fill(openapi_schema(), yaml.safe_load(path.read_text()))
    assert document["spec"]["recovery"]["budgets"]["hang"] == {"restarts": 5, "windowSeconds": 3600}
    assert document["spec"]["checkpoint"]["retention"] == {"keepLast": 2}
    assert job_from_resource(document) == load_job(path)


def test_the_api_server_fills_in_every_default_of_the_models() -> None:
    document = fill(openapi_schema(), job(SCRIPT))
    ours = TrainingJob.model_validate(job(SCRIPT)).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    missing = [path for path in leaves(ours["spec"]) if path not in set(leaves(document["spec"]))]
    assert missing == []


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield from leaves(child, f"{path}.{name}")
    elif value != []:
        yield path


def test_every_rule_is_in_the_schema_and_has_a_wrong_document() -> None:
    in_schema = [
        validation["rule"]
        for _path, node in nodes(openapi_schema())
        for validation in node.get("x-kubernetes-validations", ())
    ]
    assert sorted(in_schema) == sorted(rule.rule for rule in RULES)
    assert {case.rule for case in (*WRONG, *CHANGES)} == {rule.name for rule in RULES}


def test_every_field_of_the_spec_is_mutable_or_has_an_immutability_rule() -> None:
    fields = {field.alias or name for name, field in JobSpec.model_fields.items()}
    guarded = {r.name.removeprefix("immutable-") for r in RULES if r.name.startswith("immutable-")}
    assert guarded | set(MUTABLE) == fields
    assert not guarded & set(MUTABLE)


@pytest.mark.parametrize(
    "case", (*WRONG, *MODELS_ONLY), ids=lambda case: f"{case.rule} {case.id}".strip()
)
def test_the_models_refuse_a_wrong_job_with_the_words_of_the_rule(case: Wrong) -> None:
    with pytest.raises(SpecError) as caught:
        job_from_mapping(job(case.spec, case.name))
    text = str(caught.value).replace("'a.b'", "a.b")
    for part in case.message:
        assert part in text


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.rule)
def test_a_changed_job_is_a_valid_job_by_itself(case: Any) -> None:
    """The rule refuses the change, not the resulting spec."""
    before = job(case.before)
    job_from_mapping(before)
    job_from_mapping({**before, "spec": {**before["spec"], **case.patch["spec"]}})


@pytest.mark.parametrize("spec", UNTYPED_WRONG, ids=str)
def test_the_models_refuse_untyped_fields_too(spec: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        job_from_mapping(job(spec))


@pytest.mark.parametrize("spec", UNTYPED_RIGHT, ids=str)
def test_the_models_accept_every_form_of_untyped_fields(spec: dict[str, Any]) -> None:
    job_from_mapping(job(spec))


def test_scaling_below_the_minimum_lowers_the_minimum() -> None:
    document = job({**SCRIPT, "nodes": {"min": 2, "max": 1, "spares": 1}})
    document["status"] = {"state": "running"}
    nodes = job_from_resource(document).spec.nodes
    assert (nodes.min, nodes.max, nodes.spares) == (1, 1, 1)


def test_an_object_that_is_not_a_job_is_refused_with_its_field() -> None:
    for document, message in [
        ({"spec": None}, "apiVersion"),
        (job({**SCRIPT, "nodes": {"min": "many", "max": 1}}), "spec.nodes.min: got 'many'"),
        (job({**SCRIPT, "nodes": {"min": 2, "max": 0}}), "spec.nodes.max: got 0"),
    ]:
        with pytest.raises(SpecError) as caught:
            job_from_resource(document)
        assert message in str(caught.value)


def test_scale_and_columns_point_at_existing_fields() -> None:
    version = definition()["spec"]["versions"][0]
    places = {f".{path}" for path, _node in nodes(openapi_schema())}
    scale = version["subresources"]["scale"]
    columns = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    for path in (*scale.values(), *columns):
        plain = path.replace('[?(@.type=="Ready")]', "[]")
        assert plain in places or path == ".metadata.creationTimestamp", path
