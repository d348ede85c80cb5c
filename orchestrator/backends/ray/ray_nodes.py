"""Ray nodes: this process's own, those that the head lists, whether they still listen, and how many
have room for a bundle."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.planner.gpus import GpusFound

from ..base import coordinates
from . import names

MAX_CONNECTIONS = 64
"""Connections at the same time: each needs an open file of often only a thousand."""


def own_node() -> dict[str, str]:
    """The Ray node of this process."""
    import ray

    context = ray.get_runtime_context()
    return {
        "ray_node": context.get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "hostname": socket.gethostname(),
    }


def log_directory(job: str, job_id: str) -> Path:
    """Directory in which the dashboard's log view finds a job's files, on this Ray node."""
    import ray

    node = ray._private.worker._global_node  # Ray has no public way to its session directory
    return Path(node.get_logs_dir_path()) / names.logs(job, job_id)


def alive_nodes() -> dict[str, dict[str, Any]]:
    """Ray nodes by id, as the head lists them."""
    import ray

    return {str(ray_node["NodeID"]): ray_node for ray_node in ray.nodes() if ray_node["Alive"]}


async def topology(ray_node: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Topology by its labels (`ray start --labels`)."""
    nodes = await asyncio.to_thread(alive_nodes)
    return coordinates(nodes.get(ray_node, {}).get("Labels", {}), keys)


# -- whether they listen -----------------------------------------------------------------------
async def dead(ray_nodes: Iterable[str]) -> set[str]:
    """Ray nodes whose raylet has ended, though the head still lists them."""
    return {node for node, listens in (await _probe(ray_nodes)).items() if listens is False}


async def answering(ray_nodes: Iterable[str]) -> set[str]:
    """Ray nodes that certainly exist: new bundles can be placed there."""
    return {node for node, listens in (await _probe(ray_nodes)).items() if listens}


async def _probe(ray_nodes: Iterable[str]) -> dict[str, bool | None]:
    alive = await asyncio.to_thread(alive_nodes)
    asked = {node for node in ray_nodes if node in alive}
    connections = asyncio.Semaphore(MAX_CONNECTIONS)

    async def probe(node: str) -> bool | None:
        async with connections:
            return await raylet_listens(alive[node])

    return dict(zip(asked, await asyncio.gather(*map(probe, asked)), strict=True))


async def raylet_listens(node: dict[str, Any]) -> bool | None:
    """True if a Ray node's raylet accepts connections. False: it has ended; the head notices that
    only after missed health checks, the kernel of its machine at once. None: unknown. No answer, no
    route or no free file descriptor may be a problem of this machine."""
    address = str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])
    try:
        async with asyncio.timeout(1.0):
            _reader, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    writer.close()
    return True


# -- room for bundles --------------------------------------------------------------------------
def fits(bundle: dict[str, float], resources: dict[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in bundle.items())


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """True if a Ray node has these labels: `value`, `!value`, `in(a,b)` or `!in(a,b)`."""
    for key, wanted in selector.items():
        text = wanted.removeprefix("!")
        values = text[3:-1].split(",") if text.startswith("in(") else [text]
        if (labels.get(key) in values) == wanted.startswith("!"):
            return False
    return True


def suits(bundle: dict[str, float], selector: Mapping[str, str], ray_node: dict[str, Any]) -> bool:
    """True if a Ray node could hold a bundle if it were empty."""
    labels = ray_node.get("Labels") or {}
    return fits(bundle, ray_node["Resources"]) and selects(selector, labels)


def gpus_found(job: TrainingJob) -> GpusFound:
    """GPUs of this cluster, from which `gpu: auto` of a job is decided: those of Ray nodes with the
    labels and custom resources that the job requests."""
    ray = job.spec.ray
    if ray.accelerator_type is not None:
        return GpusFound(0, f"spec.ray.acceleratorType is {ray.accelerator_type}", wanted=True)
    needs = {name: float(count) for name, count in ray.custom_resources.items()}
    usable = [node for node in alive_nodes().values() if suits(needs, ray.label_selector, node)]
    most = max((int(node["Resources"].get("GPU", 0)) for node in usable), default=0)
    has = f"{most} GPU{'s' * (most > 1)}" if most else "no GPU"
    return GpusFound(most, f"of {len(usable)} Ray nodes that it may use the largest has {has}")


def capacity_report(count: int, bundle: dict[str, float], selector: Mapping[str, str]) -> str:
    """Reason why that many bundles cannot be placed: what the cluster has, and what is free."""
    import ray

    nodes = alive_nodes()
    suitable = [node for node in nodes.values() if suits(bundle, selector, node)]
    free = ray.available_resources()
    total = ray.cluster_resources()
    parts = [f"{free.get(k, 0.0):g} of {total.get(k, 0.0):g} {k}" for k in bundle]
    each = " + ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    labels = ", ".join(f"{key}={value}" for key, value in selector.items())
    like = f"that large and labelled {labels}" if labels else "that large"
    return (
        f"{count} more nodes of {each} each on a Ray node of its own: the cluster has "
        f"{len(nodes)} Ray nodes, {len(suitable)} of them {like}; free are {', '.join(parts)}"
    )
