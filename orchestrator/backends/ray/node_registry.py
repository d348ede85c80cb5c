"""What a new controller must know of the nodes of an old one, in the cluster's store.

Owns: that record and the order in which it is written. Must not: decide what is in it.
"""

from __future__ import annotations

import asyncio

import msgspec

from .kv import JobKeyValueStore

NODES = "nodes"
"""Key in the cluster's store."""

PLACES_KEPT = 64
"""Of ended nodes. More than that many bad machines at once are no job's problem any more."""


class RayNodeRegistry(msgspec.Struct):
    next_number: int = 0
    nodes: dict[str, tuple[str, int]] = {}
    """Node -> its group and bundle."""
    starting: set[str] = set()
    """Nodes whose actor may not have been made yet."""
    groups: dict[str, int] = {}
    """Name -> bundles, of those that have nodes."""
    places: dict[str, str] = {}
    """Node -> Ray node, those of the last ended ones included: some of them are to be avoided."""

    def prune_places(self) -> None:
        ended = [node for node in self.places if node not in self.nodes]
        for node in ended[:-PLACES_KEPT]:
            del self.places[node]


class RegistryWriter:
    """Writes it. One write at a time: an older state must never overtake a newer one."""

    def __init__(self, keys: JobKeyValueStore) -> None:
        self._keys = keys
        self._known = RayNodeRegistry()
        self._writing: asyncio.Task[None] | None = None
        self._dirty = False

    async def load(self) -> RayNodeRegistry:
        data = await asyncio.to_thread(self._keys.get, NODES)
        if data is not None:
            self._known = msgspec.json.decode(data, type=RayNodeRegistry)
        return self._known

    async def save(self) -> None:
        """As it is now; durable when this returns."""
        self._dirty = True
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())
        await asyncio.shield(self._writing)

    async def settle(self) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _write(self) -> None:
        while self._dirty:
            self._dirty = False
            await asyncio.to_thread(self._keys.put, NODES, msgspec.json.encode(self._known))
