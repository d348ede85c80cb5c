"""Misspelt fields of a pod, found without an API server. Pure.

The API server drops unknown fields of an object unless it is asked for strict validation. Here a
field that the client library does not know is a mistake only if it resembles one that it knows: a
newer cluster may have fields that the library lacks. Everything else is left to the API server.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from kubernetes.aio import client as library

ROOTS = {"metadata": "V1ObjectMeta", "spec": "V1PodSpec"}
RESEMBLES = 0.75


class UnknownField(NamedTuple):
    path: str
    """Path below the pod, such as spec.tolerationz."""
    close: str
    """The known field that it resembles, which was probably meant."""


def misspelt_fields(pod: dict[str, Any]) -> list[UnknownField]:
    """`pod`: metadata and spec of a pod, or a part of them."""
    return [
        field
        for part, model in ROOTS.items()
        for field in _unknown_in_model(pod.get(part), model, part)
    ]


def _unknown_in_model(value: Any, model: str, path: str) -> Iterator[UnknownField]:
    if not isinstance(value, dict):
        return
    kind = getattr(library, model)
    types = {kind.attribute_map[name]: of for name, of in kind.openapi_types.items()}
    for key, child in value.items():
        if key in types:
            yield from _unknown_in_type(child, types[key], f"{path}.{key}")
        elif str(key).startswith("$"):
            yield UnknownField(f"{path}.{key}", "null, which removes a field")
        else:
            close = difflib.get_close_matches(str(key), types, n=1, cutoff=RESEMBLES)
            if close:
                yield UnknownField(f"{path}.{key}", close[0])


def _unknown_in_type(value: Any, kind: str, path: str) -> Iterator[UnknownField]:
    if match := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        for number, child in enumerate(value if isinstance(value, list) else ()):
            yield from _unknown_in_type(child, match[1], f"{path}[{number}]")
    elif match := re.fullmatch(r"[Dd]ict[(\[]\w+, *(.+)[)\]]", kind):
        for key, child in value.items() if isinstance(value, dict) else ():
            yield from _unknown_in_type(child, match[1], f"{path}.{key}")
    elif hasattr(getattr(library, kind, None), "attribute_map"):
        yield from _unknown_in_model(value, kind, path)
