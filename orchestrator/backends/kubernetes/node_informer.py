"""Kubernetes nodes: their labels, and whether they still exist.

Nodes are read one by one when a job needs them, and labels are cached; the operator does not watch
all nodes of a cluster. The right to get nodes is cluster-wide, and an operator of one namespace may
lack it: then no labels are known and no node counts as gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import NODES, ApiError, Forbidden

from . import pod_conditions
from .placement import KnownNode

LABELS_FRESH_S = 600.0
"""Labels of racks and zones hardly change."""
NOTICE_CHECK_S = 10.0
"""Seconds between two looks at the taints of a Kubernetes node with running pods: a spot machine is
taken away 30 s after its notice, or later."""
MAX_READS_S = 20.0
"""Looks in a second, at most, whatever the number of nodes."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"

log = logging.getLogger("holdfast.kubernetes")


class NodeObservation(NamedTuple):
    at_s: float
    node: KnownNode


class NodeInformer:
    """Shared by all jobs of an operator."""

    def __init__(self, cluster: KubeClient, notice_check_s: float = NOTICE_CHECK_S) -> None:
        self._cluster, self._notice_check_s = cluster, notice_check_s
        self._seen: dict[str, NodeObservation] = {}
        self._reading: set[str] = set()
        self._forbidden = False
        self._notices: dict[str, str] = {}

    async def watch_notices(
        self, machines: Callable[[], Iterable[str]], on_notice: Callable[[str], None]
    ) -> None:
        """Read the taints of these nodes again and again, until cancelled. `on_notice(node)`: it
        will be taken away."""
        while not self._forbidden:
            used = sorted(machines())
            self._notices = {name: why for name, why in self._notices.items() if name in used}
            pause_s = max(self._notice_check_s / max(1, len(used)), 1 / MAX_READS_S)
            for node in used or [""]:
                await asyncio.sleep(pause_s)
                if node and node not in self._notices and await self._has_notice(node):
                    on_notice(node)

    async def _has_notice(self, node: str) -> bool:
        try:
            document: Document = await self._cluster.find(NODES, "", node) or {}
        except ApiError as error:
            self._report(error)
            return False
        why = pod_conditions.notice(document.get("spec", {}).get("taints") or ())
        if why:
            self._notices[node] = why
        return bool(why)

    def notice(self, node: str) -> str:
        """Reason why the node will be taken away, from `watch_notices`; empty: none is known."""
        return self._notices.get(node, "")

    def labels(self, node: str) -> dict[str, str]:
        """The labels that `read_labels` has found; empty before."""
        seen = self._seen.get(node)
        return dict(seen.node.labels) if seen is not None else {}

    def known(self, node: str) -> KnownNode | None:
        """The node that `read_labels` has read; None before."""
        seen = self._seen.get(node)
        return seen.node if seen is not None else None

    async def read_labels(self, node: str) -> None:
        """Read the labels unless they are fresh. Errors leave them unknown."""
        now = asyncio.get_running_loop().time()
        seen = self._seen.get(node)
        if self._forbidden or (seen is not None and now - seen.at_s < LABELS_FRESH_S):
            return
        if node in self._reading:  # several pods of a job may start on one node
            return
        self._reading.add(node)
        try:
            document = await self._cluster.find(NODES, "", node)
        except ApiError as error:
            self._report(error)
        else:
            if document is not None:
                self._seen[node] = NodeObservation(now, known_node(node, document))
        finally:
            self._reading.discard(node)

    async def is_gone(self, node: str) -> bool:
        """The Node object is gone or has the taint out-of-service. Only then is it safe to remove a
        pod whose end the kubelet has not confirmed."""
        if not node or self._forbidden:
            return False
        try:
            document: Document | None = await self._cluster.find(NODES, "", node)
        except ApiError as error:
            self._report(error)
            return False
        if document is None:
            return True
        taints = document.get("spec", {}).get("taints") or ()
        return any(taint["key"] == OUT_OF_SERVICE for taint in taints)

    def _report(self, error: ApiError) -> None:
        if isinstance(error, Forbidden):
            self._forbidden = True
            log.warning("nodes cannot be read: no topology and no forced deletion (%s)", error)
        else:
            log.info("a node could not be read: %s", error)


def known_node(name: str, document: Document) -> KnownNode:
    return KnownNode(
        name,
        dict(document["metadata"].get("labels") or {}),
        tuple(document.get("spec", {}).get("taints") or ()),
        dict(document.get("status", {}).get("allocatable") or {}),
    )
