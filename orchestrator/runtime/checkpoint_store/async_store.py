"""The storage tier as the event loop sees it: five verbs that never block it.

Owns: the interface, and the way to it over a thread. Must not: decide, or know where the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.orchestrator.protocol.facts import ShardFile
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.protocol.mesh import Mesh

from .serial_executor import SerialExecutor
from .store import CheckpointStore


class AsyncCheckpointStore(Protocol):
    """One job's checkpoints. Calls are carried out in the order in which they were made."""

    async def prepare(self) -> None:
        """Make the place and prove that it can be written. Raises UserError."""

    async def manifests(self) -> list[Manifest]:
        """What is committed, oldest step first. Raises HoldfastError when nobody can tell."""

    async def commit(self, step: int, mesh: Mesh, files: tuple[ShardFile, ...]) -> int:
        """Write the manifest of a complete set of files; returns their bytes."""

    async def delete(self, step: int, generation: int) -> None:
        """Delete a checkpoint; it is no error when it is gone."""

    async def settle(self) -> None:
        """Until everything asked so far has ended."""


class ThreadedCheckpointStore:
    """A Storage that this process reaches by itself."""

    def __init__(self, opening: Callable[[], CheckpointStore], strand: SerialExecutor) -> None:
        """`opening` is called in a thread, with the first call, and again until it succeeds: some
        drivers connect when they are made."""
        self._opening, self._strand = opening, strand
        self._opened: CheckpointStore | None = None

    async def prepare(self) -> None:
        await self._strand.call(lambda: self._storage().prepare())

    async def manifests(self) -> list[Manifest]:
        return await self._strand.call(lambda: self._storage().manifests())

    async def commit(self, step: int, mesh: Mesh, files: tuple[ShardFile, ...]) -> int:
        return await self._strand.call(lambda: self._storage().commit(step, mesh, files))

    async def delete(self, step: int, generation: int) -> None:
        await self._strand.call(lambda: self._storage().delete(step, generation))

    async def settle(self) -> None:
        await self._strand.settle()

    def _storage(self) -> CheckpointStore:
        if self._opened is None:
            self._opened = self._opening()
        return self._opened
