"""The plan of a job on given nodes, which `holdfast spec plan` shows: what runs where, and why."""

from __future__ import annotations

import msgspec

from ..api.v1alpha1 import TrainingJob
from ..api.v1alpha1.job import redacted
from ..api.v1alpha1.remarks import remarks
from ..planner.choose import choose_mesh, may_fit, memory_on, num_nodes_used
from ..planner.memory import WorkerMemory, describe_host, device_bytes
from ..planner.micro_batch import describe as describe_micro_batch
from ..planner.micro_batch import fitted_layout
from ..planner.workload import Workload, workload_of
from ..protocol.environment import Setting, explain_environment
from ..protocol.fabric import choose_profile
from ..protocol.facts import Membership, NodeFacts, WorkerSeat
from ..protocol.host_memory import HostMemory, describe
from ..protocol.mesh import Mesh
from .advice import Way, ways_to_fit
from .estimate import Estimate, estimate, fits
from .host import HostRow, host_rows, plan_host
from .step_time import Hardware
from .strategies import Strategies, strategies_of

WAITS = "the job waits: no whole replica group fits"


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
    estimate: Estimate | None = None
    """Estimate of the recipe on this mesh; None for scripts and modules."""
    host: tuple[HostRow, ...] = ()
    """Main memory of a node, and storage."""
    device_memory_bytes: int | None = None
    micro_batch_why: str = ""
    """Reason why microBatch auto is less than a rank's share; empty: it is not."""
    offload_memory: str = ""
    """The main memory that a worker's offloaded states may take; empty: neither the job nor a way
    to fit offloads."""
    fits: bool | None = None
    """True if the estimate leaves enough of the device free; None: model or device is not known."""
    ways: tuple[Way, ...] = ()
    """Changes that make it fit, the nearest first; empty if it fits or it is not known."""
    strategies: Strategies | None = None
    """Other layouts on the same devices; None: model, hardware or memory is not known."""
    host_memory: HostMemory | None = None
    """Estimate of the staged state that a node's main memory can hold; None: not known."""
    warnings: tuple[str, ...] = ()


def make_plan(
    job: TrainingJob,
    facts: NodeFacts,
    num_nodes: int | None = None,
    device_memory_bytes: int | None = None,
    gpus: str = "",
    hardware: Hardware | None = None,
) -> Plan | None:
    """The plan on `num_nodes` nodes (default: nodes.max) like the one in `facts`; None when no
    replica group fits on them. `gpus`: what `resources.gpu: auto` was decided from. `hardware`:
    what a step is timed on; None: not known."""
    memory = memory_on(job, [facts])
    if device_memory_bytes is not None:
        memory = memory._replace(device=device_memory_bytes)
    if num_nodes is None:
        num_nodes = job.spec.nodes.max
    chosen = choose_mesh(job, num_nodes, memory)
    if chosen is None:
        return None
    mesh, why = chosen
    used = num_nodes_used(job, mesh)
    profile, profile_why = choose_profile(job.spec.fabric, facts, used)
    gpu = job.spec.resources.num_gpus > 0
    host = plan_host(job, mesh, facts)
    sizes = _sizes(job, memory)
    work = workload_of(job)
    figures, why_smaller, strategies = None, "", None
    fitting: bool | None = None
    ways: tuple[Way, ...] = ()
    if work is not None:
        layout = fitted_layout(job, mesh, memory.device)
        figures = estimate(work, layout, hardware)
        why_smaller = describe_micro_batch(job, layout, work)
        strategies = strategies_of(job, layout, memory, hardware)
        fitting = _fits(job, mesh, memory, figures)
        if fitting is False:
            ways = ways_to_fit(job, num_nodes, memory, hardware)
    offloads = job.spec.parallelism.offload == "cpu" or any(
        "parallelism.offload" in way.changes for way in ways
    )
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
        parameters=work.counts.total if work is not None else None,
        estimate=figures,
        host=host_rows(job, mesh, host),
        device_memory_bytes=memory.device,
        micro_batch_why=why_smaller,
        offload_memory=describe_host(memory.host) if offloads else "",
        fits=fitting,
        ways=ways,
        strategies=strategies,
        host_memory=host,
        warnings=(
            *_warnings(job, mesh, facts, sizes, memory.device),
            *_format_warnings(work, hardware),
            *_host_warnings(host),
        ),
    )


