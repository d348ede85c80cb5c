"""Ray nodes that will be taken away: a preemption, a drain by a person or by the autoscaler.

Owns: noticing that a Ray node of this job drains, why, and until when. Must not: decide what is
done about it.

Ray publishes a drain on no channel: the head keeps it and answers when asked, which is why Ray
Serve and Ray Train ask again and again as well. So do we: one small request to the head, on which
nothing waits. The reason of a drain is told to nobody before the Ray node has ended, but the Ray
node's raylet logs it at once, and an agent's actor is a child of that raylet.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

LOOK_EVERY_S = 2.0
"""A question costs the head less than a millisecond, and us two; clouds give 30 s of notice or
more."""
REASON_S = 2.0
LOG_TAIL_BYTES = 1 << 20

NoticeSink = Callable[[str, str, float], None]
"""(node, detail, seconds that it has left at least; 0: nobody knows)."""

log = logging.getLogger("holdfast.ray")


class RayNodeLookup(NamedTuple):
    """What is known of the job's nodes; kept up to date by the backend."""

    ray_nodes: Mapping[str, str]
    """Node -> Ray node."""
    actors: Mapping[str, Any]


class Drains:
    """Which Ray nodes drain."""

    def __init__(self, places: RayNodeLookup, on_notice: NoticeSink) -> None:
        self._places, self._on_notice = places, on_notice
        self.ray_nodes: dict[str, int] = {}
        """Those that drain, with the deadline (Unix time in ms, 0: none)."""
        self._told: set[str] = set()

    async def watch(self) -> None:
        """For ever."""
        while True:
            try:
                self.ray_nodes = await asyncio.to_thread(draining)
            # A head that restarts; Ray raises its own RpcError, but also plain RuntimeErrors.
            except Exception as error:
                log.warning("drains cannot be seen at this moment: %s", error)
            leaving = [n for n, place in self._places.ray_nodes.items() if place in self.ray_nodes]
            self._told.intersection_update(leaving)
            for node in leaving:
                if node not in self._told:
                    self._told.add(node)
                    await self._tell(node)
            await asyncio.sleep(LOOK_EVERY_S)

    def joined(self, node: str) -> None:
        """It is known only now: what was told before was told too early."""
        self._told.discard(node)

    async def _tell(self, node: str) -> None:
        from ray.exceptions import RayError

        reason = ""
        try:
            async with asyncio.timeout(REASON_S):
                reason = await self._places.actors[node].drain_reason.remote()
        except (RayError, TimeoutError, KeyError):
            pass  # the notice matters more than its reason
        place = self._places.ray_nodes.get(node, "")
        left_s = seconds_left(self.ray_nodes.get(place, 0))
        self._on_notice(node, words(place, reason, left_s), left_s)


def draining() -> dict[str, int]:
    """Ray node -> deadline. A round trip to the head. No public function tells it; this is the one
    that Ray's own libraries use."""
    from ray._private.state import state

    found = state.get_draining_nodes()
    return {str(node): int(deadline) for node, deadline in found.items()}


def seconds_left(deadline_ms: int) -> float:
    return max(1.0, deadline_ms / 1000 - time.time()) if deadline_ms else 0.0


def words(ray_node: str, reason: str, left_s: float) -> str:
    """For the incident."""
    # Ray lets nobody drain a Ray node that is in use for another reason than this.
    why = reason or "preemption"
    until = f", which ends in {left_s:.0f} s," if left_s else ""
    return f"Ray drains its Ray node {ray_node[:8]}{until} for {why}"


DRAIN_LINE = re.compile(
    r"Drain raylet RPC.*?Drain reason: DRAIN_NODE_REASON_(\w+)\. Drain reason message: (.*)"
)


def reason_in_log(logs: Path, raylet_pid: int) -> str:
    """What a raylet has logged of its own drain, such as "preemption: spot instance is reclaimed";
    empty where it is not found."""
    for path in sorted(logs.glob("raylet*.out")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        own = [line for line in lines if f" {raylet_pid} {raylet_pid}]" in line]
        for found in filter(None, (DRAIN_LINE.search(line) for line in reversed(own))):
            kind, message = found[1].lower().replace("_", " "), found[2].strip()
            return f"{kind}: {message}" if message else kind
    return ""
