"""Kubernetes quantities ("500m", "4Gi") as numbers, both ways of writing accepted.

Source: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from holdfast.orchestrator import limits

_SUFFIXES = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip
PATTERN = r"^([0-9]+(\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"


def parse_quantity(value: Any) -> float:
    """The number behind a quantity.

    Raises ValueError, naming the accepted form, for anything that is not a quantity >= 0.
    """
    found: float = -1
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        found = value
    elif isinstance(value, str) and (match := re.fullmatch(PATTERN, value)):
        found = float(match[1]) * _SUFFIXES[match[3] or ""]
    if not found >= 0:  # as nothing is that is not a number
        raise ValueError("expected a quantity such as 2, 500m or 4Gi")
    if found > limits.MAX_QUANTITY:
        raise ValueError(f"expected a quantity of at most {limits.MAX_QUANTITY:g}, such as 4Gi")
    return float(found)


Quantity = Annotated[
    float,
    BeforeValidator(parse_quantity),
    WithJsonSchema(
        {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    ),
]
