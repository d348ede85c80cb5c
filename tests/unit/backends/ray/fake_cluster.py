"""A Ray cluster in memory, as far as its placement groups go. It places as Ray does: groups in the
order in which they were made, each as a whole, not on Ray nodes that it avoids, and on the fullest
Ray node that has room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from holdfast.orchestrator.backends.ray.placement import GroupState, PlacementGroupHandle


class FakeCluster:
    """Ray nodes by name, with how many bundles each can hold."""

    def __init__(self, **ray_nodes: int) -> None:
        self.ray_nodes = ray_nodes
        self.silent: set[str] = set()
        """Ended Ray nodes that the head still lists."""
        self.groups: dict[str, PlacementGroupHandle] = {}
        self.places: dict[str, dict[int, str]] = {}
        """Group -> bundle -> Ray node."""
        self.num_failures = 0
        """Calls to the head that fail from now on."""
        self.num_probe_failures = 0
        self.num_probes = 0
        self.slow: dict[str, asyncio.Event] = {}
        """Ray nodes whose probe lasts until the event."""
        self.lock = threading.RLock()
        """FakeGroups is called in threads; Ray's head, too, takes one call after the other."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def add(self, ray_node: str, bundles: int = 1) -> None:
        self.ray_nodes[ray_node] = bundles
        self.place()

    def lose(self, ray_node: str) -> None:
        """The head notices that it has ended."""
        with self.lock:
            del self.ray_nodes[ray_node]
            self.silent.discard(ray_node)
            for places in self.places.values():
                for bundle in [one for one, place in places.items() if place == ray_node]:
                    del places[bundle]
        self.place()

    def room(self, ray_node: str) -> int:
        used = [place for places in self.places.values() for place in places.values()]
        return self.ray_nodes[ray_node] - used.count(ray_node)

    def is_placed(self, name: str) -> bool:
        with self.lock:
            group = self.groups.get(name)
            return group is not None and len(self.places[name]) == group.size

    def place(self) -> None:
        with self.lock:
            self._place()
        for loop, event in self._waiting:
            loop.call_soon_threadsafe(event.set)

    def _place(self) -> None:
        for name, group in self.groups.items():
            missing = [one for one in range(group.size) if one not in self.places[name]]
            away = group.avoided | set(self.places[name].values())
            fit = [one for one in self.ray_nodes if one not in away and self.room(one)]
            fit.sort(key=self.room)
            # Ray tries a Ray node that does not answer again and again.
            if len(fit) >= len(missing) and not self.silent & set(fit[: len(missing)]):
                self.places[name] |= dict(zip(missing, fit, strict=False))

    def of(self, job: str) -> FakeGroups:
        return FakeGroups(self, job)


class FakeGroups:
    """Implements GroupApi for one job."""

    def __init__(self, cluster: FakeCluster, job: str) -> None:
        self._cluster, self._job = cluster, job

    def _call(self) -> None:
        if self._cluster.num_failures > 0:
            self._cluster.num_failures -= 1
            raise RuntimeError("the head does not answer")

    def make(self, node: str, size: int, avoided: frozenset[str]) -> PlacementGroupHandle:
        self._call()
        group = PlacementGroupHandle(f"{self._job}/{node}", size, None, avoided)
        with self._cluster.lock:
            self._cluster.places[group.name] = {}
            self._cluster.groups[group.name] = group
            self._cluster.place()
        return group

    def find(self, name: str, size: int) -> PlacementGroupHandle | None:
        return PlacementGroupHandle(name, size) if name in self._cluster.groups else None

    def remove(self, group: PlacementGroupHandle) -> None:
        self._call()
        with self._cluster.lock:
            self._cluster.groups.pop(group.name, None)
            self._cluster.places.pop(group.name, None)
            self._cluster.place()

    def states(self) -> dict[str, GroupState]:
        with self._cluster.lock:
            return {
                name: GroupState(self._cluster.is_placed(name), dict(self._cluster.places[name]))
                for name in self._cluster.groups
                if name.startswith(f"{self._job}/")
            }

    async def wait(self, group: PlacementGroupHandle) -> None:
        changed = asyncio.Event()
        self._cluster._waiting.append((asyncio.get_running_loop(), changed))
        while not self._cluster.is_placed(group.name):
            await changed.wait()
            changed.clear()

    async def large(self) -> set[str]:
        return set(self._cluster.ray_nodes)

    async def answering(self, nodes: Iterable[str]) -> set[str]:
        if self._cluster.num_probe_failures:
            self._cluster.num_probe_failures -= 1
            raise RuntimeError("the head does not answer")
        for slow in self._cluster.slow.keys() & set(nodes):
            self._cluster.num_probes += 1
            await self._cluster.slow[slow].wait()
        return set(nodes) & self._cluster.ray_nodes.keys() - self._cluster.silent
