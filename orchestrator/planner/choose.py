"""Chooses the mesh of a job on a number of nodes, at submission and on every resize.

Replica groups and nodes are always used whole: a shrink never splits a shard group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..api.v1alpha1 import TrainingJob
from ..protocol.facts import NodeFacts
from ..protocol.mesh import Mesh
from .costs import USABLE, device_bytes, memory_table, model_state_bytes


def choose_mesh(
    job: TrainingJob, num_nodes: int, device_memory_bytes: int | None = None
) -> tuple[Mesh, str] | None:
    """The mesh on at most `num_nodes` nodes and the reason; None when no replica group fits on
    them.

    The mesh may use fewer nodes (see num_nodes_used). `device_memory_bytes` is the memory of one
    worker; None: spec.resources.memory for a job on CPUs, otherwise unknown.
    """
    spec = job.spec
    num_nodes = min(num_nodes, spec.nodes.max)
    if num_nodes < spec.nodes.min:
        return None
    if device_memory_bytes is None:
        device_memory_bytes = smallest_device(job, [])
    if spec.parallelism.shard == "world":
        return _over_world(job, num_nodes, device_memory_bytes)
    shard, why = _shard_size(job, device_memory_bytes)
    mesh = _replicas(job, shard, num_nodes)
    if mesh is None and _is_auto(job):
        # The replica group of the full size does not fit any more: shard over all remaining
        # workers.
        world = num_nodes * spec.workers_per_node
        if world % job.spec.parallelism.inner == 0:
            mesh = _replicas(job, world // job.spec.parallelism.inner, num_nodes)
            why = f"shard auto: all {world} remaining workers share one copy"
            if mesh is not None and not _states_fit(job, mesh, device_memory_bytes):
                return None
    if mesh is None:
        return None
    used = num_nodes_used(job, mesh)
    if used < num_nodes:
        why += f"; {used} of {num_nodes} nodes used, to keep replica groups of {mesh.num_shards}"
    elif used < spec.nodes.max:
        why += f"; {mesh.replicate} whole replica group{'s' * (mesh.replicate > 1)} on {used} nodes"
    return mesh, why


def smallest_device(job: TrainingJob, nodes: Iterable[NodeFacts]) -> int | None:
    """Bytes of memory of the smallest devices that a worker may get: GPUs of these nodes, or
    spec.resources.memory for a job on CPUs. None: unknown. Plan, launch and resize all use it."""
    if count := job.spec.resources.num_gpus:
        least = min((gpu.memory_bytes for node in nodes for gpu in node.gpus), default=None)
        return least and least * count
    return int(job.spec.resources.memory) if job.spec.resources.memory else None


def num_nodes_used(job: TrainingJob, mesh: Mesh) -> int:
    """Number of nodes that a mesh fills."""
    return mesh.world_size // job.spec.workers_per_node


def _is_auto(job: TrainingJob) -> bool:
    parallelism = job.spec.parallelism
    return parallelism.shard == "auto" and parallelism.replicate == "auto"


def _over_world(job: TrainingJob, num_nodes: int, memory: int | None) -> tuple[Mesh, str] | None:
    """One replica on all workers of as many of the nodes as the other axes divide."""
    spec, inner = job.spec, job.spec.parallelism.inner
    for nodes in range(num_nodes, spec.nodes.min - 1, -1):
        world = nodes * spec.workers_per_node
        if world % inner:
            continue
        mesh = _mesh(job, 1, world // inner)
        if nodes < spec.nodes.max and not _states_fit(job, mesh, memory):
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
    return Mesh(replicate, shard, axes.tensor, axes.context, axes.pipeline)


def _shard_size(job: TrainingJob, memory: int | None) -> tuple[int, str]:
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
    if memory is None or spec.entrypoint.recipe is None:
        unknown = "device memory" if spec.entrypoint.recipe else "the model"
        return (
            node,
            f"shard auto: {_within(node)}; memory not checked: {unknown} is not known",
        )
    for shard in (n for n in range(node, room + 1) if room % n == 0 and n % node == 0):
        need = device_bytes(memory_table(job, _mesh(job, room // shard, shard)))
        if need <= USABLE * memory:
            where = _within(shard) if shard == node else f"{shard} workers share one copy"
            numbers = f"{need / 2**30:.1f} of {memory / 2**30:.1f} GiB"
            return shard, f"shard auto: {where}; needs {numbers} per worker"
    need = device_bytes(memory_table(job, _mesh(job, 1, room)))
    return room, (
        f"shard auto: the whole world, and still {need / 2**30:.1f} GiB per worker by estimate, "
        f"above {USABLE:.0%} of {memory / 2**30:.1f} GiB"
    )


def _within(shard: int) -> str:
    if shard == 1:
        return "one worker holds a full copy"
    return f"the {shard} workers of a node share one copy, and nodes replicate it"


def _states_fit(job: TrainingJob, mesh: Mesh, memory: int | None) -> bool:
    """False only if the model states alone, which are exact, exceed the memory."""
    recipe = job.spec.entrypoint.recipe
    if memory is None or recipe is None:
        return True
    return model_state_bytes(recipe.config, mesh) <= memory
