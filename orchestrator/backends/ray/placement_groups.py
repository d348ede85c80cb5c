"""Placement groups of one job: room for its nodes, one bundle each.

Owns: making, awaiting and removing them, and where their bundles are. Must not: start actors, or
know how many are wanted; rooms.py does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from holdfast.orchestrator.api.v1alpha1 import TrainingJob

from . import cluster, names, ray_nodes

WAIT_SLICE_S = 10
"""One round of waiting in a thread, so that it ends soon after nobody wants it any more."""
PAUSE_S = 0.5

log = logging.getLogger("holdfast.ray")


def bundle_of(job: TrainingJob) -> dict[str, float]:
    """What one node takes of a Ray node. Without spec.resources.cpu: a core per worker."""
    workers, each = job.spec.workers_per_node, job.spec.resources
    bundle = {"CPU": float(each.cpu if each.cpu is not None else 1) * workers}
    if each.gpu:
        bundle["GPU"] = float(each.gpu * workers)
    if each.memory is not None:
        bundle["memory"] = float(int(each.memory) * workers)
    return bundle


@dataclass(eq=False)
class PlacementGroupHandle:
    """One placement group."""

    name: str
    size: int
    handle: Any = None
    shun: frozenset[str] = frozenset()
    """Ray nodes that it was told to stay away from when it was made."""
    taken: dict[int, str] = field(default_factory=dict)
    """Bundle -> node."""
    named: bool = False
    """A node has, or has had, its name."""
    placed: bool = False
    places: dict[int, str] = field(default_factory=dict)
    """Bundle -> Ray node, as last seen."""
    barred: frozenset[str] = frozenset()
    """Ray nodes that nothing more is put on. A group of several nodes keeps its bundle there: Ray
    can take back only whole groups, and gives it another place when the Ray node has ended."""
    task: asyncio.Task[None] | None = None
    """Waits for its place."""
    over: bool = False
    """It is removed."""

    def free(self) -> list[int]:
        """Bundles for further nodes."""
        return [
            bundle
            for bundle in range(self.size)
            if bundle not in self.taken and self.places.get(bundle, "") not in self.barred
        ]


class Placing(NamedTuple):
    """What Ray says of a group."""

    created: bool
    places: dict[int, str]
    """Bundle -> Ray node, of those that have a place."""


class Maker(Protocol):
    """Makes groups for one job. What is no coroutine blocks for a round trip to the head."""

    def make(self, node: str, size: int, shun: frozenset[str]) -> PlacementGroupHandle:
        """Named after its first node; STRICT_SPREAD; its Ray nodes are none of `shun`."""

    def find(self, name: str, size: int) -> PlacementGroupHandle | None:
        """One of an earlier controller."""

    def remove(self, group: PlacementGroupHandle) -> None:
        """With whatever actors are in it. One that is not there is removed already."""

    def table(self) -> dict[str, Placing]:
        """All groups of this job that exist, whoever has made them."""

    async def wait(self, group: PlacementGroupHandle) -> None:
        """Until it has been placed."""

    async def large(self) -> set[str]:
        """Ray nodes that could hold a bundle if nobody else used them."""

    async def answering(self, keys: Iterable[str]) -> set[str]:
        """Those of them that are there."""


class RayGroups:
    """Implements Maker."""

    def __init__(self, job: str, bundle: dict[str, float]) -> None:
        self._job, self._bundle = job, bundle

    def make(self, node: str, size: int, shun: frozenset[str]) -> PlacementGroupHandle:
        from ray.util.placement_group import placement_group

        avoid = {"ray.io/node-id": f"!in({','.join(sorted(shun))})"}
        name = names.group(self._job, node)
        handle = placement_group(
            [dict(self._bundle)] * size, strategy="STRICT_SPREAD", name=name, lifetime="detached",
            bundle_label_selector=[avoid] * size if shun else None,
        )  # fmt: skip
        return PlacementGroupHandle(name, size, handle, shun)

    def find(self, name: str, size: int) -> PlacementGroupHandle | None:
        from ray.util.placement_group import get_placement_group

        try:
            return PlacementGroupHandle(name, size, get_placement_group(name))
        except ValueError:
            return None

    def remove(self, group: PlacementGroupHandle) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group.handle)

    def table(self) -> dict[str, Placing]:
        from ray.util.placement_group import placement_group_table

        prefix = names.group(self._job, "")
        found = {}
        for one in placement_group_table().values():
            if one["name"].startswith(prefix) and one["state"] != "REMOVED":
                places = one.get("bundles_to_node_id", {})
                placed = {int(bundle): str(place) for bundle, place in places.items() if place}
                found[one["name"]] = Placing(one["state"] == "CREATED", placed)
        return found

    async def wait(self, group: PlacementGroupHandle) -> None:
        # In a thread of its own: those that asyncio shares are few, and a group without a place
        # may wait for days.
        loop = asyncio.get_running_loop()
        placed: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not placed.done():
                placed.set_result(None)

        def wait() -> None:
            while not placed.done() and not group.over:
                try:
                    if group.handle.wait(WAIT_SLICE_S):
                        break
                # Ray's own RpcError or a plain Exception: the head restarts, or it is removed.
                except Exception as error:
                    if not group.over:
                        log.warning("waiting for %s: %s; trying again", group.name, error)
                    time.sleep(PAUSE_S)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell)

        threading.Thread(target=wait, name=f"wait for {group.name}", daemon=True).start()
        await placed

    async def large(self) -> set[str]:
        alive = await asyncio.to_thread(cluster.alive_nodes)
        return {key for key, one in alive.items() if cluster.fits(self._bundle, one["Resources"])}

    async def answering(self, keys: Iterable[str]) -> set[str]:
        return await ray_nodes.answering(keys)


def names_of(job: str) -> list[str]:
    """All groups of a job that exist, whoever has made them."""
    return list(RayGroups(job, {}).table())


def remove_all(job: str) -> None:
    """With whatever actors are in them."""
    maker = RayGroups(job, {})
    for name in maker.table():
        if (group := maker.find(name, 1)) is not None:
            maker.remove(group)
