"""Ray nodes that will be taken away: a preemption, or a drain by a person or the autoscaler.

Ray publishes a drain on no channel: the head stores it and answers when asked, which is why Ray
Serve and Ray Train poll, too. The head does not give the reason of a drain before the Ray node has
ended, but the Ray node's raylet logs it at once, and an agent's actor is a child of that raylet.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

POLL_S = 2.0
"""A question costs the head less than a millisecond, and the controller two; clouds give 30 s of
notice or more."""
REASON_S = 2.0
LOG_TAIL_BYTES = 1 << 20

NoticeSink = Callable[[str, str, float], None]
"""(node, detail, seconds until the end; 0: unknown)."""

log = logging.getLogger("holdfast.ray")


class RayNodeLookup(NamedTuple):
    """Places of the job's nodes; the backend keeps it current."""

    ray_nodes: Mapping[str, str]
    """Node -> Ray node."""
    actors: Mapping[str, Any]


def draining() -> dict[str, int]:
    """Ray node -> deadline. A round trip to the head. There is no public function for it; Ray's own
    libraries use this one."""
    from ray._private.state import state

    deadlines = state.get_draining_nodes()
    return {str(node): int(deadline) for node, deadline in deadlines.items()}


class Drains:
    """Polls for draining Ray nodes, and reports each node of the job that is on one."""

    def __init__(
        self,
        nodes: RayNodeLookup,
        on_notice: NoticeSink,
        source: Callable[[], dict[str, int]] = draining,
        poll_s: float = POLL_S,
    ) -> None:
        self._nodes, self._on_notice = nodes, on_notice
        self._source, self._poll_s = source, poll_s
        self.ray_nodes: dict[str, int] = {}
        """Draining Ray nodes, with the deadline (Unix time in ms, 0: none)."""
        self._reported: set[str] = set()

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        while True:
            try:
                self.ray_nodes = await asyncio.to_thread(self._source)
            # A head that restarts; Ray raises its own RpcError, but also plain RuntimeErrors.
            except Exception as error:
                log.warning("the head does not answer which Ray nodes drain: %s", error)
            leaving = [n for n, node in self._nodes.ray_nodes.items() if node in self.ray_nodes]
            self._reported.intersection_update(leaving)
            for node in leaving:
                if node not in self._reported:
                    self._reported.add(node)
                    await self._report(node)
            await asyncio.sleep(self._poll_s)

    def joined(self, node: str) -> None:
        """The controller knows this node only now: an earlier report was ignored."""
        self._reported.discard(node)

    async def _report(self, node: str) -> None:
        from ray.exceptions import RayError

        reason = ""
        try:
            async with asyncio.timeout(REASON_S):
                reason = await self._nodes.actors[node].drain_reason.remote()
        except (RayError, TimeoutError, KeyError):
            pass  # the notice matters more than its reason
        ray_node = self._nodes.ray_nodes.get(node, "")
        deadline_ms = self.ray_nodes.get(ray_node, 0)
        left_s = max(1.0, deadline_ms / 1000 - time.time()) if deadline_ms else 0.0
        self._on_notice(node, notice_text(ray_node, reason, left_s), left_s)


def notice_text(ray_node: str, reason: str, left_s: float) -> str:
    """Text for the incident."""
    # A Ray node that is in use can be drained for no other reason than preemption.
    why = reason or "preemption"
    until = f", which ends in {left_s:.0f} s," if left_s else ""
    return f"Ray drains its Ray node {ray_node[:8]}{until} for {why}"


DRAIN_LINE = re.compile(
    r"Drain raylet RPC.*?Drain reason: DRAIN_NODE_REASON_(\w+)\. Drain reason message: (.*)"
)


def reason_in_log(logs: Path, raylet_pid: int) -> str:
    """A raylet's own log of its drain, such as "preemption: spot instance is reclaimed"; empty:
    there is none."""
    for path in sorted(logs.glob("raylet*.out")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        own = [line for line in lines if f" {raylet_pid} {raylet_pid}]" in line]
        for match in filter(None, (DRAIN_LINE.search(line) for line in reversed(own))):
            kind, message = match[1].lower().replace("_", " "), match[2].strip()
            return f"{kind}: {message}" if message else kind
    return ""
