"""Ray nodes as far as a job must know them: where they are, and whether they are gone.

Owns: looking that up. Must not: know which node of the job is where.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from ..topology import coordinates
from . import cluster

AT_ONCE = 64
"""Connections that are tried. Each needs an open file, and a process may often have a thousand."""


async def topology(ray_node: str, keys: Sequence[str]) -> tuple[str, ...]:
    """From its labels (`ray start --labels`)."""
    found = await asyncio.to_thread(cluster.alive_nodes)
    return coordinates(found.get(ray_node, {}).get("Labels", {}), keys)


async def ended(ray_nodes: Iterable[str]) -> set[str]:
    """Those whose raylet has ended, though the head has not noticed yet."""
    alive = await asyncio.to_thread(cluster.alive_nodes)
    asked = {place for place in ray_nodes if place in alive}
    turns = asyncio.Semaphore(AT_ONCE)

    async def refuses(place: str) -> bool:
        async with turns:
            return await cluster.refuses(alive[place])

    refused = await asyncio.gather(*(refuses(place) for place in asked))
    return {place for place, gone in zip(asked, refused, strict=True) if gone}
