"""The whole plan of a job on given nodes, for people: what will run where, and why.

Owns: Plan. Must not: render it (the command line does) or decide more than choose.py does.
"""

from __future__ import annotations

import msgspec

from ..api.v1alpha1 import TrainingJob
from ..api.v1alpha1.job import redacted
from ..protocol.environment import Setting, explain_environment
from ..protocol.fabric import choose_profile
from ..protocol.facts import Membership, NodeFacts, WorkerSeat
from ..protocol.mesh import Mesh
from . import communication, memory
from .choose import choose_mesh, num_nodes_used
from .model import count_parameters, flops_per_token


class RankPlan(msgspec.Struct, frozen=True):
    rank: int
    local_rank: int
    shard: int
    coordinates: dict[str, int]


class NodePlan(msgspec.Struct, frozen=True):
    node_rank: int
    ranks: tuple[RankPlan, ...]


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What the job does with this many nodes."""

    nodes: int
    mesh: Mesh | None
    why: str
    nodes_used: int = 0
    samples_per_rank: float | None = None
    device_bytes: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    num_nodes: int
    mesh: Mesh
    strategy: str
    why: str
    fabric: str
    fabric_why: str
    nodes: tuple[NodePlan, ...]
    environment: tuple[Setting, ...]
    """Of rank 0. Addresses and the port are examples."""
    sizes: tuple[Size, ...]
    parameters: int | None = None
    """Of the recipe's model; None for scripts and modules."""
    flops_per_step: float | None = None
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    memory: tuple[memory.MemoryEstimate, ...] = ()
    traffic: tuple[communication.Traffic, ...] = ()
    device_memory_bytes: int | None = None
    warnings: tuple[str, ...] = ()


def make_plan(
    job: TrainingJob,
    facts: NodeFacts,
    num_nodes: int | None = None,
    device_memory_bytes: int | None = None,
) -> Plan | None:
    """The plan on `num_nodes` (nodes.max if left out) nodes like the one in `facts`.

    None when no replica group fits on that many.
    """
    if device_memory_bytes is None:
        device_memory_bytes = _device_memory(job, facts)
    wanted = job.spec.nodes.max if num_nodes is None else num_nodes
    chosen = choose_mesh(job, wanted, device_memory_bytes)
    if chosen is None:
        return None
    mesh, why = chosen
    used = num_nodes_used(job, mesh)
    profile, profile_why = choose_profile(job.spec.fabric, facts, used)
    gpu = job.spec.resources.gpu > 0
    rows = memory.table(job, mesh)
    sizes = _sizes(job, device_memory_bytes)
    recipe = job.spec.entrypoint.recipe
    settings = recipe.config if recipe else None
    return Plan(
        job=job.name,
        num_nodes=used,
        mesh=mesh,
        strategy=mesh.strategy,
        why=why,
        fabric=profile if gpu else "tcp",
        fabric_why=profile_why if gpu else "gloo on the CPU speaks TCP only",
        nodes=tuple(_node(job, mesh, node_rank) for node_rank in range(used)),
        environment=tuple(_environment(job, mesh, used, facts)),
        sizes=sizes,
        parameters=count_parameters(settings.model).total if settings else None,
        flops_per_step=(
            flops_per_token(settings) * settings.global_batch * settings.data.sequence_length
            if settings
            else None
        ),
        micro_batch=memory.micro_batch(settings, mesh) if settings else None,
        num_micro_batches=memory.num_micro_batches(settings, mesh) if settings else None,
        memory=rows,
        traffic=communication.table(job, mesh),
        device_memory_bytes=device_memory_bytes,
        warnings=tuple(_warnings(job, mesh, facts, sizes, device_memory_bytes)),
    )


def _device_memory(job: TrainingJob, facts: NodeFacts) -> int | None:
    if job.spec.resources.gpu:
        return min((gpu.memory_bytes for gpu in facts.gpus), default=None)
    return int(job.spec.resources.memory) if job.spec.resources.memory else None


