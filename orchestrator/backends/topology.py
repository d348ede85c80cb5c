"""Where a node is among its neighbours, from the labels that a cluster has put on its machines.

Owns: how labels become NodeFacts.topology, the same on every cluster. Must not: look them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def coordinates(labels: Mapping[str, str], keys: Sequence[str]) -> tuple[str, ...]:
    """Outermost first, as `keys` are. A label that is not there counts as empty."""
    return tuple(labels.get(key, "") for key in keys)
