"""How the nodes of a job find their places on a Ray cluster.

Owns: these fields and their defaults. Must not: know Ray; backends/ray does.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import Part
from .kubernetes import RESOURCE_PATTERN

LabelKey = Annotated[str, Field(pattern=RESOURCE_PATTERN, max_length=253)]

TOPOLOGY_KEYS = ("ray.io/availability-region", "ray.io/availability-zone")


class Ray(Part):
    """What a Ray cluster needs to be told beyond the rest of the spec. Only Ray looks at it."""

    topology_keys: tuple[LabelKey, ...] = Field(default=TOPOLOGY_KEYS, max_length=8)
    """Labels of Ray nodes (`ray start --labels`), outermost first, by which ranks are laid out:
    neighbours in the order of ranks share as many of them as can be. A label that a node lacks
    counts as empty."""
