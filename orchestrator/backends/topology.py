"""The place of a node in the network, from the labels of its machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def coordinates(labels: Mapping[str, str], keys: Sequence[str]) -> tuple[str, ...]:
    """The values of `keys`, outermost first, for NodeFacts.topology; missing labels are empty."""
    return tuple(labels.get(key, "") for key in keys)
