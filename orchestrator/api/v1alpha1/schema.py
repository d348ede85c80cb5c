"""The JSON schema of a TrainingJob, generated from the models."""

from __future__ import annotations

from typing import Any

from .job import API_VERSION, KIND, TrainingJob
from .recipe import RECIPES

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """JSON schema of the whole document, with YAML names. The settings of a recipe depend on its
    name."""
    schema = TrainingJob.model_json_schema(by_alias=True)
    place, forms = "#/$defs/{model}", []
    for name, config in RECIPES.items():
        settings = config.model_json_schema(by_alias=True, ref_template=place)
        schema["$defs"] |= settings.pop("$defs", {}) | {config.__name__: settings}
        form = {"config": {"$ref": place.format(model=config.__name__)}}
        forms.append(
            {"if": {"properties": {"name": {"const": name}}}, "then": {"properties": form}}
        )
    schema["$defs"]["Recipe"]["allOf"] = forms
    return {"$schema": DRAFT, "$id": f"https://{API_VERSION}/{KIND}", **schema}
