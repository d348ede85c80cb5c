"""Chooses the mesh of a job on a number of nodes, at submission and on every resize.

Replica groups and nodes are always used whole: a shrink never splits a shard group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..api.v1alpha1 import TrainingJob
from ..protocol.facts import NodeFacts
from ..protocol.mesh import Mesh
from .memory import (
    CERTAINLY_TOO_MUCH,
    UNKNOWN,
    USABLE,
    WorkerMemory,
    device_bytes,
    host_share,
    main_memory_holds,
    model_state_bytes,
    whole_share,
)
from .micro_batch import fitted_layout
from .workload import workload_of


def choose_mesh(
    job: TrainingJob, num_nodes: int, memory: WorkerMemory = UNKNOWN
) -> tuple[Mesh, str] | None:
    """The mesh on at most `num_nodes` nodes and the reason; None when no replica group fits on
    them.

    The mesh may use fewer nodes (see num_nodes_used). If the device's memory is not known, that of
    a job on CPUs is spec.resources.memory.
    """
    spec = job.spec
    num_nodes = min(num_nodes, spec.nodes.max)
    if num_nodes < spec.nodes.min:
        return None
    if memory.device is None:
        memory = memory._replace(device=memory_of_worker(job, []))
    if spec.parallelism.shard == "world":
        return _over_world(job, num_nodes, memory)
    shard, why = _shard_size(job, memory)
    mesh = _replicas(job, shard, num_nodes)
    if mesh is None and _is_auto(job):
        # The replica group of the full size does not fit any more: shard over all remaining
        # workers.
        world = num_nodes * spec.workers_per_node
        if world % job.spec.parallelism.inner == 0:
            mesh = _replicas(job, world // job.spec.parallelism.inner, num_nodes)
            why = f"shard auto: all {world} remaining workers share one copy"
            if mesh is not None and not may_fit(job, mesh, memory):
                return None
    if mesh is None:
        return None
    used = num_nodes_used(job, mesh)
    if used < num_nodes:
        why += f"; {used} of {num_nodes} nodes used, to keep replica groups of {mesh.num_shards}"
    elif used < spec.nodes.max:
        groups = f"{mesh.replicate} whole replica group{'s' * (mesh.replicate > 1)}"
        why += f"; {groups}, nodes used: {used}"
    return mesh, why


def memory_on(job: TrainingJob, nodes: Iterable[NodeFacts]) -> WorkerMemory:
    """Memory of a worker on the smallest of these nodes. Plan, launch and resize all use it."""
    facts = list(nodes)
    device = min((gpu.memory_bytes for node in facts for gpu in node.gpus), default=None)
    main = min((node.memory_bytes for node in facts if node.memory_bytes), default=None)
    return memory_of_least(job, device, main)


def memory_of_least(job: TrainingJob, device: int | None, main: int | None) -> WorkerMemory:
    """Same as `memory_on`, from the bytes of the smallest GPU and the smallest main memory."""
    memory = memory_of_worker(job, [] if device is None else [device])
    return WorkerMemory(memory, main and host_share(main, job.spec.workers_per_node))


def memory_of_worker(job: TrainingJob, gpu_memories: Iterable[int]) -> int | None:
    """Bytes of memory of the smallest devices that a worker may get: GPUs with so many bytes, or
    spec.resources.memory for a job on CPUs. None: unknown."""
    if count := job.spec.resources.num_gpus:
        least = min(gpu_memories, default=None)
        return least and least * count
    return int(job.spec.resources.memory) if job.spec.resources.memory else None


def num_nodes_used(job: TrainingJob, mesh: Mesh) -> int:
    """Number of nodes that a mesh fills."""
    return mesh.world_size // job.spec.workers_per_node


def needs_buddy(job: TrainingJob, mesh: Mesh) -> bool:
    """True if agents copy staged shards to another node, because no other node has them too."""
    memory = job.spec.checkpoint.memory
    if not memory.every_steps or mesh.world_size <= job.spec.workers_per_node:
        return False
    redundant = mesh.redundant(job.spec.workers_per_node)
    return memory.buddy == "always" or (memory.buddy == "auto" and not redundant)


def _is_auto(job: TrainingJob) -> bool:
    parallelism = job.spec.parallelism
    return parallelism.shard == "auto" and parallelism.replicate == "auto"


def _over_world(job: TrainingJob, num_nodes: int, memory: WorkerMemory) -> tuple[Mesh, str] | None:
    """One replica on all workers of as many of the nodes as the other axes divide."""
    spec, inner = job.spec, job.spec.parallelism.inner
    for nodes in range(num_nodes, spec.nodes.min - 1, -1):
        world = nodes * spec.workers_per_node
        if world % inner:
            continue
        mesh = _mesh(job, 1, world // inner)
        if nodes < spec.nodes.max and not may_fit(job, mesh, memory):
            return None
        why = f"shard world: all {world} workers share one copy"
        if nodes < num_nodes:
            why += f"; {nodes} of {num_nodes} nodes used, in groups of {inner} workers"
        return mesh, why
    return None


def _replicas(job: TrainingJob, shard: int, num_nodes: int) -> Mesh | None:
    """The mesh with as many replica groups as fill whole nodes; None: not even one group fits."""
    workers, group = job.spec.workers_per_node, shard * job.spec.parallelism.inner
    if group == 0:  # fewer workers than spec.parallelism.replicate
        return None
    unit = math.lcm(group, workers)  # the smallest world of whole groups on whole nodes
    world = num_nodes * workers // unit * unit
    if world == 0 or world // workers < job.spec.nodes.min:
        return None
    return _mesh(job, world // group, shard)


def _mesh(job: TrainingJob, replicate: int, shard: int) -> Mesh:
    axes = job.spec.parallelism
    return Mesh(replicate, shard, axes.tensor, axes.context, axes.pipeline_ranks)


def _shard_size(job: TrainingJob, memory: WorkerMemory) -> tuple[int, str]:
    """The shard size at nodes.max and the reason. Fewer nodes keep it, so they restore from
    memory."""
    spec, parallelism = job.spec, job.spec.parallelism
    if isinstance(parallelism.shard, int):
        return parallelism.shard, f"shard {parallelism.shard} as set"
    room = spec.nodes.max * spec.workers_per_node // job.spec.parallelism.inner
    if parallelism.replicate != "auto":
        shard = room // parallelism.replicate
        return shard, f"shard {shard} follows from replicate {parallelism.replicate}"
    workers = spec.workers_per_node
    node = math.gcd(workers // math.gcd(workers, job.spec.parallelism.inner), room)
    work = workload_of(job)
    if memory.device is None or work is None:
        unknown = "device memory" if work is not None else "the model"
        return (
            node,
            f"shard auto: {_within(node)}; memory not checked: {unknown} is not known",
        )
    # The fewest ranks per copy send least; within a node those that fill it.
    sizes = [n for n in range(1, room + 1) if room % n == 0 and (n % node == 0 or node % n == 0)]
    have, need = f"{memory.device / 2**30:.1f} GiB", 0
    # Passes over a part of the samples gather parameters again: first without.
    for by_memory in (None, memory.device):
        for shard in sizes:
            layout = fitted_layout(job, _mesh(job, room // shard, shard), by_memory)
            need = device_bytes(work, layout)
            if layout.offload and not main_memory_holds(work, layout.mesh, memory.host):
                continue
            if need <= USABLE * memory.device:
                where = _within(shard) if shard in (1, node) else f"{shard} workers share one copy"
                needs = f"needs {need / 2**30:.1f} of {have} per worker"
                return shard, f"shard auto: {where}; {needs}"
    return room, (
        f"shard auto: the whole world, and still {need / 2**30:.1f} GiB per worker by estimate, "
        f"above {USABLE:.0%} of {have}"
    )


def _within(shard: int) -> str:
    if shard == 1:
        return "one worker holds a full copy"
    return f"the {shard} workers of a node share one copy, and nodes replicate it"


def may_fit(job: TrainingJob, mesh: Mesh, memory: WorkerMemory) -> bool:
    """False only if a worker certainly needs more than `memory`. True for scripts and modules,
    whose model is not known."""
    work = workload_of(job)
    if work is None:
        return True
    if memory.device is None:
        if job.spec.resources.num_gpus or memory.host is None:
            return True
        # Of a node's memory only the states are compared: they are exact, and stay for the job.
        states = model_state_bytes(work, fitted_layout(job, mesh, None))
        return states <= whole_share(memory.host)
    layout = fitted_layout(job, mesh, memory.device)
    if layout.offload and not main_memory_holds(work, mesh, memory.host):
        return False
    return device_bytes(work, layout) <= CERTAINLY_TOO_MUCH * memory.device
