"""Checks of spec.parallelism that need other parts of the spec: the number of workers, and what a
recipe divides over each axis; and of the sizes in a launcher's line.

A check takes the spec and returns the first problem in the `got; expected; fix` form, or "".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from .parallelism import ONE_STAGE_PER_RANK, ZERO_BUBBLE, Parallelism
from .recipe import pretraining
from .resilience import Recovery
from .workload import Entrypoint, Nodes, Resources


class SizedSpec(Protocol):
    """Part of a JobSpec that the checks read."""

    @property
    def entrypoint(self) -> Entrypoint: ...
    @property
    def nodes(self) -> Nodes: ...
    @property
    def workers_per_node(self) -> int: ...
    @property
    def resources(self) -> Resources: ...
    @property
    def parallelism(self) -> Parallelism: ...
    @property
    def recovery(self) -> Recovery: ...


def size_problem(spec: SizedSpec) -> str:
    """The first number in a launcher's line that is not the spec's, which decides: in
    the `field: got; expected; fix` form, or ""."""
    nodes, workers = spec.nodes, spec.workers_per_node
    world = nodes.max * workers
    restarts = spec.recovery.budgets.infrastructure.restarts
    field = "spec.recovery.budgets.infrastructure.restarts"
    for size in spec.entrypoint.program.sizes:
        is_range, most = size.least != size.most, size.most
        match size.of:
            case "nodes":
                same = most == nodes.max and (not is_range or size.least == nodes.min)
                has = f"spec.nodes {{min: {nodes.min}, max: {nodes.max}}}"
                write = f"spec.nodes: {{min: {size.least if is_range else 1}, max: {most}}}"
            case "workers":
                same, has = most == workers, f"spec.workersPerNode {workers}"
                write = f"spec.workersPerNode: {most}"
            case "world":
                same = most == world
                has = f"{world} workers (nodes.max {nodes.max} x workersPerNode {workers})"
                write = f"spec.workersPerNode: {most // nodes.max}"
                if most % nodes.max:
                    write = f"nodes.max and workersPerNode with the product {most}"
            case "restarts":
                same, has, write = most == restarts, f"{field} {restarts}", f"{field}: {most}"
        if not same:
            fix = f"write {write}, or remove the option"
            got = f"{size.option} with {has}"
            return f"entrypoint.command: got {got}; expected the same numbers; {fix}"
    return ""


def _sizes(spec: SizedSpec) -> str:
    """The product of the axes is the number of workers with nodes.max nodes."""
    nodes, mesh = spec.nodes, spec.parallelism
    if nodes.max < nodes.min:
        return f"nodes.max: got {nodes.max}; expected at least nodes.min ({nodes.min})"
    world, inner = nodes.max * spec.workers_per_node, mesh.inner
    if world % inner:
        return (
            f"parallelism: got {inner} for tensor x context x pipeline; expected a divisor of "
            f"{world} workers (nodes.max {nodes.max} x workersPerNode {spec.workers_per_node})"
        )
    room, shard = world // inner, mesh.shard
    if shard == "world":
        if mesh.replicate not in ("auto", 1):
            return (
                f"parallelism.replicate: got {mesh.replicate}; expected 1 with shard: world, "
                f"where all ranks share one replica; remove it"
            )
    elif shard != "auto":
        if room % shard:
            return (
                f"parallelism.shard: got {shard}; expected a divisor of {room} workers; "
                f"use {choices(room)}, or world"
            )
        if mesh.replicate not in ("auto", room // shard):
            return (
                f"parallelism.replicate: got {mesh.replicate}; expected {room // shard} "
                f"({room} workers / shard {shard}); use auto or {room // shard}"
            )
    elif mesh.replicate != "auto" and room % mesh.replicate:
        return (
            f"parallelism.replicate: got {mesh.replicate}; expected a divisor of {room} "
            f"workers; use {choices(room)}"
        )
    return ""


def _whole_groups(spec: SizedSpec) -> str:
    """nodes.min holds a whole replica group on whole nodes, see planner/choose.py."""
    shard = _shard(spec)
    group = spec.parallelism.inner * (shard if isinstance(shard, int) else 1)
    need = math.lcm(group, spec.workers_per_node) // spec.workers_per_node
    if spec.nodes.min >= need:
        return ""
    return (
        f"nodes.min: got {spec.nodes.min}; expected at least {need}: replica groups of {group} "
        f"workers, {spec.workers_per_node} on each node, fill whole nodes only then; raise "
        f"nodes.min or lower parallelism.shard"
    )


def _reshard_groups(spec: SizedSpec) -> str:
    shard, keep = _shard(spec), spec.parallelism.fsdp_settings.reshard_after_forward
    if isinstance(keep, bool):
        return ""
    if shard == "world":
        return (
            f"parallelism.fsdp.reshardAfterForward: got {keep}; expected true or false with shard: "
            f"world, which another number of nodes changes"
        )
    if keep < 1 or (isinstance(shard, int) and shard % keep):
        return (
            f"parallelism.fsdp.reshardAfterForward: got {keep}; expected true, false or a divisor "
            f"of shard ({shard})"
        )
    return ""


def _shard(spec: SizedSpec) -> int | str:
    """The shard size as far as the spec gives it."""
    mesh = spec.parallelism
    if mesh.shard != "auto" or mesh.replicate == "auto":
        return mesh.shard
    return spec.nodes.max * spec.workers_per_node // mesh.inner // mesh.replicate


def _gpus_of_a_recipe(spec: SizedSpec) -> str:
    gpus, workers = spec.resources.num_gpus, spec.workers_per_node
    if spec.entrypoint.recipe is None or gpus <= 1:
        return ""
    return (
        f"resources.gpu: got {gpus} for a recipe; expected auto, 0 or 1: a recipe trains "
        f"on one GPU per worker; for all {gpus * workers} GPUs of a node write "
        f"workersPerNode: {gpus * workers} and gpu: 1"
    )


def _axes(spec: SizedSpec) -> str:
    """The axes over which the recipe divides a model."""
    recipe, mesh = spec.entrypoint.recipe, spec.parallelism
    if recipe is None:
        return ""
    sizes = {"tensor": mesh.tensor, "context": mesh.context, "pipeline": mesh.pipeline_ranks}
    for axis, size in sizes.items():
        if size > 1 and (reason := recipe.config.rejects_axis(axis)):
            return (
                f"parallelism.{axis}: got {size} with recipe {recipe.name}; expected 1, as "
                f"{reason}; use parallelism.shard"
            )
    return ""


def _tensor(spec: SizedSpec) -> str:
    """The recipe divides these sizes over the tensor axis, which stays within a node."""
    recipe, tensor = spec.entrypoint.recipe, spec.parallelism.tensor
    if recipe is None or tensor == 1:
        return ""
    if problem := tensor_over_nodes(spec):
        return problem
    config = pretraining(recipe)
    if config is None:
        return ""
    model = config.model
    divided = {
        "model.numHeads": model.num_heads,
        "model.numKvHeads": model.kv_heads,
        "model.ffnDim": model.ffn,
        "model.vocabSize": model.vocab_size,
        "data.sequenceLength": config.data.sequence_length,
    }
    for name, size in divided.items():
        if size % tensor:
            return (
                f"parallelism.tensor: got {tensor}; expected a divisor of {name} ({size}), which "
                f"it divides; change one of the two"
            )
    return ""


def tensor_over_nodes(spec: SizedSpec) -> str:
    """A tensor axis, the innermost, whose ranks are on several nodes, if this is not asked for."""
    workers, mesh = spec.workers_per_node, spec.parallelism
    if workers % mesh.tensor == 0 or mesh.tensor_over_nodes:
        return ""
    return (
        f"parallelism.tensor: got {mesh.tensor}; expected a divisor of workersPerNode ({workers}): "
        f"every layer waits for this axis, here for the network between nodes; use "
        f"{choices(workers)}, or set parallelism.tensorOverNodes: true as well"
    )


def _loss(spec: SizedSpec) -> str:
    """The head computes losses in chunks only where it has all logits of a token."""
    config, axes = pretraining(spec.entrypoint.recipe), spec.parallelism
    if config is None:
        return ""
    loss, where = config.loss, "entrypoint.recipe.config.loss"
    if loss.z_loss and axes.tensor > 1:
        return (
            f"{where}.zLoss: got {loss.z_loss:g} with tensor {axes.tensor}; expected 0, as the "
            f"logits of a token are divided over the tensor axis; remove one of the two"
        )
    if loss.chunk_tokens and axes.tensor > 1:
        return (
            f"{where}.chunkTokens: got {loss.chunk_tokens} with tensor {axes.tensor}; expected 0, "
            f"as this axis passes whole logits to the loss; remove one of the two"
        )
    return ""


def _context(spec: SizedSpec) -> str:
    """Each rank of the context axis has two pieces of every sequence, which the tensor axis divides
    further."""
    config, context = pretraining(spec.entrypoint.recipe), spec.parallelism.context
    if config is None or context == 1:
        return ""
    where = "parallelism.context"
    length, model = config.data.sequence_length, config.model
    for pieces, why in (
        (2 * context, "2 x context pieces"),
        (context * spec.parallelism.tensor, "context x tensor parts"),
    ):
        if length % pieces:
            return (
                f"{where}: got {context}; expected data.sequenceLength ({length}) in {why} "
                f"({pieces}) of the same length; change one of the two"
            )
    if (
        spec.resources.num_gpus
        and spec.parallelism.precision.parameters == "float32"
        and model.kv_heads != model.num_heads
    ):
        return (
            f"{where}: got {context} with precision.parameters float32 and {model.kv_heads} key "
            f"and value heads for {model.num_heads} heads; expected auto or bfloat16, or "
            f"model.numKvHeads: {model.num_heads}: torch's ring on GPUs has no kernel for these"
        )
    return ""


def _pipeline(spec: SizedSpec) -> str:
    """The recipe divides its layers over the stages, and passes micro-batches through them."""
    config, mesh = pretraining(spec.entrypoint.recipe), spec.parallelism
    if config is None or mesh.pipeline is None:
        return ""
    stages = mesh.num_stages
    if wrong := _schedule(mesh, config.compile):
        return wrong
    if config.model.num_layers % stages:
        each = f", {stages} stages with {mesh.stages_per_rank} on each rank"
        return (
            f"parallelism.pipeline.ranks: got {mesh.pipeline.ranks}"
            f"{each * (mesh.stages_per_rank > 1)}; expected a divisor of model.numLayers "
            f"({config.model.num_layers}), which the stages divide; change one of the two"
        )
    ranks = spec.nodes.max * spec.workers_per_node // mesh.inner
    share = -(-config.global_batch // ranks)
    samples = config.samples_per_pass(share, mesh.pipeline.ranks)
    if share <= (mesh.pipeline.ranks - 1) * samples:
        return (
            f"parallelism.pipeline.ranks: got {mesh.pipeline.ranks}; expected at most the number "
            f"of micro-batches of a step ({-(-share // samples)}: globalBatch "
            f"{config.global_batch} over {ranks} ranks of the data axes, {samples} samples each), "
            f"as each rank works on one at a time; raise globalBatch or lower microBatch"
        )
    return ""


def _schedule(mesh: Parallelism, compiled: bool) -> str:
    name, stages = mesh.pipeline_schedule, mesh.stages_per_rank
    if compiled and name in ZERO_BUBBLE:
        return (
            f"parallelism.pipeline.schedule: got {name} with compile: true; expected another "
            f"schedule, as a compiled block computes all its gradients at once; use "
            f"interleaved1f1b, or compile: false"
        )
    single = name in ONE_STAGE_PER_RANK
    if single != (stages == 1) or (name == "zbvZeroBubble" and stages != 2):
        right = "1" if single else "2" if name == "zbvZeroBubble" else "at least 2"
        return (
            f"parallelism.pipeline.stagesPerRank: got {stages}; expected {right} with "
            f"schedule {name}; use auto, or another schedule"
        )
    return ""


def choices(total: int) -> str:
    """The divisors of a number in words: `1, 2 or 4`."""
    divisors = [str(n) for n in range(1, total + 1) if total % n == 0]
    return divisors[0] if len(divisors) == 1 else ", ".join(divisors[:-1]) + " or " + divisors[-1]


MESH_CHECKS: tuple[Callable[[SizedSpec], str], ...] = (
    _sizes,
    _whole_groups,
    _reshard_groups,
    _gpus_of_a_recipe,
    _axes,
    _context,
    _pipeline,
    _tensor,
    _loss,
)
"""The order matters: each check relies on the checks before it."""
