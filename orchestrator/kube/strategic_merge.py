"""Strategic merge of a user's pod template over the pod that Holdfast makes.

The client library has no strategic merge of its own. The rules of each list (patch strategy and
patch merge key) are those of the API reference:
https://kubernetes.io/docs/reference/generated/kubernetes-api/v1.36/#podspec-v1-core
"""

from __future__ import annotations

import copy
from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "ownerReferences": "uid",
}
"""The key of each list that is merged by element; other lists are replaced."""
REPLACED_ELEMENTS = ("volumes",)
"""Keyed lists whose elements are replaced, not merged: a volume has exactly one source."""


def merge(base: Any, over: Any, field: str = "") -> Any:
    """`over` laid over `base`. Neither is changed. null removes a key. There are no directives such
    as `$patch`: helm and kubectl would follow those in the CRD, and remove what holds them."""
    if isinstance(base, dict) and isinstance(over, dict):
        return _mappings(base, over)
    key = MERGE_KEYS.get(field)
    if key and isinstance(base, list) and isinstance(over, list):
        return _lists(base, over, key, whole=field in REPLACED_ELEMENTS)
    return _plain(over)


def _mappings(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for name, value in over.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(base.get(name), value, name)
    return merged


def _lists(base: list[Any], over: list[Any], key: str, *, whole: bool) -> list[Any]:
    merged = copy.deepcopy(base)
    for item in over:
        if not isinstance(item, dict) or key not in item:
            merged.append(_plain(item))
            continue
        at = next((i for i, old in enumerate(merged) if old.get(key) == item[key]), None)
        if at is None:
            merged.append(_plain(item))
        else:
            merged[at] = _plain(item) if whole else _mappings(merged[at], item)
    return merged


def _plain(value: Any) -> Any:
    """Copy without nulls."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
