"""Kubernetes nodes as far as a job must know them: their labels, and whether they are gone.

Owns: looking them up, one by one and only when somebody asks, kept for a while. Must not: watch all
nodes of a cluster, or change any.

The right to get nodes is cluster-wide; an operator of one namespace may lack it. Then no node ever
counts as gone, and no label is known.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import NODES, ApiError, Forbidden

KEEP_S = 600.0
"""Labels of racks and zones do not move."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"

log = logging.getLogger("holdfast.kubernetes")


class NodeObservation(NamedTuple):
    at_s: float
    labels: dict[str, str]


class NodeInformer:
    """Shared by all jobs."""

    def __init__(self, cluster: KubeClient) -> None:
        self._cluster = cluster
        self._seen: dict[str, NodeObservation] = {}
        self._asking: set[str] = set()
        self._forbidden = False

    def labels(self, place: str) -> dict[str, str]:
        """What is known by now; ask `learn` first."""
        seen = self._seen.get(place)
        return seen.labels if seen is not None else {}

    async def learn(self, place: str) -> None:
        """Have the labels of a node at hand. Errors leave them unknown."""
        now = asyncio.get_running_loop().time()
        seen = self._seen.get(place)
        if self._forbidden or (seen is not None and now - seen.at_s < KEEP_S):
            return
        if place in self._asking:  # a job's pods may come to one place together
            return
        self._asking.add(place)
        try:
            found = await self._find(place)
        finally:
            self._asking.discard(place)
        if found is not None:
            self._seen[place] = NodeObservation(now, dict(found["metadata"].get("labels") or {}))

    async def is_gone(self, place: str) -> bool:
        """Its Node object is gone, or an administrator has said that it is off (out-of-service):
        only then is it safe to remove a pod that its kubelet has not confirmed to have ended."""
        if not place or self._forbidden:
            return False
        try:
            found = await self._cluster.find(NODES, "", place)
        except ApiError as error:
            self._note(error)
            return False
        if found is None:
            return True
        taints = found.get("spec", {}).get("taints") or ()
        return any(taint["key"] == OUT_OF_SERVICE for taint in taints)

    async def _find(self, place: str) -> Document | None:
        try:
            return await self._cluster.find(NODES, "", place)
        except ApiError as error:
            self._note(error)
            return None

    def _note(self, error: ApiError) -> None:
        if isinstance(error, Forbidden):
            self._forbidden = True
            log.warning("nodes cannot be read: no topology, no forced removal (%s)", error)
        else:
            log.info("a node could not be read: %s", error)
