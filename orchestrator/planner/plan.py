"""The plan of a job on given nodes, which `holdfast plan` shows: what runs where, and why."""

from __future__ import annotations

import math

import msgspec

from ..api.v1alpha1 import TrainingJob
from ..api.v1alpha1.job import redacted
from ..api.v1alpha1.remarks import remarks
from ..protocol.environment import Setting, explain_environment
from ..protocol.fabric import choose_profile
from ..protocol.facts import Membership, NodeFacts, WorkerSeat
from ..protocol.host_memory import HostMemory, describe
from ..protocol.mesh import Mesh
from . import costs
from .choose import choose_mesh, num_nodes_used, smallest_device


class RankPlan(msgspec.Struct, frozen=True):
    rank: int
    local_rank: int
    shard: int
    coordinates: dict[str, int]


class NodePlan(msgspec.Struct, frozen=True):
    node_rank: int
    ranks: tuple[RankPlan, ...]


class SizePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The mesh of the job with a number of nodes."""

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
    gpus_per_worker: int
    gpus_why: str
    nodes: tuple[NodePlan, ...]
    environment: tuple[Setting, ...]
    """Environment of rank 0. Addresses and the port are examples."""
    sizes: tuple[SizePlan, ...]
    parameters: int | None = None
    """Number of parameters of the recipe's model; None for scripts and modules."""
    flops_per_step: float | None = None
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    memory: tuple[costs.MemoryEstimate, ...] = ()
    traffic: tuple[costs.Traffic, ...] = ()
    device_memory_bytes: int | None = None
    host_memory: HostMemory | None = None
    """What a node's main memory is estimated to hold of staged state; None: not known."""
    warnings: tuple[str, ...] = ()


def make_plan(
    job: TrainingJob,
    facts: NodeFacts,
    num_nodes: int | None = None,
    device_memory_bytes: int | None = None,
    gpus: str = "",
) -> Plan | None:
    """The plan on `num_nodes` nodes (default: nodes.max) like the one in `facts`; None when no
    replica group fits on them. `gpus`: what `resources.gpu: auto` was decided from."""
    if device_memory_bytes is None:
        device_memory_bytes = smallest_device(job, [facts])
    if num_nodes is None:
        num_nodes = job.spec.nodes.max
    chosen = choose_mesh(job, num_nodes, device_memory_bytes)
    if chosen is None:
        return None
    mesh, why = chosen
    used = num_nodes_used(job, mesh)
    profile, profile_why = choose_profile(job.spec.fabric, facts, used)
    gpu = job.spec.resources.num_gpus > 0
    host = costs.plan_host(job, mesh, facts)
    rows = costs.memory_table(job, mesh, host)
    sizes = _sizes(job, device_memory_bytes)
    recipe = job.spec.entrypoint.recipe
    settings = recipe.config if recipe else None
    return Plan(
        job=job.name,
        num_nodes=used,
        mesh=mesh,
        strategy=mesh.strategy,
        why=why,
        gpus_per_worker=job.spec.resources.num_gpus,
        gpus_why=gpus or "spec.resources.gpu",
        fabric=profile if gpu else "tcp",
        fabric_why=profile_why if gpu else "gloo on the CPU uses TCP only",
        nodes=tuple(_node(job, mesh, node_rank) for node_rank in range(used)),
        environment=tuple(_environment(job, mesh, used, facts)),
        sizes=sizes,
        parameters=costs.count_parameters(settings.model).total if settings else None,
        flops_per_step=(
            costs.flops_per_token(settings) * settings.global_batch * settings.data.sequence_length
            if settings
            else None
        ),
        micro_batch=costs.micro_batch(settings, mesh) if settings else None,
        num_micro_batches=costs.num_micro_batches(settings, mesh) if settings else None,
        memory=rows,
        traffic=costs.traffic_table(job, mesh),
        device_memory_bytes=device_memory_bytes,
        host_memory=host,
        warnings=(
            *_warnings(job, mesh, facts, sizes, device_memory_bytes),
            *_host_warnings(host),
        ),
    )


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
    return [
        msgspec.structs.replace(one, value=redacted(one.name, one.value))
        if one.source == "user"
        else one
        for one in settings
    ]


