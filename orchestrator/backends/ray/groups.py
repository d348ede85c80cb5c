"""Placement groups of one job: room for its nodes, one bundle each.

Owns: making, awaiting and removing them, and where their bundles are. Must not: start actors.

The first nodes.min nodes share one group (STRICT_SPREAD), which Ray places as a whole or not at
all: two jobs can never hold half of what each of them needs. Every later node has a group of one
bundle. A group that finds no place stays as demand, which is what Ray's autoscaler looks at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from ...protocol.spec import TrainingJob
from . import cluster, names

WAIT_SLICE_S = 30
"""One round of waiting in a thread, so that it ends soon after nobody wants it any more."""


def bundle_of(job: TrainingJob) -> dict[str, float]:
    """What one node takes of a Ray node. Without spec.resources.cpu: a core per worker."""
    workers, each = job.spec.workers_per_node, job.spec.resources
    bundle = {"CPU": float(each.cpu if each.cpu is not None else 1) * workers}
    if each.gpu:
        bundle["GPU"] = float(each.gpu * workers)
    if each.memory is not None:
        bundle["memory"] = float(int(each.memory) * workers)
    return bundle


class Group:
    """One placement group."""

    def __init__(self, name: str, size: int, handle: Any) -> None:
        self.name, self.size, self.handle = name, size, handle
        self.taken: dict[int, str] = {}
        """Bundle -> node."""
        self.barred: set[int] = set()
        """Bundles that are on a Ray node which will be taken away."""
        self.placed = False
        self.task: asyncio.Task[None] | None = None

    def free(self) -> list[int]:
        """Bundles for further nodes."""
        return [n for n in range(self.size) if n not in self.taken and n not in self.barred]

    def bar(self, ray_nodes: Collection[str]) -> None:
        """Put nothing on these. A group of several nodes keeps its bundle there: Ray can take back
        only whole groups, and gives the bundle another place when the Ray node has ended."""
        places = self.ray_nodes() if ray_nodes else {}
        self.barred = {bundle for bundle, place in places.items() if place in ray_nodes}

    def ray_nodes(self) -> dict[int, str]:
        """Bundle -> Ray node, of those that have a place. A round trip to the head."""
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(self.handle)
        return {int(k): str(v) for k, v in table.get("bundles_to_node_id", {}).items() if v}

    def whole(self) -> bool:
        """Whether every bundle has a place on a Ray node that is there. A round trip, blocking."""
        from ray.util.placement_group import placement_group_table

        if placement_group_table(self.handle).get("state") != "CREATED":
            return False
        alive, places = cluster.alive_nodes(), self.ray_nodes()
        return len(places) == self.size and all(
            place in alive and cluster.listens(alive[place]) for place in set(places.values())
        )

    async def wait(self) -> None:
        """Until it has been placed."""
        while not await asyncio.to_thread(self.handle.wait, WAIT_SLICE_S):
            continue

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.handle)


def make(job: str, node: str, size: int, bundle: dict[str, float], shun: set[str]) -> Group:
    """A new group, named after the job and its first node; its Ray nodes are none of `shun`."""
    from ray.util.placement_group import placement_group

    selector = [{"ray.io/node-id": f"!in({','.join(sorted(shun))})"}] * size if shun else None
    name = names.group(job, node)
    handle = placement_group(
        [dict(bundle)] * size, strategy="STRICT_SPREAD", name=name, lifetime="detached",
        bundle_label_selector=selector,
    )  # fmt: skip
    return Group(name, size, handle)


def find(name: str, size: int) -> Group | None:
    """A group of an earlier controller."""
    from ray.util.placement_group import get_placement_group

    try:
        return Group(name, size, get_placement_group(name))
    except ValueError:
        return None


def names_of(job: str) -> list[str]:
    """All groups of a job that exist, whoever has made them."""
    from ray.util.placement_group import placement_group_table

    prefix = names.group(job, "")
    found = [one for one in placement_group_table().values() if one["name"].startswith(prefix)]
    return [one["name"] for one in found if one["state"] != "REMOVED"]
