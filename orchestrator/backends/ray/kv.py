"""The key-value store of a Ray cluster's head (GCS), as one job sees it: the job's keys, and the
registry of its nodes that a new controller reads.

Ray keeps the store in the head's memory, or in Redis where the cluster has GCS fault tolerance;
then it outlives the head. Ray's own libraries (Serve, Tune, the job server) use
`ray.experimental.internal_kv`; it is not part of the documented API, so only this module calls it.
Calls block for a round trip.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import msgspec

from . import names

_NAMESPACE = names.NAMESPACE.encode()
RECORD = "record"
"""The submission (ControllerOrder, msgpack). The command that creates it has the job's name."""
ENDED = "ended"
"""JSON {view, refusal}: how the job ended. Without it there is, or was, a controller."""
NODES = "nodes"
"""The RayNodeRegistry, JSON."""


class JobKeyValueStore:
    """The keys of one job."""

    def __init__(self, job: str) -> None:
        self._prefix = f"jobs/{job}/"

    def get(self, key: str) -> bytes | None:
        value: bytes | None = _kv()._internal_kv_get(self._key(key), namespace=_NAMESPACE)
        return value

    def put(self, key: str, value: bytes) -> None:
        _kv()._internal_kv_put(self._key(key), value, overwrite=True, namespace=_NAMESPACE)

    def create(self, key: str, value: bytes) -> bool:
        """Put it where there is none; False: there is one, and it stays."""
        exists: bool = _kv()._internal_kv_put(
            self._key(key), value, overwrite=False, namespace=_NAMESPACE
        )
        return not exists

    def exists(self, key: str) -> bool:
        return bool(_kv()._internal_kv_exists(self._key(key), namespace=_NAMESPACE))

    def delete(self, *keys: str) -> None:
        for key in keys:
            _kv()._internal_kv_del(self._key(key), namespace=_NAMESPACE)

    def list(self, prefix: str) -> list[str]:
        """Sorted, without the job's own prefix."""
        keys = _kv()._internal_kv_list(self._key(prefix), namespace=_NAMESPACE)
        return sorted(key.decode().removeprefix(self._prefix) for key in keys)

    def clear(self) -> None:
        """Delete the job's keys. ENDED and then RECORD, which holds the job's name, come last: an
        interrupted deletion leaves a job that has ended."""
        self.delete(*sorted(self.list(""), key=lambda key: (key == RECORD, key == ENDED)))

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()


def jobs() -> list[str]:
    """Names of the jobs that have a record, sorted."""
    keys = _kv()._internal_kv_list(b"jobs/", namespace=_NAMESPACE)
    parts = [key.decode().split("/") for key in keys]
    return sorted(part[1] for part in parts if part[2:] == [RECORD])


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


class RayNodeRegistry(msgspec.Struct):
    """The nodes of an earlier controller, for a new one."""

    ENDED_KEPT: ClassVar[int] = 64
    """Ended nodes whose Ray node is remembered."""

    next_number: int = 0
    nodes: dict[str, tuple[str, int]] = {}
    """Node -> its group and bundle."""
    starting: set[str] = set()
    """Nodes whose actor may not exist yet."""
    groups: dict[str, int] = {}
    """Name -> number of bundles, of groups that have nodes."""
    ray_nodes: dict[str, str] = {}
    """Node -> Ray node, also of recently ended nodes: some Ray nodes are to be avoided."""

    def prune_ended(self) -> None:
        ended = [node for node in self.ray_nodes if node not in self.nodes]
        for node in ended[: -self.ENDED_KEPT]:
            del self.ray_nodes[node]


class RegistryWriter:
    """Writes the registry, one write at a time: an older state never overwrites a newer one."""

    def __init__(self, store: JobKeyValueStore) -> None:
        self._store = store
        self._registry = RayNodeRegistry()
        self._writing: asyncio.Task[None] | None = None
        self._dirty = False

    async def load(self) -> RayNodeRegistry:
        data = await asyncio.to_thread(self._store.get, NODES)
        if data is not None:
            self._registry = msgspec.json.decode(data, type=RayNodeRegistry)
        return self._registry

    async def save(self) -> None:
        """Write the registry as it is now; durable when this returns."""
        self._dirty = True
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())
        await asyncio.shield(self._writing)

    async def flush(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _write(self) -> None:
        while self._dirty:
            self._dirty = False
            await asyncio.to_thread(self._store.put, NODES, msgspec.json.encode(self._registry))