def _fits(job: TrainingJob, mesh: Mesh, memory: WorkerMemory, figures: Estimate) -> bool | None:
    """None: not known."""
    may = may_fit(job, mesh, memory)
    if memory.device is not None:
        return may and fits(figures.peak_bytes, memory.device)
    return None if may else False


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
    for index, var in enumerate(settings):
        if var.source == "user":
            settings[index] = msgspec.structs.replace(var, value=redacted(var.name, var.value))
    return settings


def _sizes(job: TrainingJob, memory: WorkerMemory) -> tuple[SizePlan, ...]:
    """The sizes that the job may have, fewest nodes first; of a wide range five of them."""
    nodes = job.spec.nodes
    counts = range(nodes.min, nodes.max + 1)
    if len(counts) > 8:
        counts = range(nodes.min, nodes.max + 1, (nodes.max - nodes.min) // 4)
    recipe, work = job.spec.entrypoint.recipe, workload_of(job)
    sizes = []
    for count in sorted({*counts, nodes.max}):
        mesh, why = choose_mesh(job, count, memory) or (None, WAITS)
        if mesh is None:
            sizes.append(SizePlan(nodes=count, mesh=None, why=why))
            continue
        size = SizePlan(nodes=count, mesh=mesh, why=why, nodes_used=num_nodes_used(job, mesh))
        if recipe is not None and work is not None:
            size = msgspec.structs.replace(
                size,
                samples_per_rank=recipe.config.global_batch / mesh.data_parallel_size,
                device_bytes=device_bytes(work, fitted_layout(job, mesh, memory.device)),
            )
        sizes.append(size)
    return tuple(sizes)


def _warnings(
    job: TrainingJob,
    mesh: Mesh,
    facts: NodeFacts,
    sizes: tuple[SizePlan, ...],
    device_memory_bytes: int | None,
) -> list[str]:
    texts = remarks(job)
    tight = [
        size
        for size in sizes
        if size.device_bytes and device_memory_bytes and size.nodes < job.spec.nodes.max
        if not fits(size.device_bytes, device_memory_bytes)
    ]
    if tight and device_memory_bytes:
        largest = max(tight, key=lambda size: size.device_bytes or 0)
        nodes = ", ".join(str(size.nodes) for size in tight)
        texts.append(
            f"on {nodes} node{'s' * (tight[-1].nodes > 1)} a worker needs up to "
            f"{(largest.device_bytes or 0) / 2**30:.1f} GiB of {device_memory_bytes / 2**30:.1f} "
            f"GiB; a job that shrinks to this may run out of memory: raise nodes.min"
        )
    inner = mesh.tensor * mesh.context
    if inner > job.spec.workers_per_node:
        texts.append(
            f"tensor x context = {inner} spans nodes of {job.spec.workers_per_node} workers: "
            f"every layer waits for the network between them"
        )
    gpus = job.spec.resources.num_gpus
    if facts.gpus and not gpus:
        texts.append(
            f"resources.gpu is 0, so the job trains on the CPU; {facts.hostname} has "
            f"{len(facts.gpus)} x {facts.gpus[0].name}"
        )
    if facts.gpus and len(facts.gpus) < job.spec.workers_per_node * gpus:
        each = "a GPU" if gpus == 1 else f"{gpus} GPUs"
        texts.append(
            f"{job.spec.workers_per_node} workers need {each} each; {facts.hostname} has "
            f"{len(facts.gpus)}"
        )
    if (
        not mesh.redundant(job.spec.workers_per_node)
        and job.spec.checkpoint.memory.buddy == "never"
    ):
        replica = "one replica" if mesh.replicate == 1 else "all replicas of a stage on one node"
        texts.append(
            f"{replica} and no buddy copies: after a lost node the job restores from storage"
        )
    return texts


def _format_warnings(work: Workload | None, hardware: Hardware | None) -> list[str]:
    if work is None or hardware is None or not work.on_gpu:
        return []
    name, flops = hardware.device.name, hardware.device.flops
    if work.format in flops or "float16" not in flops:
        return []
    return [
        f"{name} has no {work.format}, and is timed as in float32: set "
        "parallelism.precision.parameters: float16, whose loss is scaled"
    ]


def _host_warnings(host: HostMemory | None) -> list[str]:
    if host is None or host.grant.given_up == "nothing":
        return []
    return [
        f"host memory, by estimate: {describe(host, 'a node')}; the agents measure before they "
        "give buffers; more workers per copy (parallelism.shard) or more memory help"
    ]
