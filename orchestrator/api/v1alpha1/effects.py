"""Fields that the models accept and that would have no effect, or another one than they promise.

Checked when a job is submitted. A job that runs already keeps its spec: its journal holds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from holdfast.orchestrator.errors import Problem

from . import mesh_checks
from .job import TrainingJob
from .parallelism import Ddp, Parallelism

PREFIX = "spec.parallelism."
ROW_OF_8_BITS = 256
"""Values of a row that share a scale, see adamw8bit.py."""
SIDE_OF_FLOAT8 = 16
"""What divides both sides of a matrix that torchao converts, see float8.py."""
RECIPE_ONLY = (
    "precision", "activation_checkpointing", "offload", "reshard_after_forward",
    "accumulate_gradients", "prefetch_blocks", "ddp",
    "pipeline_schedule", "pipeline_stages_per_rank",
)  # fmt: skip


def without_effect(job: TrainingJob, *, as_written: bool = False) -> list[Problem]:
    """Every such field with the fix. `as_written`: the job is as a user wrote it; an API server
    fills in defaults."""
    recipe = job.spec.entrypoint.recipe
    found = list(_script_effects(job) if recipe is None else _recipe_effects(job))
    found += _tensor_axis_effects(job)
    found += _guard_effects(job)
    found += _elasticity_effects(job, as_written)
    if job.spec.recovery.gpu_standbys and job.spec.resources.gpu not in ("auto", 1):
        got = f"true with resources.gpu {job.spec.resources.gpu}"
        fix = "set spec.resources.gpu: 1, or remove the field"
        found.append(Problem("spec.recovery.gpuStandbys", got, "it with one GPU per worker", fix))
    if job.spec.ray.accelerator_type is not None and job.spec.resources.gpu == 0:
        got = f"{job.spec.ray.accelerator_type} for a job on CPUs"
        fix = "spec.resources.gpu: 1, or remove the field"
        found.append(Problem("spec.ray.acceleratorType", got, "it for a job on GPUs", fix))
    return found


def _script_effects(job: TrainingJob) -> Iterator[Problem]:
    program = job.spec.entrypoint.program
    if program.python or program.words or program.runner:
        what = program.python or " ".join(program.runner) or program.words[0]
        expected = "it for scripts and modules of Holdfast's own Python"
        fix = f"{what} imports and starts everything itself; remove the field"
        if job.spec.preload:
            yield Problem("spec.preload", f"modules for {what}", expected, fix)
        if job.spec.recovery.gpu_standbys:
            yield Problem("spec.recovery.gpuStandbys", f"true with {what}", expected, fix)
    for name in RECIPE_ONLY:
        field = Parallelism.model_fields[name]
        value = getattr(job.spec.parallelism, name)
        if value != field.default:
            yield Problem(
                PREFIX + (field.alias or name),
                "a value for a script or module",
                "it for a recipe only",
                "your own loop decides this, where it calls fully_shard or torch.autocast; remove "
                "the field",
            )


def _tensor_axis_effects(job: TrainingJob) -> Iterator[Problem]:
    if problem := mesh_checks.tensor_over_nodes(job.spec):
        yield dataclasses.replace(problem, field=f"spec.{problem.field}")
    mesh, workers = job.spec.parallelism, job.spec.workers_per_node
    if mesh.tensor_over_nodes and workers % mesh.tensor == 0:
        yield Problem(
            f"{PREFIX}tensorOverNodes",
            f"true with tensor {mesh.tensor} and {workers} workers on a node",
            "it with a tensor axis that spans nodes",
            "remove the field",
        )


def _elasticity_effects(job: TrainingJob, as_written: bool) -> Iterator[Problem]:
    nodes, workers, allowed = job.spec.nodes, job.spec.workers_per_node, job.spec.elasticity
    low, full, where = nodes.min * workers, nodes.max * workers, "spec.elasticity"
    chosen = nodes.min > 1 or (as_written and "min" in nodes.model_fields_set)
    if allowed == "fixed" and chosen and nodes.min < nodes.max:
        fix = f"set nodes.min: {nodes.max}, or elasticity: any"
        yield Problem("spec.nodes.min", f"{nodes.min} with elasticity: fixed", str(nodes.max), fix)
    if isinstance(allowed, str):
        return
    expected = (
        f"sizes from {low} (nodes.min {nodes.min} x workersPerNode {workers}) to {full} "
        f"(nodes.max {nodes.max} x {workers})"
    )
    for size in allowed:
        if not low <= size <= full:
            yield Problem(where, f"{size} workers", expected, "remove it, or change nodes")
    for size in {one: None for one in allowed if allowed.count(one) > 1}:
        yield Problem(where, f"{size} workers more than once", "each size once", "write it once")
    if max(allowed) < full:
        fix = f"add {full}, or set nodes.max: {max(allowed) // workers}"
        got = f"at most {max(allowed)} workers"
        yield Problem(where, got, f"the full size of {full} among them", fix)


def _guard_effects(job: TrainingJob) -> Iterator[Problem]:
    checkpoint = job.spec.checkpoint
    is_recipe = job.spec.entrypoint.recipe is not None
    expected = "it for scripts, modules and commands"
    fix = "a recipe has no checkpoints of its own; remove the field"
    if is_recipe and checkpoint.guard != "auto":
        yield Problem("spec.checkpoint.guard", f"{checkpoint.guard} for a recipe", expected, fix)
    if is_recipe and checkpoint.guard_directories:
        got = "directories for a recipe"
        yield Problem("spec.checkpoint.guardDirectories", got, expected, fix)
    elif checkpoint.guard == "never" and job.spec.entrypoint.resume_args:
        got, fix = "arguments with checkpoint.guard: never", "remove one of the two"
        expected = "them with guard: auto, which finds the checkpoint"
        yield Problem("spec.entrypoint.resumeArgs", got, expected, fix)
    elif checkpoint.guard == "never" and checkpoint.guard_directories:
        got = "directories with guard: never"
        fix = "remove one of the two"
        yield Problem("spec.checkpoint.guardDirectories", got, "them with guard: auto", fix)


def _recipe_effects(job: TrainingJob) -> Iterator[Problem]:
    yield from _float8_effects(job)
    yield from _shard_effects(job)
    yield from _replica_effects(job)
    yield from _pipeline_effects(job)
    yield from _activation_effects(job)
    yield from _config_effects(job)
    yield from _optimizer_effects(job)
    yield from _in_backward(job)
    mesh = job.spec.parallelism
    if mesh.precision.reduce == "bfloat16" and _world(job) == mesh.tensor * mesh.pipeline:
        yield Problem(
            f"{PREFIX}precision.reduce",
            "bfloat16 without ranks that divide the data",
            "float32, or more workers",
            "the gradients of one copy of the model are not reduced",
        )


def _float8_effects(job: TrainingJob) -> Iterator[Problem]:
    mesh = job.spec.parallelism
    if mesh.precision.linear != "float8":
        return
    where = f"{PREFIX}precision.linear"
    if job.spec.resources.gpu == 0:
        fix = "use GPUs of compute capability 8.9 or above, or linear: auto"
        yield Problem(where, "float8 for a job on CPUs", "auto", fix)
    if mesh.tensor > 1:
        yield Problem(
            where,
            f"float8 with parallelism.tensor {mesh.tensor}",
            "it without a tensor axis",
            "the columns of a weight share scales, and the axis divides them; remove one of the "
            "two",
        )
    recipe = job.spec.entrypoint.recipe
    assert recipe is not None
    dim = recipe.config.model.dim
    if dim % SIDE_OF_FLOAT8:
        yield Problem(
            where,
            f"float8 with model.dim {dim}",
            f"a multiple of {SIDE_OF_FLOAT8}",
            "no matrix of a block has two such sides; change model.dim, or use linear: auto",
        )


def _shard_effects(job: TrainingJob) -> Iterator[Problem]:
    """What only FSDP2 does."""
    spec, mesh = job.spec, job.spec.parallelism
    one_copy = (mesh.shard in (1, "auto") and mesh.context == 1) or _world(job) == 1
    with_shard, whole = f"with shard {mesh.shard}", "every rank has the whole model"
    if mesh.shard == "auto":
        with_shard, whole = "with shard: auto", "auto may choose 1, where it has no effect"
    if mesh.offload == "cpu" and spec.resources.gpu == 0:
        yield Problem(
            f"{PREFIX}offload",
            "cpu for a job on CPUs",
            "none",
            "everything is in main memory already",
        )
    elif mesh.offload == "cpu" and one_copy:
        yield Problem(
            f"{PREFIX}offload",
            f"cpu {with_shard}",
            "none, or a shard above 1",
            f"{whole}; set parallelism.shard to a number above 1, or world",
        )
    for name in ("reshard_after_forward", "accumulate_gradients", "prefetch_blocks"):
        field, value = Parallelism.model_fields[name], getattr(mesh, name)
        if value != field.default and one_copy:
            yield Problem(
                PREFIX + (field.alias or name),
                f"{str(value).lower()} {with_shard}",
                "it with a shard above 1",
                f"{whole}; set parallelism.shard to a number above 1, or world",
            )
    recipe = spec.entrypoint.recipe
    assert recipe is not None
    if mesh.accumulate_gradients == "whole" and recipe.config.micro_batch == "auto":
        yield Problem(
            f"{PREFIX}accumulateGradients",
            "whole with microBatch: auto",
            "it with several micro-batches",
            "with one micro-batch nothing is accumulated; set microBatch, or remove the field",
        )
    layers = recipe.config.model.num_layers
    if mesh.prefetch_blocks >= layers:
        yield Problem(
            f"{PREFIX}prefetchBlocks",
            str(mesh.prefetch_blocks),
            f"less than model.numLayers ({layers})",
            "lower it, or remove the field",
        )


def _pipeline_effects(job: TrainingJob) -> Iterator[Problem]:
    mesh, fields = job.spec.parallelism, Parallelism.model_fields
    for name in ("pipeline_schedule", "pipeline_stages_per_rank"):
        if mesh.pipeline == 1 and getattr(mesh, name) != fields[name].default:
            yield Problem(
                f"{PREFIX}{fields[name].alias}",
                f"{getattr(mesh, name)} with pipeline 1",
                "it with a pipeline",
                "set parallelism.pipeline, or remove the field",
            )
    for name in ("reshard_after_forward", "accumulate_gradients", "prefetch_blocks"):
        if mesh.pipeline > 1 and getattr(mesh, name) != fields[name].default:
            yield Problem(
                f"{PREFIX}{fields[name].alias}",
                f"{str(getattr(mesh, name)).lower()} with pipeline {mesh.pipeline}",
                "it without a pipeline",
                "a pipeline gathers parameters and reduces gradients once in a step; remove the "
                "field",
            )


def _replica_effects(job: TrainingJob) -> Iterator[Problem]:
    """What only DDP does."""
    mesh, world = job.spec.parallelism, _world(job)
    if mesh.ddp == Ddp():
        return
    one_copy = mesh.shard == 1 or mesh.replicate == world
    if mesh.inner > 1 or not one_copy or world == 1:
        yield Problem(
            f"{PREFIX}ddp",
            "it for one worker" if world == 1 else "it for a model that an axis may divide",
            "it with shard: 1 and several workers",
            "only DDP uses it; remove the field, or set parallelism.shard: 1",
        )

    recipe = job.spec.entrypoint.recipe
    assert recipe is not None
    if mesh.ddp.static_graph and recipe.config.micro_batch != "auto":
        yield Problem(
            f"{PREFIX}ddp.staticGraph",
            f"true with microBatch: {recipe.config.micro_batch}",
            "it with microBatch: auto",
            "with a static graph DDP reduces in every backward, and cannot wait for the last "
            "micro-batch; remove one of the two",
        )


def _activation_effects(job: TrainingJob) -> Iterator[Problem]:
    settings = job.spec.parallelism.activation_checkpointing
    where, recipe = f"{PREFIX}activationCheckpointing", job.spec.entrypoint.recipe
    acts_with = {
        "every_nth_block": ("full", "selective"),
        "keep": ("selective",),
        "budget": ("budget",),
    }
    for name, modes in acts_with.items():
        field = type(settings).model_fields[name]
        if getattr(settings, name) != field.default and settings.mode not in modes:
            yield Problem(
                f"{where}.{field.alias or name}",
                f"it with mode {settings.mode}",
                f"mode {' or '.join(modes)}",
                "set the mode, or remove the field",
            )
    assert recipe is not None
    blocks, every = recipe.config.model.num_layers, settings.every_nth_block
    ranks = job.spec.parallelism.pipeline
    if settings.mode in acts_with["every_nth_block"] and every > blocks // ranks:
        yield Problem(
            f"{where}.everyNthBlock",
            str(every),
            f"at most {blocks // ranks}, the blocks of a rank",
            "no block would be recomputed; lower it, or set mode: none",
        )
    if settings.mode == "budget" and not recipe.config.compile:
        yield Problem(
            f"{where}.mode",
            "budget without compile",
            "budget with entrypoint.recipe.config.compile: true",
            "torch.compile chooses what is recomputed; set compile: true, or use mode selective",
        )


def _optimizer_effects(job: TrainingJob) -> Iterator[Problem]:
    recipe, mesh = job.spec.entrypoint.recipe, job.spec.parallelism
    assert recipe is not None
    settings, where = recipe.config.optimizer, "spec.entrypoint.recipe.config.optimizer."
    acts_with = {"momentum": ("muon", "dion"), "rank_fraction": ("dion",)}
    for name, optimizers in acts_with.items():
        field = type(settings).model_fields[name]
        if getattr(settings, name) != field.default and settings.name not in optimizers:
            yield Problem(
                f"{where}{field.alias or name}",
                f"it with {settings.name}",
                f"name {' or '.join(optimizers)}",
                "set the name, or remove the field",
            )
    model = recipe.config.model
    if settings.name == "adamw8bit" and model.dim % ROW_OF_8_BITS and model.ffn % ROW_OF_8_BITS:
        yield Problem(
            f"{where}name",
            f"adamw8bit with model.dim {model.dim} and ffnDim {model.ffn}",
            f"a multiple of {ROW_OF_8_BITS} among them",
            "no matrix has rows whose moments can have 8 bits; change a size, or use adamw",
        )
    if settings.name != "adamw" and mesh.offload == "cpu":
        yield Problem(
            f"{where}name",
            f"{settings.name} with offload: cpu",
            "adamw, or no offload",
            "its step is on the device",
        )
    if settings.name != "adamw" and mesh.tensor > 1:
        yield Problem(
            f"{where}name",
            f"{settings.name} with parallelism.tensor {mesh.tensor}",
            "adamw with a tensor axis",
            "it works on the rows that FSDP2 divides; remove one of the two",
        )


def _in_backward(job: TrainingJob) -> Iterator[Problem]:
    """Each backward is a step, whose gradients are gone when all of them would be known."""
    recipe, mesh = job.spec.entrypoint.recipe, job.spec.parallelism
    assert recipe is not None
    config = recipe.config
    if not config.optimizer.in_backward:
        return
    one_copy = (mesh.shard in ("auto", 1) or mesh.replicate == _world(job)) and mesh.context == 1
    reasons = {
        f"optimizer.gradientClip {config.optimizer.gradient_clip:g}": (
            config.optimizer.gradient_clip > 0,
            "set gradientClip: 0",
        ),
        f"microBatch {config.micro_batch}": (config.micro_batch != "auto", "set microBatch: auto"),
        "parallelism.offload cpu": (
            mesh.offload == "cpu",
            "set offload: none: older versions of torch still copy the gradients that it reads",
        ),
        f"optimizer.name {config.optimizer.name}": (
            config.optimizer.name != "adamw",
            "use adamw",
        ),
        "precision.parameters float16": (
            mesh.precision.parameters == "float16",
            "use bfloat16",
        ),
        f"parallelism.shard {mesh.shard} and several workers": (
            one_copy and _world(job) > 1,
            "set parallelism.shard to a number above 1, or world: DDP reduces gradients later",
        ),
        "a tensor or pipeline axis": (
            mesh.tensor * mesh.pipeline > 1,
            "remove the axis",
        ),
    }
    for got, (wrong, fix) in reasons.items():
        if wrong:
            yield Problem(
                "spec.entrypoint.recipe.config.optimizer.inBackward",
                f"true with {got}",
                "it without",
                f"{fix}, or remove inBackward",
            )


def _world(job: TrainingJob) -> int:
    """Workers with nodes.max nodes."""
    return job.spec.nodes.max * job.spec.workers_per_node


def _config_effects(job: TrainingJob) -> Iterator[Problem]:
    recipe, where = job.spec.entrypoint.recipe, "spec.entrypoint.recipe.config."
    assert recipe is not None
    config = recipe.config
    if config.micro_batch != "auto" and config.micro_batch > config.global_batch:
        yield Problem(
            f"{where}microBatch",
            str(config.micro_batch),
            f"at most globalBatch ({config.global_batch})",
            "use auto, or a smaller number",
        )
    samples = config.data.validation.samples
    if samples != "auto" and not config.evaluate_every_steps:
        yield Problem(
            f"{where}data.validation.samples",
            f"{samples} without evaluateEverySteps",
            "it with an evaluation",
            "set evaluateEverySteps, or remove the field",
        )
    optimizer = config.optimizer
    ratio = type(optimizer).model_fields["min_learning_rate_ratio"].default
    if optimizer.schedule == "constant" and optimizer.min_learning_rate_ratio not in (ratio, 1):
        yield Problem(
            f"{where}optimizer.minLearningRateRatio",
            f"{optimizer.min_learning_rate_ratio:g} with schedule constant",
            "it with a schedule that decays",
            "remove the field, or use cosine, linear or wsd",
        )
