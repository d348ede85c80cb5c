"""Deleting pods of one job, also where the API server is busy.

Owns: that. Must not: decide which pods go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import PODS, ApiError
from holdfast.orchestrator.kube.informer import Backoff


class PodDeletion:
    """`slots`: how many requests may be under way."""

    def __init__(self, cluster: KubeClient, namespace: str, slots: asyncio.Semaphore) -> None:
        self._cluster, self._namespace, self._slots = cluster, namespace, slots

    async def once(self, nodes: Iterable[str]) -> None:
        """Raises the first error, after all have been tried."""
        for error in (await self._all(tuple(nodes))).values():
            raise error

    async def surely(self, nodes: Iterable[str]) -> None:
        """Again and again: for pods that are given back, which nobody would ask about any more and
        which would hold their room for as long as the job lives."""
        left, pauses = tuple(nodes), Backoff()
        while left := tuple(await self._all(left)):
            await asyncio.sleep(pauses.next_s())

    async def _all(self, nodes: tuple[str, ...]) -> dict[str, ApiError]:
        """The errors of those that could not be deleted."""
        results = await asyncio.gather(*(self._one(node) for node in nodes))
        return {node: error for node, error in zip(nodes, results, strict=True) if error}

    async def _one(self, node: str) -> ApiError | None:
        async with self._slots:
            try:
                await self._cluster.delete(PODS, self._namespace, node)
            except ApiError as error:
                return error
        return None