def _node(job: TrainingJob, mesh: Mesh, node_rank: int) -> NodePlan:
    workers = job.spec.workers_per_node
    ranks = []
    for local_rank in range(workers):
        rank = node_rank * workers + local_rank
        at = mesh.coordinates(rank)
        ranks.append(RankPlan(rank, local_rank, mesh.shard_index(rank), at))
    return NodePlan(node_rank, tuple(ranks))


def _environment(job: TrainingJob, mesh: Mesh, used: int, facts: NodeFacts) -> list[Setting]:
    membership = Membership(
        generation=1,
        mesh=mesh,
        num_nodes=used,
        workers_per_node=job.spec.workers_per_node,
        master_address=facts.address,
        master_port=29500,
        restart_count=0,
    )
    seat = WorkerSeat(rank=0, local_rank=0, shard=0, persists=True)
    settings = explain_environment(job, membership, seat, 0, facts)
    return [_shown(one) if one.source == "user" else one for one in settings]


def _shown(setting: Setting) -> Setting:
    return msgspec.structs.replace(setting, value=redacted(setting.name, setting.value))


def _sizes(job: TrainingJob, device_memory_bytes: int | None) -> tuple[Size, ...]:
    """Every size the job may have, fewest nodes first; of a wide range the ends and the middle."""
    nodes = job.spec.nodes
    counts = range(nodes.min, nodes.max + 1)
    if len(counts) > 8:
        counts = range(nodes.min, nodes.max + 1, (nodes.max - nodes.min) // 4)
    recipe = job.spec.entrypoint.recipe
    sizes = []
    for count in sorted({*counts, nodes.max}):
        chosen = choose_mesh(job, count, device_memory_bytes)
        if chosen is None:
            sizes.append(Size(nodes=count, mesh=None, why="no whole replica group fits: it waits"))
            continue
        mesh, why = chosen
        share = recipe.config.global_batch / mesh.data_parallel_size if recipe else None
        sizes.append(
            Size(
                nodes=count,
                mesh=mesh,
                why=why,
                nodes_used=num_nodes_used(job, mesh),
                samples_per_rank=share,
                device_bytes=memory.device_bytes(memory.table(job, mesh)) if recipe else None,
            )
        )
    return tuple(sizes)


def _warnings(
    job: TrainingJob,
    mesh: Mesh,
    facts: NodeFacts,
    sizes: tuple[Size, ...],
    device_memory_bytes: int | None,
) -> list[str]:
    found = []
    for size in sizes:
        need = size.device_bytes
        if need and device_memory_bytes and need > memory.USABLE * device_memory_bytes:
            found.append(
                f"on {size.nodes} node{'s' * (size.nodes > 1)} a worker needs about "
                f"{need / 2**30:.1f} GiB of {device_memory_bytes / 2**30:.1f} GiB; set "
                f"recipe.config.microBatch or parallelism.activationCheckpointing"
            )
    inner = mesh.tensor * mesh.context
    if inner > job.spec.workers_per_node:
        found.append(
            f"tensor x context = {inner} spans nodes of {job.spec.workers_per_node} workers: "
            f"every layer waits for the network between them"
        )
    if facts.gpus and not job.spec.resources.gpu:
        found.append(
            f"resources.gpu is 0, so it trains on the CPU; {facts.hostname} has "
            f"{len(facts.gpus)} x {facts.gpus[0].name}"
        )
    if job.spec.resources.gpu and facts.gpus and len(facts.gpus) < job.spec.workers_per_node:
        found.append(
            f"{job.spec.workers_per_node} workers want a GPU each; {facts.hostname} has "
            f"{len(facts.gpus)}"
        )
    if mesh.replicate == 1 and job.spec.checkpoint.memory.buddy == "never":
        found.append("one replica and no buddy copies: a lost node costs the steps since storage")
    return found