def _sizes(job: TrainingJob, device_memory_bytes: int | None) -> tuple[SizePlan, ...]:
    """The sizes that the job may have, fewest nodes first; of a wide range five of them."""
    nodes = job.spec.nodes
    counts = range(nodes.min, nodes.max + 1)
    if len(counts) > 8:
        counts = range(nodes.min, nodes.max + 1, (nodes.max - nodes.min) // 4)
    recipe = job.spec.entrypoint.recipe
    sizes = []
    for count in sorted({*counts, nodes.max}):
        chosen = choose_mesh(job, count, device_memory_bytes)
        if chosen is None:
            why = "the job waits: no whole replica group fits"
            sizes.append(SizePlan(nodes=count, mesh=None, why=why))
            continue
        mesh, why = chosen
        share = recipe.config.global_batch / mesh.data_parallel_size if recipe else None
        sizes.append(
            SizePlan(
                nodes=count,
                mesh=mesh,
                why=why,
                nodes_used=num_nodes_used(job, mesh),
                samples_per_rank=share,
                device_bytes=costs.device_bytes(costs.memory_table(job, mesh)) if recipe else None,
            )
        )
    return tuple(sizes)


def _advice(job: TrainingJob, mesh: Mesh | None, device_memory_bytes: int) -> str:
    """What makes the job need less of a device: first what outweighs the rest."""
    recipe, parallelism = job.spec.entrypoint.recipe, job.spec.parallelism
    assert recipe is not None and mesh is not None
    counts = costs.count_parameters(recipe.config.model)
    states = costs.model_state_bytes(recipe.config, mesh)
    if states > costs.USABLE * device_memory_bytes:
        room = costs.USABLE * device_memory_bytes
        shards = math.ceil(costs.state_bytes(recipe.config) * counts.total / room)
        return (
            f"the model states alone need {states / 2**30:.1f} GiB: share them between at least "
            f"{shards} workers (parallelism.shard, nodes.max), or set parallelism.offload: cpu"
        )
    ways = []
    if costs.micro_batch(recipe.config, mesh) > 1:
        ways.append("recipe.config.microBatch: 1")
    if parallelism.activation_checkpointing.mode == "none":
        ways.append("parallelism.activationCheckpointing: {mode: full}")
    ways.append("more workers that share one copy (parallelism.shard)")
    return "set " + " or ".join(ways)


def _warnings(
    job: TrainingJob,
    mesh: Mesh,
    facts: NodeFacts,
    sizes: tuple[SizePlan, ...],
    device_memory_bytes: int | None,
) -> list[str]:
    found = remarks(job)
    for size in sizes:
        need = size.device_bytes
        if need and device_memory_bytes and need > costs.USABLE * device_memory_bytes:
            found.append(
                f"on {size.nodes} node{'s' * (size.nodes > 1)} a worker needs about "
                f"{need / 2**30:.1f} GiB of {device_memory_bytes / 2**30:.1f} GiB; "
                f"{_advice(job, size.mesh, device_memory_bytes)}"
            )
    inner = mesh.tensor * mesh.context
    if inner > job.spec.workers_per_node:
        found.append(
            f"tensor x context = {inner} spans nodes of {job.spec.workers_per_node} workers: "
            f"every layer waits for the network between them"
        )
    gpus = job.spec.resources.num_gpus
    if facts.gpus and not gpus:
        found.append(
            f"resources.gpu is 0, so the job trains on the CPU; {facts.hostname} has "
            f"{len(facts.gpus)} x {facts.gpus[0].name}"
        )
    if facts.gpus and len(facts.gpus) < job.spec.workers_per_node * gpus:
        each = "a GPU" if gpus == 1 else f"{gpus} GPUs"
        found.append(
            f"{job.spec.workers_per_node} workers need {each} each; {facts.hostname} has "
            f"{len(facts.gpus)}"
        )
    alone = not mesh.redundant(job.spec.workers_per_node)
    if alone and job.spec.checkpoint.memory.buddy == "never":
        replica = "one replica" if mesh.replicate == 1 else "all replicas of a stage on one node"
        found.append(
            f"{replica} and no buddy copies: after a lost node the job restores from storage"
        )
    return found


def _host_warnings(host: HostMemory | None) -> list[str]:
    if host is None or host.grant.given_up == "nothing":
        return []
    return [
        f"host memory, by estimate: {describe(host, 'a node')}; the agents measure before they "
        "give buffers; more workers per copy (parallelism.shard) or more memory help"
    ]
