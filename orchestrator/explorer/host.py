"""Main memory of a node and storage: offloaded states, staged checkpoints, copies for a buddy."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from ..api.v1alpha1 import TrainingJob
from ..planner.choose import memory_on, needs_buddy
from ..planner.memory import (
    PROCESS_BYTES,
    checkpoint_bytes,
    device_bytes,
    model_state_bytes,
    shard_bytes,
    state_bytes,
)
from ..planner.micro_batch import fitted_layout
from ..planner.workload import layout_of, workload_of
from ..protocol.facts import NodeFacts
from ..protocol.host_memory import (
    BUDDY_BUFFERS,
    BUFFERS,
    COPIES,
    HostMemory,
    HostRoom,
    plan_host_memory,
)
from ..protocol.mesh import Mesh


class HostRow(msgspec.Struct, frozen=True):
    """Bytes of one node's main memory, or of one checkpoint in storage."""

    what: str
    where: Literal["node", "storage"]
    num_bytes: int
    formula: str
    exact: bool = False


def host_rows(job: TrainingJob, mesh: Mesh, host: HostMemory | None = None) -> tuple[HostRow, ...]:
    """All rows for a recipe; empty for scripts and modules, whose model is unknown. `host`: what a
    node's memory holds, as plan_host says; None: everything."""
    work = workload_of(job)
    if work is None:
        return ()
    layout, workers = layout_of(job, mesh), job.spec.workers_per_node
    checkpoint, rows = job.spec.checkpoint, []
    if layout.offload:
        per, ranks = state_bytes(work), mesh.num_shards // mesh.pipeline
        formula = f"{workers} workers x {per:.4g} P / S; S {ranks}"
        size = workers * model_state_bytes(work, layout)
        rows.append(HostRow("offloaded shards, gradients, moments", "node", size, formula))
    buddy = needs_buddy(job, mesh) if host is None else host.grant.buddy
    buffers = BUDDY_BUFFERS if buddy else BUFFERS
    if host is not None:
        buffers = host.grant.buffers
    shards = mesh.shards_per_node(workers)
    per, exact = checkpoint_bytes(work), work.optimizer == "adamw"
    unit = shards * shard_bytes(work, layout)
    formula = f"{shards} shards x up to {buffers} buffers x {per:.4g} P / {mesh.num_shards}"
    if checkpoint.memory.every_steps == "auto" and buffers > 1:
        formula += f"; staged as often as {checkpoint.memory.budget_percent:g} % of a step allow"
    tier = checkpoint.memory.every_steps and buffers > 1
    what = "memory tier: staged checkpoints" if tier else "staged for storage"
    rows.append(HostRow(what, "node", buffers * unit, formula, exact=exact))
    if buddy:
        formula = f"{shards} shards x {COPIES} copies x {per:.4g} P / {mesh.num_shards}"
        what = "memory tier: copies for the buddy"
        rows.append(HostRow(what, "node", COPIES * unit, formula))
    size = math.ceil(per * work.counts.total)
    rows.append(HostRow("one checkpoint", "storage", size, f"{per:.4g} P", exact=exact))
    return tuple(rows)


def plan_host(job: TrainingJob, mesh: Mesh, node: NodeFacts) -> HostMemory | None:
    """Staged state that a node like this one can hold; the agents plan in the same way, from
    measurements. None: the model or the node's memory is not known."""
    work = workload_of(job)
    if work is None:
        return None
    layout = fitted_layout(job, mesh, memory_on(job, [node]).device)
    workers, memory = job.spec.workers_per_node, job.spec.resources.memory
    limit = min([n for n in (node.memory_bytes, int(memory or 0) * workers) if n], default=0)
    on_cpu = not job.spec.resources.num_gpus
    if not limit or not (on_cpu or node.gpus):
        return None
    used = workers * (PROCESS_BYTES + on_cpu * device_bytes(work, layout))
    if layout.offload:
        used += workers * model_state_bytes(work, layout)
    return plan_host_memory(
        HostRoom(limit, max(0, limit - used)),
        shard_bytes=shard_bytes(work, layout),
        num_shards=mesh.num_shards,
        workers=workers,
        buddy=needs_buddy(job, mesh),
        shards=mesh.shards_per_node(workers),
    )
