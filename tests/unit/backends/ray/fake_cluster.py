"""A Ray cluster as far as its placement groups go: in memory, and placing at once.

Owns: which Ray node holds which bundles. As Ray does it: in the order in which they were made, each
group as a whole, on Ray nodes that it does not shun, on the fullest one that has room.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from holdfast.orchestrator.backends.ray.placement_groups import PlacementGroupHandle, Placing


class FakeCluster:
    """Ray nodes by name, with how many bundles each can hold."""

    def __init__(self, **ray_nodes: int) -> None:
        self.ray_nodes = ray_nodes
        self.silent: set[str] = set()
        """Gone, and the head does not know it yet."""
        self.groups: dict[str, PlacementGroupHandle] = {}
        self.places: dict[str, dict[int, str]] = {}
        self.fails = 0
        """So many calls to the head fail from now on."""
        self.fails_to_answer = 0
        self.num_asked = 0
        self.slow: dict[str, asyncio.Event] = {}
        """Ray nodes of which nobody says before this whether they are there."""
        self.one_at_a_time = threading.RLock()
        """Makers are called in threads; Ray's head, too, takes one call after the other."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def add(self, ray_node: str, bundles: int = 1) -> None:
        self.ray_nodes[ray_node] = bundles
        self.place()

    def lose(self, ray_node: str) -> None:
        """The head notices that it is gone."""
        with self.one_at_a_time:
            del self.ray_nodes[ray_node]
            self.silent.discard(ray_node)
            for places in self.places.values():
                for bundle in [one for one, place in places.items() if place == ray_node]:
                    del places[bundle]
        self.place()

    def room(self, ray_node: str) -> int:
        used = [place for places in self.places.values() for place in places.values()]
        return self.ray_nodes[ray_node] - used.count(ray_node)

    def whole(self, name: str) -> bool:
        with self.one_at_a_time:
            group = self.groups.get(name)
            return group is not None and len(self.places[name]) == group.size

    def place(self) -> None:
        with self.one_at_a_time:
            self._place()
        for loop, event in self._waiting:
            loop.call_soon_threadsafe(event.set)

    def _place(self) -> None:
        for name, group in self.groups.items():
            missing = [one for one in range(group.size) if one not in self.places[name]]
            away = group.shun | set(self.places[name].values())
            fit = [one for one in self.ray_nodes if one not in away and self.room(one)]
            fit.sort(key=self.room)
            # What is tried where nobody answers, is tried there again.
            if len(fit) >= len(missing) and not self.silent & set(fit[: len(missing)]):
                self.places[name] |= dict(zip(missing, fit, strict=False))

    def of(self, job: str) -> FakeMaker:
        return FakeMaker(self, job)


class FakeMaker:
    """Implements groups.Maker for one job."""

    def __init__(self, cluster: FakeCluster, job: str) -> None:
        self._cluster, self._job = cluster, job

    def _call(self) -> None:
        if self._cluster.fails > 0:
            self._cluster.fails -= 1
            raise RuntimeError("the head does not answer")

    def make(self, node: str, size: int, shun: frozenset[str]) -> PlacementGroupHandle:
        self._call()
        group = PlacementGroupHandle(f"{self._job}/{node}", size, None, shun)
        with self._cluster.one_at_a_time:
            self._cluster.places[group.name] = {}
            self._cluster.groups[group.name] = group
            self._cluster.place()
        return group

    def find(self, name: str, size: int) -> PlacementGroupHandle | None:
        return PlacementGroupHandle(name, size) if name in self._cluster.groups else None

    def remove(self, group: PlacementGroupHandle) -> None:
        self._call()
        with self._cluster.one_at_a_time:
            self._cluster.groups.pop(group.name, None)
            self._cluster.places.pop(group.name, None)
            self._cluster.place()

    def table(self) -> dict[str, Placing]:
        with self._cluster.one_at_a_time:
            return {
                name: Placing(self._cluster.whole(name), dict(self._cluster.places[name]))
                for name in self._cluster.groups
                if name.startswith(f"{self._job}/")
            }

    async def wait(self, group: PlacementGroupHandle) -> None:
        news = asyncio.Event()
        self._cluster._waiting.append((asyncio.get_running_loop(), news))
        while not self._cluster.whole(group.name):
            await news.wait()
            news.clear()

    async def large(self) -> set[str]:
        return set(self._cluster.ray_nodes)

    async def answering(self, ray_nodes: Iterable[str]) -> set[str]:
        if self._cluster.fails_to_answer:
            self._cluster.fails_to_answer -= 1
            raise RuntimeError("the head does not answer")
        for slow in self._cluster.slow.keys() & set(ray_nodes):
            self._cluster.num_asked += 1
            await self._cluster.slow[slow].wait()
        return set(ray_nodes) & self._cluster.ray_nodes.keys() - self._cluster.silent
