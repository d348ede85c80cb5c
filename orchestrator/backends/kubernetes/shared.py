"""What the backends of all jobs of an operator share.

Owns: that list. Must not: do anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from .client import Cluster
from .feed import PodFeed
from .gang import Gangs
from .places import Places
from .pods import PodSettings


@dataclass
class Shared:
    """What the backends of all jobs of an operator share."""

    cluster: Cluster
    feed: PodFeed
    places: Places
    gangs: Gangs
    settings: PodSettings
