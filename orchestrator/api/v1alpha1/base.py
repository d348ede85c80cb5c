"""How every part of the spec behaves: frozen, closed, camelCase outside, units spelled out.

Owns: the base model and the naming rule. Must not: know any field.

Values are taken as the API server takes them: `max: true` and `max: "2"` are no numbers.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic.alias_generators import to_camel

Auto = Literal["auto"]

# In Python the unit is a suffix (`timeout_s`), in YAML it is a word, as Kubernetes writes it.
_UNITS = {"_s": "_seconds"}


def yaml_name(python_name: str) -> str:
    """`heartbeat_timeout_s` -> `heartbeatTimeoutSeconds`: one rule for every field."""
    for suffix, word in _UNITS.items():
        if python_name.endswith(suffix):
            python_name = python_name.removesuffix(suffix) + word
    return to_camel(python_name)


def whole(value: Any) -> Any:
    """2.0 as 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Part(BaseModel):
    """A part of the spec. Unknown keys are errors: a misspelt key must never be ignored."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=yaml_name,
        populate_by_name=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_json_means_it(cls, value: Any) -> Any:
        """In JSON an array is the one sequence, and 2.0 is an integer."""
        return tuple(value) if isinstance(value, list) else whole(value)
