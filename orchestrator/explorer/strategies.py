"""Other strategies for the devices of a job: its recipe divided in every other way, ranked beside
the way that it has. `holdfast spec plan JOB` shows them; nothing is launched.

Each layout is one that the job could be changed to: its fields are written into the job, and what
validation rejects is left out.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ..api.v1alpha1 import TrainingJob
from ..api.v1alpha1.parallelism import Fsdp
from ..planner.memory import WorkerMemory, main_memory_holds
from ..planner.workload import ParallelLayout, workload_of
from .advice import is_valid, with_field
from .estimate import fits
from .ranking import Alternative, Ranked, alternatives_of, best_first, lost_of
from .search import Cluster, estimate, search
from .step_time import Hardware


class Strategies(msgspec.Struct, frozen=True, kw_only=True):
    """The best layout of each strategy on the job's devices."""

    alternatives: tuple[Alternative, ...]
    """Alternatives that fit, best first, the job's own among them."""
    of_job: int | None
    """Index of the job's own; None: it does not fit."""
    lost: tuple[Alternative, ...]
    """Strategies that do not fit."""
    num_considered: int


def strategies_of(
    job: TrainingJob,
    layout: ParallelLayout,
    memory: WorkerMemory,
    hardware: Hardware | None,
) -> Strategies | None:
    """Strategies beside `layout`, the job's own, on as many devices. None: model, hardware or
    memory is not known. A job on CPUs has its share of the node's main memory."""
    work = workload_of(job)
    room = memory.device if job.spec.resources.num_gpus else memory.device or memory.host
    if work is None or hardware is None or not room:
        return None
    devices, per_node = layout.mesh.world_size, layout.workers_per_node
    cluster = Cluster(devices, min(devices, per_node), hardware, room, memory.host)
    hits = search(work, cluster)
    others = [c for c in hits.ranked if is_valid(changed_to(job, c.layout))]
    own = estimate(work, layout, hardware)
    held = not layout.offload or main_memory_holds(work, layout.mesh, memory.host)
    if held and fits(own.num_bytes, room):
        others = [own, *(c for c in others if not _same(c.layout, layout))]
    ranked = best_first(Ranked(c, cluster) for c in others)
    at = next((number for number, c in enumerate(ranked) if c.candidate is own), None)
    return Strategies(
        alternatives=alternatives_of(ranked),
        of_job=at,
        lost=lost_of([(cluster, hits)]),
        num_considered=hits.num_considered,
    )


def changed_to(job: TrainingJob, layout: ParallelLayout) -> TrainingJob:
    """The job with the fields that make this its layout."""
    mesh, whole = layout.mesh, layout.num_micro_batches == 1 and layout.mesh.pipeline == 1
    parallelism = job.spec.parallelism
    reshard = {"reshard_after_forward": layout.reshard}
    fsdp = parallelism.fsdp_settings.model_copy(update=reshard)
    fields: dict[str, Any] = {
        "parallelism.replicate": "auto",
        "parallelism.shard": mesh.shard,
        "parallelism.tensor": mesh.tensor,
        "parallelism.context": mesh.context,
        "parallelism.ddp": parallelism.ddp if mesh.world_size == mesh.replicate else None,
        "parallelism.fsdp": fsdp if fsdp != Fsdp() and mesh.pipeline == 1 else None,
        "parallelism.pipeline": {"ranks": mesh.pipeline, "schedule": layout.schedule}
        if mesh.pipeline > 1
        else None,
        "parallelism.offload": "cpu" if layout.offload else "none",
        "entrypoint.recipe.config.microBatch": "auto" if whole else layout.micro_batch,
        "entrypoint.recipe.config.loss.chunkTokens": layout.chunk_tokens,
        "parallelism.activationCheckpointing": layout.checkpointing,
    }
    group = mesh.world_size // mesh.replicate
    needed = math.lcm(group, layout.workers_per_node) // layout.workers_per_node
    if needed > job.spec.nodes.min:  # of fewer nodes no whole replica group is left
        fields["nodes.min"] = needed
    changed = job
    for field, value in fields.items():
        changed = with_field(changed, field.split("."), value)
    return changed


def _same(one: ParallelLayout, other: ParallelLayout) -> bool:
    return msgspec.structs.replace(one, bucket_view=other.bucket_view) == other
