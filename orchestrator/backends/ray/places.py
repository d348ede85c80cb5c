"""Ray nodes as far as a job must know them: where they are, and whether they still answer.

Owns: looking that up. Must not: know which node of the job is where.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from ..topology import coordinates
from . import cluster


async def topology(ray_node: str, keys: Sequence[str]) -> tuple[str, ...]:
    """From its labels (`ray start --labels`)."""
    found = await asyncio.to_thread(cluster.alive_nodes)
    return coordinates(found.get(ray_node, {}).get("Labels", {}), keys)


async def silent(ray_nodes: Iterable[str]) -> set[str]:
    """Those that take no connections any more, though the head has not noticed yet."""
    alive = await asyncio.to_thread(cluster.alive_nodes)
    asked = {place for place in ray_nodes if place in alive}
    answers = await asyncio.gather(*(cluster.answers(alive[place]) for place in asked))
    return {place for place, answer in zip(asked, answers, strict=True) if not answer}
