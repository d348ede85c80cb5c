"""Assignment of ranks to nodes, in whole replica groups; seats, buddies, and the mesh for a number
of nodes. Pure functions over plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .. import limits
from ..api.v1alpha1 import TrainingJob
from ..planner.choose import choose_mesh
from ..planner.memory import UNKNOWN, WorkerMemory
from ..protocol.facts import NodeFacts, WorkerSeat
from ..protocol.mesh import Mesh
from .sizes import elastic_sizes, is_elastic


def mesh_for(job: TrainingJob, num_nodes: int, memory: WorkerMemory = UNKNOWN) -> Mesh | None:
    """The mesh of the job on exactly this many nodes; None: whole replica groups do not fill them,
    it is fewer than the job's minimum, or spec.elasticity does not have this size. `memory` as in
    `choose_mesh`."""
    if not is_elastic(job, num_nodes):
        return None
    chosen = choose_mesh(job, num_nodes, memory)
    if chosen is None or chosen[0].world_size != num_nodes * job.spec.workers_per_node:
        return None
    return chosen[0]


def resized(job: TrainingJob, num_nodes: int) -> TrainingJob:
    """The job as it would be with another number of nodes wanted."""
    nodes = job.spec.nodes
    changed = nodes.model_copy(update={"max": num_nodes, "min": min(nodes.min, num_nodes)})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"nodes": changed})})


def sharded_over_world(job: TrainingJob) -> TrainingJob | None:
    """The job with a mesh that follows a model sharded over all ranks; None: its spec has sizes."""
    parallelism = job.spec.parallelism
    if parallelism.shard != "auto" or parallelism.replicate != "auto":
        return None
    changed = parallelism.model_copy(update={"shard": "world"})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"parallelism": changed})})


def best_size(
    job: TrainingJob,
    limit: int,
    memory: WorkerMemory = UNKNOWN,
    allows: Callable[[int], bool] = lambda world: True,
) -> int:
    """The largest number of nodes <= limit that has a mesh and a world size that `allows`, or 0."""
    workers = job.spec.workers_per_node
    sizes = (size for size in elastic_sizes(job, limit) if allows(size * workers))
    return next((size for size in sizes if mesh_for(job, size, memory)), 0)


def check_resize(job: TrainingJob, num_nodes: int, memory: WorkerMemory = UNKNOWN) -> str:
    """Problem of a requested size; empty: none."""
    if num_nodes < 1:
        return f"nodes: got {num_nodes}; expected at least 1; to free all nodes use suspend"
    if job.spec.elasticity == "fixed" and num_nodes != job.spec.nodes.max:
        return (
            f"nodes: got {num_nodes}; expected {job.spec.nodes.max}: spec.elasticity is fixed; "
            f"submit a job with elasticity: any to train with other sizes"
        )
    if mesh_for(resized(job, num_nodes), num_nodes, memory) is not None:
        return ""
    top = max(num_nodes, job.spec.nodes.max) * 2
    fits = [n for n in range(1, top + 1) if mesh_for(resized(job, n), n, memory) is not None]
    workers = job.spec.workers_per_node
    expected = f"whole replica groups at {workers} workers per node"
    if not isinstance(job.spec.elasticity, str):
        listed = ", ".join(map(str, job.spec.elasticity))
        expected = f"one of the {listed} workers of spec.elasticity, at {workers} per node"
    near = [n for n in fits if n < num_nodes][-1:] + [n for n in fits if n > num_nodes][:1]
    return (
        f"nodes: got {num_nodes}; expected {expected}; use "
        f"{' or '.join(str(n) for n in near) or 'another size'}"
    )


def nodes_per_group(mesh: Mesh, workers_per_node: int) -> int:
    """Nodes that one replica group covers; 1 where a node holds a whole group or more."""
    return max(1, -(-mesh.num_shards // workers_per_node))


def order_newcomers(nodes: Iterable[tuple[str, NodeFacts, int]]) -> tuple[str, ...]:
    """(name, facts, order of joining) -> names, sorted by topology, then by order of joining."""
    ordered = sorted(nodes, key=lambda node: (node[1].topology, node[2]))
    return tuple(name for name, _facts, _sequence in ordered)


def assign(
    previous: tuple[str, ...], available: tuple[str, ...], count: int, group: int
) -> tuple[str, ...]:
    """The node order of the next generation: `count` of the available nodes.

    `previous` is the order of the last generation, `available` may hold its survivors and
    newcomers (in the order in which they should be used), `group` is the number of nodes of a
    replica group. Survivors keep their places; a hole is filled by a survivor of a dropped group
    (it holds state) or a newcomer; when there are too few nodes, whole groups are dropped, the
    most damaged first, and what is left of them is idle. Raises ValueError if too few nodes are
    available or count is no multiple of group.
    """
    if count % group or count > len(available) or len(dict.fromkeys(available)) != len(available):
        raise ValueError(f"{count} nodes in groups of {group} out of {len(available)}")
    alive = dict.fromkeys(available)
    slots: list[list[str | None]] = [
        [name if name in alive else None for name in previous[at : at + group]]
        for at in range(0, len(previous), group)
    ]
    for short in slots:
        short += [None] * (group - len(short))
    wanted = count // group
    by_damage = sorted(range(len(slots)), key=lambda i: (sum(n is None for n in slots[i]), i))
    kept = [slots[i] for i in sorted(by_damage[:wanted])]
    kept += [[None] * group for _ in range(wanted - len(kept))]
    placed = dict.fromkeys(name for slot in kept for name in slot if name is not None)
    displaced = [
        (position, name)
        for i in sorted(by_damage[wanted:])
        for position, name in enumerate(slots[i])
        if name is not None
    ]
    survivors = dict.fromkeys(name for _position, name in displaced)
    newcomers = [name for name in available if name not in placed and name not in survivors]
    return tuple(
        name if name is not None else _filler(position, displaced, newcomers)
        for slot in kept
        for position, name in enumerate(slot)
    )


def _filler(position: int, displaced: list[tuple[int, str]], newcomers: list[str]) -> str:
    """Prefer a node that had the same position in its group: it holds the same shards."""
    for index, (held, name) in enumerate(displaced):
        if held == position:
            del displaced[index]
            return name
    return displaced.pop(0)[1] if displaced else newcomers.pop(0)


def seats_for(mesh: Mesh, num_nodes: int, workers_per_node: int) -> list[tuple[WorkerSeat, ...]]:
    """The seats of each node. One rank of each replicate group persists, balanced over nodes."""
    holders: dict[int, list[int]] = {}
    for rank in range(mesh.world_size):
        holders.setdefault(mesh.shard_index(rank), []).append(rank)
    load = [0] * num_nodes
    persists: dict[int, None] = {}
    for shard in sorted(holders):
        chosen = min(holders[shard], key=lambda rank: (load[rank // workers_per_node], rank))
        load[chosen // workers_per_node] += 1
        persists[chosen] = None
    shard_of = {rank: shard for shard, ranks in holders.items() for rank in ranks}
    return [
        tuple(
            WorkerSeat(rank, rank - first, shard_of[rank], rank in persists)
            for rank in range(first, first + workers_per_node)
        )
        for first in range(0, num_nodes * workers_per_node, workers_per_node)
    ]


def buddies(
    job: TrainingJob, mesh: Mesh, members: tuple[str, ...], facts: dict[str, NodeFacts]
) -> dict[str, str]:
    """Node -> the node that gets a copy of what it stages; empty where none is needed.

    The next node of another failure domain, else the next one. Following nodes of the order keep
    the load even: each node is the buddy of about one.
    """
    memory = job.spec.checkpoint.memory
    redundant = memory.buddy == "auto" and mesh.redundant(job.spec.workers_per_node)
    if memory.every_steps == 0 or memory.buddy == "never" or redundant or len(members) < 2:
        return {}
    domains = [facts[name].failure_domain or name for name in members]
    size, chosen = len(members), dict[str, str]()
    apart: int | None = None  # the first member behind `index` in another domain, going round
    for index in reversed(range(2 * size)):
        after = (index + 1) % size
        if domains[after] != domains[index % size]:
            apart = after
        if index < size:
            chosen[members[index]] = members[after if apart is None else apart]
    return {name: chosen[name] for name in members}


def persist_cadence(job: TrainingJob) -> int:
    """Steps between persists by the agents themselves; 0: the controller requests them, by time."""
    storage = job.spec.checkpoint.storage
    if storage.every_steps is not None:
        return storage.every_steps
    return 0 if storage.every_s is not None else limits.STORAGE_EVERY_STEPS
