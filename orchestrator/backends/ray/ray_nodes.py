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
    return {place for place, listens in (await _asked(ray_nodes)).items() if listens is False}


async def answering(ray_nodes: Iterable[str]) -> set[str]:
    """Those that are there for certain: where something new can be put."""
    return {place for place, listens in (await _asked(ray_nodes)).items() if listens}


async def _asked(ray_nodes: Iterable[str]) -> dict[str, bool | None]:
    """What `cluster.listens` says of those that the head takes for alive."""
    alive = await asyncio.to_thread(cluster.alive_nodes)
    asked = {place for place in ray_nodes if place in alive}
    turns = asyncio.Semaphore(AT_ONCE)

    async def listens(place: str) -> bool | None:
        async with turns:
            return await cluster.listens(alive[place])

    return dict(zip(asked, await asyncio.gather(*map(listens, asked)), strict=True))
